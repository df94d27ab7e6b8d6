"""Read a checkpoint from one GGUF file, with its tensors under the names and in the layout of Hugging Face.

The configuration is the folder's config.json, or is derived from the keys in the file. llama.cpp's converter permutes
the rows of Llama's q and k (`engine.formats.ggml`). Source: ggml's description of GGUF,
llama.cpp's convert_hf_to_gguf.py.
"""

import importlib.util
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.api.errors import CheckpointError
from engine.formats.format import Format
from engine.formats.ggml import UNREAD, format_of
from engine.gguf.file import GgufFile, GgufTensor, read_gguf
from engine.models.headers import TensorInfo
from engine.models.parts import Attention, Model, attentions
from engine.models.quantized import Quantization
from engine.models.sources import join, linear_paths

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
FREQUENCIES = "rope_freqs.weight"  # llama3's RoPE scaling factors, which config.json also has
MAX_FACTOR_BYTES = 1 << 16
# Keys of tokens that end a reply, and texts of such control tokens for files of old converters without these keys.
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
END_TEXTS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>")
_CONTROL = 3  # tokenizer.ggml.token_type
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def read_weights(file: Path, architecture: str, model: Model) -> tuple[dict[str, TensorInfo], Quantization | None]:
    """Return the tensors of a file by their names in the declaration, and the formats of those that are not plain."""
    found = read_gguf(file)
    kind = str(found.require("general.architecture"))
    if architecture not in ARCHITECTURES or ARCHITECTURES[architecture] != kind:
        raise CheckpointError(
            f"{file}: the architecture is {kind!r}, but config.json declares {architecture}; supported from GGUF are "
            f"{', '.join(ARCHITECTURES)}"
        )
    tensors = {
        _name(file, tensor.name): TensorInfo(
            file=file,
            dtype=tensor.type,
            shape=tensor.shape,
            offset=tensor.offset,
            bytes=tensor.bytes,
        )
        for tensor in found.tensors
        if tensor.name != FREQUENCIES
    }
    heads = _heads(model) if kind == "llama" else {}
    paths = [*linear_paths(model), join(model.root, model.embed.name)]
    formats: dict[str, Format] = {}
    for path in paths:
        info = tensors.get(f"{path}.weight")
        format = None if info is None else format_of(info.dtype, heads.get(path.rsplit(".", 1)[-1], 0))
        if info is None or format is None:
            continue
        if info.dtype in UNREAD:
            raise CheckpointError(
                f"{file}: {path}.weight is of type {info.dtype}, which is not supported; quantize the model again, to "
                "Q4_K_M, Q8_0 or another type of llama-quantize"
            )
        if format.requires and importlib.util.find_spec(format.requires) is None:
            raise CheckpointError(
                f"{file}: tensors of type {info.dtype} are dequantized by the package {format.requires}, which is not "
                f"installed; pip install {format.requires}"
            )
        formats[path] = format
    return tensors, Quantization("gguf", formats) if formats else None


