"""A checkpoint whose weights lie in one GGUF file: its tensors under the names and in the order of Hugging Face.

config.json is taken where the folder has one, else it is made of the file's own keys. llama.cpp's converter turns the
rows of Llama's q and k, in each head the two halves to pairs; `Scheme.heads` says where they must be turned back.
Read with the package gguf. Source: ggml's description of GGUF, llama.cpp's convert_hf_to_gguf.py.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.api.errors import CheckpointError
from engine.api.files import open_file
from engine.models.headers import TensorInfo
from engine.models.parts import Model, attentions
from engine.models.schemes import Form, Quantization, Scheme
from engine.models.sources import join, linear_paths
from engine.models.stored import PLAIN

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
MADE = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
FREQUENCIES = "rope_freqs.weight"  # of llama3's rotary scaling, which config.json says as well
BITS = {"Q4_0": 4, "Q8_0": 8}  # blocks of 32 with a scale in float16, held as they are; other types are restored
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def gguf_file(folder: Path) -> Path | None:
    """The folder's GGUF file, if it has weights in no other form. Raises CheckpointError where there are several."""
    found = sorted(folder.glob("*.gguf"))
    if not found or any(folder.glob("*.safetensors*")):
        return None
    if len(found) > 1:
        raise CheckpointError(
            f"{folder}: has {len(found)} GGUF files, such as {found[0].name} and {found[1].name}; "
            "put the one to serve in a folder of its own (parts of a split file: join them with llama-gguf-split)"
        )
    return found[0]


def read_gguf(file: Path, architecture: str, model: Model) -> tuple[dict[str, TensorInfo], Quantization | None]:
    """Its tensors by their names in the declaration, and how those are stored that are not plain numbers."""
    reader = _reader(file)
    kind = _text(reader, "general.architecture")
    if architecture not in ARCHITECTURES or ARCHITECTURES[architecture] != kind:
        raise CheckpointError(
            f"{file}: is of a {kind!r}, and config.json declares {architecture}; served from GGUF are "
            f"{', '.join(ARCHITECTURES)}"
        )
    tensors = {
        _name(file, tensor.name): TensorInfo(
            file=file,
            dtype=tensor.tensor_type.name,
            shape=tuple(int(size) for size in reversed(tensor.shape)),
            offset=int(tensor.data_offset),
            bytes=int(tensor.n_bytes),
        )
        for tensor in reader.tensors
        if tensor.name != FREQUENCIES
    }
    heads = _heads(model) if kind == "llama" else {}
    paths = [*linear_paths(model), join(model.root, model.embed.name)]
    schemes = {}
    for path in paths:
        info = tensors.get(f"{path}.weight")
        turned = heads.get(path.rsplit(".", 1)[-1], 0)
        if info is not None and (info.dtype not in PLAIN or turned):
            bits = BITS.get(info.dtype, 0)
            form: Form = "turned" if info.dtype in PLAIN else "gguf"
            schemes[path] = Scheme(form=form, bits=bits, group=32 if bits else None, heads=turned)
    return tensors, Quantization("gguf", schemes) if schemes else None


def made_config(file: Path) -> dict[str, Any]:
    """What config.json would say, of the file's keys. Raises CheckpointError for what they do not tell."""
    reader = _reader(file)
    kind = _text(reader, "general.architecture")
    names = {tensor.name: tensor for tensor in reader.tensors}
    if kind not in MADE or FREQUENCIES in names or f"{kind}.rope.scaling.type" in reader.fields:
        what = f"a {kind!r}" if kind not in MADE else f"a {kind!r} with scaled rotary positions"
        raise CheckpointError(f"{file}: is of {what}, which needs the config.json of the model it was made from beside")
    if "token_embd.weight" not in names:
        raise CheckpointError(f"{file}: lacks token_embd.weight")

    def number(key: str) -> Any:
        value = _value(reader, f"{kind}.{key}")
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise CheckpointError(f"{file}: {kind}.{key} is {value!r}; it must be a number above 0")
        return value

    heads, hidden = number("attention.head_count"), number("embedding_length")
    found = {
        "architectures": [MADE[kind]],
        "hidden_size": hidden,
        "intermediate_size": number("feed_forward_length"),
        "max_position_embeddings": number("context_length"),
        "num_attention_heads": heads,
        "num_hidden_layers": number("block_count"),
        "num_key_value_heads": _value(reader, f"{kind}.attention.head_count_kv", heads),
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
        "rope_theta": _value(reader, f"{kind}.rope.freq_base", 10000.0),
        "head_dim": _value(reader, f"{kind}.attention.key_length", hidden // heads),
        "vocab_size": int(names["token_embd.weight"].shape[1]),
        "tie_word_embeddings": "output.weight" not in names,
        "attention_bias": kind != "qwen2" and "blk.0.attn_q.bias" in names,
        "eos_token_id": _value(reader, "tokenizer.ggml.eos_token_id", None),
        "bos_token_id": _value(reader, "tokenizer.ggml.bos_token_id", None),
    }
    return {key: value for key, value in found.items() if value is not None}


def _heads(model: Model) -> Mapping[str, int]:
    attention = attentions(model)[0]
    return {"q_proj": attention.heads, "k_proj": attention.kv_heads}


def _name(file: Path, name: str) -> str:
    layer = _LAYER.fullmatch(name)
    if layer is not None and layer[2] in LAYER_NAMES:
        return f"model.layers.{layer[1]}.{LAYER_NAMES[layer[2]]}.{layer[3]}"
    stem, _, suffix = name.rpartition(".")
    if stem in NAMES:
        return f"{NAMES[stem]}.{suffix}"
    raise CheckpointError(f"{file}: has the tensor {name}, which no part of the declared model is made of")


def _reader(file: Path) -> Any:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise CheckpointError(
            f"{file}: reading GGUF needs the package gguf, which is not installed; pip install gguf"
        ) from error
    try:
        open_file(file).close()
        return GGUFReader(file)
    except (OSError, ValueError, IndexError, KeyError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file}: no GGUF file, or cut off or damaged: {error}; copy it again") from error


def _text(reader: Any, key: str) -> str:
    return str(_value(reader, key))


_MISSING = object()


def _value(reader: Any, key: str, default: Any = _MISSING) -> Any:
    field = reader.fields.get(key)
    if field is None and default is _MISSING:
        raise CheckpointError(f"{reader.data.filename}: lacks the key {key}")
    try:
        return default if field is None else field.contents()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{reader.data.filename}: the key {key} is damaged: {error}") from error
