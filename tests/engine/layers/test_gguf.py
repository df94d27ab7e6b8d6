"""Checkpoints in one GGUF file, written by the package gguf, restored and run by transformers."""

import json
import shutil
import subprocess
import sys

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf.quants import quantize
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from engine.api.errors import CheckpointError
from engine.layers.linear import LinearLayer
from engine.lowering.footprint import part_bytes
from engine.models.checkpoint import check_tensors, read_checkpoint
from engine.weights.files import Weights
from engine.weights.quantized import QuantizedWeights
from kernels.cpu.library import best
from tests.engine.layers.planned import predicted
from tests.engine.quantized_writers import random_model

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name):
    stem, suffix = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[rest]}.{suffix}"
    return f"{NAMES[stem]}.{suffix}"


def permute(weight, heads):
    """llama.cpp's convert_hf_to_gguf.py, LlamaModel.permute."""
    shape = (heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(weight.reshape(shape).swapaxes(1, 2).reshape(weight.shape))


def write(folder, types, architecture="Llama", config=True, extra=lambda writer, config: None, **more):
    """A folder with a GGUF file. types: of tensors whose name has this in it, the first that fits; F32 for others.
    extra: adds further keys and tensors."""
    folder.mkdir()
    model = random_model(architecture, **more)
    kind = architecture.lower()
    c = model.config
    writer = gguf.GGUFWriter(folder / "model.gguf", kind)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_key_length(getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads)
    writer.add_vocab_size(c.vocab_size)
    writer.add_eos_token_id(2)
    extra(writer, c)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and c.tie_word_embeddings:
            continue
        values = tensor.numpy()
        if kind == "llama" and ".q_proj." in name:
            values = permute(values, c.num_attention_heads)
        if kind == "llama" and ".k_proj." in name:
            values = permute(values, c.num_key_value_heads)
        wanted = next((type for part, type in types.items() if part in name), Type.F32)
        if tensor.ndim == 1:
            wanted = Type.F32
        if wanted in (Type.Q4_K, Type.Q6_K):
            values = drawn_blocks(values.shape, wanted)
        elif wanted != Type.F32:
            values = quantize(values, wanted)
        writer.add_tensor(gguf_name(name), values, raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if config:
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
    return folder


def drawn_blocks(shape, kind):
    """Blocks of 256 that the package reads and does not write: drawn bits, with a scale that keeps numbers small."""
    size = {Type.Q4_K: 144, Type.Q6_K: 210}[kind]
    blocks = np.random.default_rng(3).integers(0, 256, (shape[0], shape[1] // 256, size), dtype=np.uint8)
    scale = np.array([3e-5], np.float16).view(np.uint8)
    places = {Type.Q4_K: (0, 2), Type.Q6_K: (208,)}[kind]
    for at in places:
        blocks[:, :, at : at + 2] = scale
    return blocks.reshape(shape[0], -1)


def want(folder, ids, architecture, more):
    """transformers' logits: it reads the file, restores it and turns Llama's rows by its own code."""
    model = random_model(architecture, **more)
    found = load_gguf_checkpoint(folder / "model.gguf", return_tensors=True, model_to_load=model)["tensors"]
    lacking = set(model.state_dict()) - set(found)
    assert lacking <= ({"lm_head.weight"} if model.config.tie_word_embeddings else set())
    model.load_state_dict({name: tensor.float() for name, tensor in found.items()}, strict=False)
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


def near(got, wanted):
    return (got - wanted).norm() / wanted.norm() < 0.04


CASES = {
    "q4_0": ({"embed": Type.Q8_0, "lm_head": Type.Q8_0, "": Type.Q4_0}, "Llama", {}),
    "q8_0": ({"": Type.Q8_0}, "Llama", {"num_key_value_heads": 4}),
    "q4_0-tied": ({"": Type.Q4_0}, "Qwen3", {"tie_word_embeddings": True, "head_dim": 32}),
    "q8_0-biases": ({"": Type.Q8_0}, "Qwen2", {"tie_word_embeddings": False}),
    "plain": ({"mlp": Type.BF16, "self_attn": Type.F16}, "Llama", {}),
    "others": ({"q_proj": Type.Q5_0, "down_proj": Type.Q4_K, "up_proj": Type.Q4_1, "": Type.Q8_0}, "Llama", {}),
    "k-quants": ({"down_proj": Type.Q6_K, "": Type.Q4_0}, "Llama", {"attention_bias": True}),
}


@pytest.mark.parametrize("config", [True, False])
@pytest.mark.parametrize("kind", CASES)
def test_torch_runs_a_gguf_file_as_transformers_does(kind, config, tmp_path, driver, ids):
    types, architecture, more = CASES[kind]
    folder, prompt = write(tmp_path / "m", types, architecture, config=config, **more), ids(17, 1)
    torch.testing.assert_close(
        driver(folder).run(prompt, 5), want(folder, prompt, architecture, more), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("kind", CASES)
def test_a_compiled_model_stays_near_transformers(kind, tmp_path, driver, ids):
    types, architecture, more = CASES[kind]
    folder, prompt = write(tmp_path / "m", types, architecture, **more), ids(17, 1)
    engine = driver(folder, kernels=best())
    assert near(engine.run(prompt, 5), want(folder, prompt, architecture, more))
    assert part_bytes(predicted(engine.checkpoint, best())) == engine.model.memory_usage.parts


def test_blocks_are_held_as_they_are(tmp_path, driver, compiled):
    types, architecture, more = CASES["k-quants"]
    engine = driver(write(tmp_path / "m", types, architecture, **more), kernels=compiled)
    forms = {layer.name.split(".", 3)[-1]: layer.weight.form for layer in linears(engine)}
    assert forms == {
        "self_attn.q_proj+k_proj+v_proj": "tiles_int4",
        "self_attn.o_proj": "tiles_int4",
        "mlp.gate_proj+up_proj": "tiles_int4",
        "mlp.down_proj": "blocks_q6_k",
    }
    assert engine.model.vocabulary.head.form == "tiles_int4"
    types, architecture, more = CASES["q8_0"]
    engine = driver(write(tmp_path / "n", types, architecture, **more), kernels=compiled)
    assert {layer.weight.form for layer in linears(engine)} | {engine.model.vocabulary.head.form} == {"tiles_int8"}


def linears(engine):
    return [layer for layer in engine.model.weights.by_name.values() if isinstance(layer, LinearLayer)]


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q8_0])
def test_the_numbers_of_blocks_are_bit_for_bit_those_of_the_package(kind, tmp_path):
    folder = write(tmp_path / "m", {"": kind}, "Qwen2")
    read = read_checkpoint(folder)
    weights = Weights(read.tensors, lambda fraction: None)
    shapes = {name: info.shape for name, info in read.tensors.items()}
    own = QuantizedWeights(weights, read.quantization, shapes)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(folder / "model.gguf").tensors}
    for path in read.quantization.formats:
        tensor = tensors[gguf_name(f"{path}.weight")]
        want = torch.from_numpy(gguf.quants.dequantize(tensor.data, kind))
        assert torch.equal(own.unpacked(path).restored(), want) and torch.equal(own.read(f"{path}.weight"), want)


def test_dequantized_weights_may_be_quantized(tmp_path, driver, ids):
    _, architecture, more = CASES["k-quants"]
    types = {"down_proj": Type.TQ2_0, "": Type.Q4_0}
    folder, prompt = write(tmp_path / "m", types, architecture, **more), ids(9, 1)
    engine = driver(folder, kernels=best(), bits="int8")
    assert near(engine.run(prompt, 9), driver(folder).run(prompt, 9))
    forms = [layer.weight.form for layer in linears(engine)]
    assert forms[:3] == ["tiles_int4"] * 3 and forms[3] == "tiles_int8"
    assert part_bytes(predicted(engine.checkpoint, best(), bits="int8")) == engine.model.memory_usage.parts


def test_plain_numbers_in_half_precision_keep_their_size(tmp_path, driver):
    engine = driver(write(tmp_path / "m", {"": Type.BF16}), kernels=best())
    assert {layer.weight.form for layer in linears(engine)} == {"amx_bf16" if best() == "amx" else "tiles_bf16"}


def test_the_type_of_a_file_of_blocks_is_bfloat16_unless_config_json_says_another(tmp_path):
    assert read_checkpoint(write(tmp_path / "a", {"": Type.Q4_0}, config=False)).dtype == "bfloat16"
    assert read_checkpoint(write(tmp_path / "b", {"": Type.F16}, config=False)).dtype == "float16"
    folder = write(tmp_path / "c", {"": Type.Q4_0})
    config = json.loads((folder / "config.json").read_text()) | {"dtype": "float16"}
    (folder / "config.json").write_text(json.dumps(config))
    assert read_checkpoint(folder).dtype == "float16"


def test_the_file_itself_may_be_named(tmp_path):
    folder = write(tmp_path / "m", {})
    assert read_checkpoint(folder / "model.gguf").path == folder


def test_several_files_are_refused(tmp_path):
    folder = write(tmp_path / "m", {})
    shutil.copy(folder / "model.gguf", folder / "other.gguf")
    with pytest.raises(CheckpointError, match=r"has 2 GGUF models, such as model\.gguf and other\.gguf; name the one"):
        read_checkpoint(folder)


def test_safetensors_beside_come_first(tmp_path):
    folder = write(tmp_path / "m", {})
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a safetensors file"):
        read_checkpoint(folder)


@pytest.mark.parametrize("size", [0, 10, 100, 2000, -1000])
def test_a_file_that_is_cut_off_is_refused(tmp_path, size):
    folder = write(tmp_path / "m", {"": Type.Q4_0})
    file = folder / "model.gguf"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(CheckpointError, match=r"model\.gguf: not a GGUF file, or truncated or damaged"):
        read_checkpoint(folder)


def test_a_file_of_another_model_is_refused(tmp_path):
    folder = write(tmp_path / "m", {}, "Qwen3", head_dim=32)
    config = folder / "config.json"
    config.write_text(config.read_text().replace("Qwen3ForCausalLM", "LlamaForCausalLM"))
    with pytest.raises(CheckpointError, match="the architecture is 'qwen3', but config.json declares LlamaForCausalLM"):
        read_checkpoint(folder)


def test_shapes_are_compared_with_the_configuration(tmp_path):
    folder = write(tmp_path / "m", {"": Type.Q4_0})
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"intermediate_size": 256', '"intermediate_size": 288'))
    read = read_checkpoint(folder)
    with pytest.raises(CheckpointError, match=r"gate_proj\.weight has shape \[256, 128\], .* \[288, 128\]"):
        check_tensors(read.model, read.tensors, read.quantization)


def test_a_family_that_is_not_read_from_gguf_needs_its_own_checkpoint(tmp_path):
    folder = write(tmp_path / "m", {}, config=False)
    file = folder / "model.gguf"
    file.write_bytes(file.read_bytes().replace(b"llama", b"rwkv6"))
    with pytest.raises(
        CheckpointError, match="the architecture is 'rwkv6'; supported from GGUF are llama, qwen2, qwen3"
    ):
        read_checkpoint(folder)


def test_without_the_package_the_message_says_what_to_install(tmp_path, monkeypatch):
    folder = write(tmp_path / "m", {"": Type.Q8_0})
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(CheckpointError, match=r"model\.gguf: the package gguf, .* not installed; pip install gguf$"):
        read_checkpoint(folder)


def test_reading_a_gguf_file_does_not_import_torch(tmp_path):
    folder = write(tmp_path / "m", {"": Type.Q4_0})
    code = (
        "import sys; from engine.models.checkpoint import read_checkpoint, check_tensors; "
        f"c = read_checkpoint({str(folder)!r}); check_tensors(c.model, c.tensors, c.quantization); "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