def made_config(file: Path) -> dict[str, Any]:
    """Return the contents of config.json, derived from the keys of a file. Raises CheckpointError if keys are
    missing."""
    found = read_gguf(file)
    kind = str(found.require("general.architecture"))
    names = {tensor.name: tensor for tensor in found.tensors}
    if kind not in MADE:
        raise CheckpointError(
            f"{file}: the architecture is {kind!r}; supported from GGUF are {', '.join(MADE)}. Serve other models from "
            "a checkpoint in Hugging Face's layout"
        )
    if "token_embd.weight" not in names:
        raise CheckpointError(f"{file}: lacks token_embd.weight")
    heads, hidden = (_positive(found, f"{kind}.{key}") for key in ("attention.head_count", "embedding_length"))
    head_dim = _positive(found, f"{kind}.attention.key_length", hidden // heads)
    made = {
        "architectures": [MADE[kind]],
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": _positive(found, f"{kind}.feed_forward_length"),
        "max_position_embeddings": _positive(found, f"{kind}.context_length"),
        "num_attention_heads": heads,
        "num_hidden_layers": _positive(found, f"{kind}.block_count"),
        "num_key_value_heads": _positive(found, f"{kind}.attention.head_count_kv", heads),
        "rms_norm_eps": _positive(found, f"{kind}.attention.layer_norm_rms_epsilon"),
        "rope_theta": _positive(found, f"{kind}.rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(found, kind, names.get(FREQUENCIES)),
        "head_dim": head_dim,
        "partial_rotary_factor": _positive(found, f"{kind}.rope.dimension_count", head_dim) / head_dim,
        "vocab_size": names["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in names,
        "attention_bias": kind != "qwen2" and "blk.0.attn_q.bias" in names,
        "eos_token_id": _end_ids(found) or None,
        "bos_token_id": found.keys.get("tokenizer.ggml.bos_token_id"),
    }
    return {key: value for key, value in made.items() if value is not None}


def _end_ids(found: GgufFile) -> list[int]:
    """Return the tokens that end a reply, beginning with tokenizer.ggml.eos_token_id."""
    ids = [found.keys.get(f"tokenizer.ggml.{key}") for key in END_KEYS]
    tokens, kinds = (found.keys.get(f"tokenizer.ggml.{key}") or () for key in ("tokens", "token_type"))
    controls = (token for token, kind in enumerate(kinds[: len(tokens)]) if kind == _CONTROL)
    ids += [token for token in controls if tokens[token] in END_TEXTS]
    return list(dict.fromkeys(token for token in ids if isinstance(token, int)))


def _rope_scaling(found: GgufFile, kind: str, factors: GgufTensor | None) -> dict[str, Any] | None:
    """Return the RoPE scaling in the form of config.json, or None.

    llama3's scaling is stored as a tensor of divisors of the frequencies, which equals longrope with one list of
    factors
    and no attention scale.
    """
    keys, prefix = found.keys, f"{kind}.rope.scaling"
    trained = keys.get(f"{prefix}.original_context_length", keys.get(f"{kind}.context_length"))
    if factors is not None:
        values = _numbers(found.path, factors)
        return {
            "rope_type": "longrope",
            "short_factor": values,
            "long_factor": values,
            "attention_factor": 1.0,
            "original_max_position_embeddings": trained,
        }
    form = keys.get(f"{prefix}.type", "none")
    if form == "none":
        return None
    if form not in ("linear", "yarn"):
        raise CheckpointError(f"{found.path}: {prefix}.type is {form!r}; supported are linear and yarn")
    scaling = {"rope_type": form, "factor": _positive(found, f"{prefix}.factor")}
    if form == "yarn":
        scaling["original_max_position_embeddings"] = _positive(found, f"{prefix}.original_context_length")
    return scaling


def _numbers(file: Path, tensor: GgufTensor) -> list[float]:
    """Return the values of a small tensor in float32."""
    if tensor.type != "F32" or tensor.bytes > MAX_FACTOR_BYTES:
        raise CheckpointError(
            f"{file}: {tensor.name} has type {tensor.type} and {tensor.bytes:,} bytes; it must have type F32 and at "
            f"most {MAX_FACTOR_BYTES:,} bytes"
        )
    with file.open("rb") as data:
        data.seek(tensor.offset)
        return list(struct.unpack(f"<{tensor.bytes // 4}f", data.read(tensor.bytes)))


def _positive(found: GgufFile, key: str, default: float | None = None) -> Any:
    value = found.require(key) if default is None else found.keys.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise CheckpointError(f"{found.path}: {key} is {value!r}; it must be a number above 0")
    return value


def _heads(model: Model) -> Mapping[str, int]:
    attention = attentions(model)[0]
    assert isinstance(attention, Attention), "no architecture of GGUF has latent attention"
    return {"q_proj": attention.heads, "k_proj": attention.kv_heads}


def _name(file: Path, name: str) -> str:
    layer = _LAYER.fullmatch(name)
    if layer is not None and layer[2] in LAYER_NAMES:
        return f"model.layers.{layer[1]}.{LAYER_NAMES[layer[2]]}.{layer[3]}"
    stem, _, suffix = name.rpartition(".")
    if stem in NAMES:
        return f"{NAMES[stem]}.{suffix}"
    raise CheckpointError(f"{file}: has the tensor {name}, which the declared model does not use")
