"""Tests that errors in a checkpoint directory are found without reading weights and reported with the file name."""

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.api.errors import CheckpointError, UnknownArchitecture
from engine.lowering.footprint import Holder, weight_bytes
from engine.models.checkpoint import check_tensors, read_checkpoint

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "eos_token_id": [3, 4],
    "dtype": "bfloat16",
}
LAYER = {
    "self_attn.q_proj": (8, 8),
    "self_attn.k_proj": (4, 8),
    "self_attn.v_proj": (4, 8),
    "self_attn.o_proj": (8, 8),
    "mlp.gate_proj": (6, 8),
    "mlp.up_proj": (6, 8),
    "mlp.down_proj": (8, 6),
    "input_layernorm": (8,),
    "post_attention_layernorm": (8,),
}
TENSORS = {
    "model.embed_tokens.weight": (11, 8),
    "model.norm.weight": (8,),
    "lm_head.weight": (11, 8),
    **{f"model.layers.{i}.{name}.weight": shape for i in range(2) for name, shape in LAYER.items()},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A complete checkpoint in two shards, written with the safetensors library."""
    names = sorted(TENSORS)
    shards = {"model-00001-of-00002.safetensors": names[:10], "model-00002-of-00002.safetensors": names[10:]}
    for shard, members in shards.items():
        save_file({name: torch.rand(TENSORS[name]).bfloat16() for name in members}, tmp_path / shard)
    weight_map = {name: shard for shard, members in shards.items() for name in members}
    write(tmp_path / "model.safetensors.index.json", {"weight_map": weight_map})
    write(tmp_path / "config.json", CONFIG)
    return tmp_path


def write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


def configured(folder: Path, **more: object) -> Path:
    write(folder / "config.json", {**CONFIG, **more})
    return folder


def checked(folder: Path) -> None:
    read = read_checkpoint(folder)
    check_tensors(read.model, read.tensors)


def changed(folder: Path, change) -> None:
    """The second shard with its tensors changed, and an index that agrees with it."""
    shard = folder / "model-00002-of-00002.safetensors"
    tensors = load_file(shard)
    change(tensors)
    save_file(tensors, shard)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    kept = {name: file for name, file in index["weight_map"].items() if file != shard.name}
    write(folder / "model.safetensors.index.json", {"weight_map": kept | dict.fromkeys(tensors, shard.name)})


def test_complete_checkpoint_is_read(folder):
    read = read_checkpoint(folder)
    check_tensors(read.model, read.tensors)
    assert {name: info.shape for name, info in read.tensors.items()} == TENSORS
    assert read.architecture == "LlamaForCausalLM"
    assert (read.dtype, read.eos_token_ids, read.generation) == ("bfloat16", (3, 4), {})
    numbers = sum(torch.Size(shape).numel() for shape in TENSORS.values())
    norms = sum(shape[0] for shape in TENSORS.values() if len(shape) == 1)
    planned = weight_bytes(read.model, read.tensors, read.quantization, Holder(dtype="bfloat16", device="cuda"))
    assert planned == 2 * numbers + 2 * norms  # norms use float32


def test_offsets_point_to_the_numbers(folder):
    name = "model.layers.1.mlp.up_proj.weight"
    info = read_checkpoint(folder).tensors[name]
    raw = info.file.read_bytes()[info.offset : info.offset + info.bytes]
    assert torch.equal(torch.frombuffer(bytearray(raw), dtype=torch.bfloat16).view(6, 8), load_file(info.file)[name])


def test_a_folder_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"/nowhere: no such directory; model.source.path must name"):
        read_checkpoint(tmp_path / "nowhere")


def test_a_missing_config_is_named(folder):
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read: No such file"):
        read_checkpoint(folder)


@pytest.mark.parametrize(
    ("text", "message"), [('{"a": 1', r"config\.json: is damaged"), ("[1]", r"config\.json: must be a JSON object")]
)
def test_a_damaged_config_is_named(folder, text, message):
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(folder)


def test_pickled_weights_are_refused_by_name(folder):
    for file in folder.glob("model*"):
        file.unlink()
    with pytest.raises(CheckpointError, match=r"no weights: neither model\.safetensors nor"):
        read_checkpoint(folder)
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"no safetensors files, only pytorch_model\.bin; convert"):
        read_checkpoint(folder)


def test_shards_without_an_index_are_said_to_lack_it(folder):
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"no model\.safetensors\.index\.json; there are model-00001"):
        read_checkpoint(folder)


def test_a_missing_shard_is_named(folder):
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors: missing; .* names 2 shards"):
        read_checkpoint(folder)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (-1, "truncated: the file has"),
        (100, "truncated within its header"),
        (7, "not a safetensors"),
        (0, "not a safetensors"),
    ],
)
def test_a_truncated_shard_is_named(folder, size, message):
    shard = folder / "model-00001-of-00002.safetensors"
    data = shard.read_bytes()
    shard.write_bytes(data[:size])
    with pytest.raises(CheckpointError, match=rf"model-00001-of-00002\.safetensors: .*{message}"):
        read_checkpoint(folder)


@pytest.mark.parametrize(
    "header",
    [
        b"{broken",
        b"[]",
        b'{"x": {"dtype": "F32"}}',
        b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"x": {"dtype": "F32", "shape": [-1], "data_offsets": [8, 4]}}',
    ],
)
def test_a_damaged_header_is_named(folder, header):
    shard = folder / "model-00001-of-00002.safetensors"
    shard.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002\.safetensors: the header is damaged"):
        read_checkpoint(folder)


def test_a_tensor_that_only_the_index_knows_is_named(folder):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.layers.0.self_attn.q_proj.weight"] = "model-00002-of-00002.safetensors"
    write(folder / "model.safetensors.index.json", index)
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors: lacks the tensor .*q_proj"):
        read_checkpoint(folder)


@pytest.mark.parametrize("name", ["../config.json", 3])
def test_an_index_cannot_name_files_outside_its_folder(folder, name):
    write(folder / "model.safetensors.index.json", {"weight_map": {"x": name}})
    with pytest.raises(CheckpointError, match="which is not a file of this folder"):
        read_checkpoint(folder)


def test_missing_tensors_are_named(folder):
    changed(folder, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(CheckpointError, match=r"lacks model\.norm\.weight"):
        checked(folder)


def test_a_renamed_tensor_is_shown_beside_the_missing_one(folder):
    changed(folder, lambda t: t.update({"model.layers.1.mlp.up.weight": t.pop("model.layers.1.mlp.up_proj.weight")}))
    with pytest.raises(CheckpointError, match=r"lacks .*up_proj\.weight \(it has model\.layers\.1\.mlp\.up\.weight"):
        checked(folder)


def test_unknown_tensors_are_named_with_their_file(folder):
    extra = {"model.layers.1.self_attn.q_proj.bias": torch.ones(8), "model.layers.2.a": torch.ones(1)}
    changed(folder, lambda tensors: tensors.update(extra))
    with pytest.raises(
        CheckpointError, match=r"model-00002.*q_proj\.bias, model\.layers\.2\.a, which the declared model"
    ):
        checked(folder)


def test_a_misshapen_tensor_is_named_with_both_shapes(folder):
    changed(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(9)}))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has shape \[9\], but config\.json implies \[8\]"):
        checked(folder)


def test_integer_weights_are_refused(folder):
    changed(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(8, dtype=torch.int8)}))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is of type I8; supported are"):
        checked(folder)


def test_redundant_tensors_are_ignored(folder):
    changed(folder, lambda tensors: tensors.update({"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(2)}))
    checked(folder)
    configured(folder, tie_word_embeddings=True)
    checked(folder)


def test_an_unknown_architecture_is_refused_with_the_closest_and_the_list(folder):
    configured(folder, architectures=["LLamaForCausalLM"])
    with pytest.raises(UnknownArchitecture, match=r"Did you mean LlamaForCausalLM\? Supported are AfmoeForCausalLM, "):
        read_checkpoint(folder)


@pytest.mark.parametrize("names", [None, [], "LlamaForCausalLM", [3]])
def test_a_config_that_names_no_architecture_is_refused(folder, names):
    configured(folder, architectures=names)
    with pytest.raises(CheckpointError, match="it must name the architecture"):
        read_checkpoint(folder)


def test_a_quantized_checkpoint_is_refused_with_its_method(folder):
    configured(folder, quantization_config={"quant_method": "gptq", "bits": 9})
    with pytest.raises(CheckpointError, match=r"is quantized \(gptq, 9 bits\), which is not supported: bits is 9"):
        read_checkpoint(folder)


def test_a_checkpoint_that_leaves_every_layer_unquantized_is_a_plain_one(folder):
    settings = {"quant_method": "compressed-tensors", "config_groups": {"a": {"targets": ["Linear"]}}}
    want = read_checkpoint(folder).model
    configured(folder, quantization_config={**settings, "ignore": ["lm_head", r"re:model\.layers\..*"]})
    checked(folder)
    assert read_checkpoint(folder).model == want
    configured(folder, quantization_config={**settings, "ignore": ["lm_head", r"re:model\.layers\.0\..*"]})
    message = r"7 of 15 projections are quantized, such as model\.layers\.1\.self_attn\.q_proj"
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(folder)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("hidden_size", None, "hidden_size is missing"),
        ("hidden_size", "8", "hidden_size is '8'; it must be a whole number"),
        ("num_hidden_layers", 0, "num_hidden_layers is 0; it must be a whole number of at least 1"),
        ("rms_norm_eps", "small", "rms_norm_eps is 'small'; it must be a number"),
        ("attention_bias", "yes", "attention_bias is 'yes'; it must be true or false"),
        ("hidden_act", "swishy", "hidden_act is 'swishy'; supported are silu"),
        ("num_key_value_heads", 3, "must be a multiple"),
        ("head_dim", 3, "rotary positions need an even number"),
        ("rope_scaling", {"type": "spiral"}, "rope type 'spiral' is not supported; supported are default, linear"),
        ("rope_scaling", {"type": "linear"}, "factor of the rotary settings is missing"),
        ("rope_scaling", {"type": "longrope", "short_factor": [1.0]}, "short_factor must be a list of 2 numbers"),
        ("rope_scaling", [1], "rope_scaling is .1.; it must be an object"),
    ],
)
def test_a_config_that_makes_no_model_is_refused_with_the_key(folder, key, value, message):
    configured(folder, **{key: value})
    with pytest.raises(CheckpointError, match=rf"config\.json: .*{message}"):
        read_checkpoint(folder)


REMOTE = """
from pathlib import Path
from engine.models import llama
Path(__file__).with_name("ran").touch()
ARCHITECTURES = ("HouseForCausalLM",)
def declare(config):
    return llama.declare({**config, "architectures": ["LlamaForCausalLM"]})
"""


def test_a_folders_own_architecture_is_refused_unless_allowed_and_runs_no_code(folder):
    configured(folder, architectures=["HouseForCausalLM"])
    (folder / "slipway_model.py").write_text(REMOTE)
    with pytest.raises(UnknownArchitecture, match=r"not run unless model\.trust_remote_code is true"):
        read_checkpoint(folder)
    assert not (folder / "ran").exists()


def test_a_folders_own_architecture_declares_its_model_when_allowed(folder):
    want = read_checkpoint(folder).model
    configured(folder, architectures=["HouseForCausalLM"])
    (folder / "slipway_model.py").write_text(REMOTE)
    assert read_checkpoint(folder, trust_remote_code=True).model == want
    assert (folder / "ran").exists()


def test_a_folders_code_is_not_run_for_an_architecture_that_is_served_anyway(folder):
    configured(folder, auto_map={"AutoModelForCausalLM": "modeling_house.HouseForCausalLM"})
    (folder / "slipway_model.py").write_text(REMOTE)
    read_checkpoint(folder, trust_remote_code=True)
    assert not (folder / "ran").exists()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("1 / 0", "cannot be loaded: ZeroDivisionError"),
        ("ARCHITECTURES = ()", "cannot be loaded: AttributeError"),
        (REMOTE.replace("House", "Barn"), "declares BarnForCausalLM, but config.json names 'HouseForCausalLM'"),
    ],
)
def test_a_folders_code_that_declares_nothing_is_refused(folder, code, message):
    configured(folder, architectures=["HouseForCausalLM"])
    (folder / "slipway_model.py").write_text(code)
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(folder, trust_remote_code=True)


def test_reading_a_checkpoint_does_not_import_torch(folder):
    code = (
        "import sys; from engine.models.checkpoint import read_checkpoint, check_tensors; "
        f"c = read_checkpoint({str(folder)!r}); check_tensors(c.model, c.tensors); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
