"""Conversion of a checkpoint to 4 and 8 bits: the same outputs as rounding at load, and files that others read."""

import hashlib
import json
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.api.errors import CheckpointError
from engine.convert import Job, _Out, _shards, convert
from engine.models.checkpoint import check_tensors, read_checkpoint
from engine.models.kv_scales import read_kv_scales
from kernels.cpu.library import best
from tests.engine.layers.conftest import Driver
from tests.engine.quantized_writers import random_model

PROMPT = [5, 9, 60, 33, 17, 4, 88, 41, 7, 7, 12]


def saved(folder, kind="Qwen3", **more):
    model = random_model(kind, **more)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.mark.parametrize(("bits", "tied"), [("int8", False), ("int4", True)])
def test_outputs_equal_rounding_at_load(bits, tied, tmp_path):
    source = saved(tmp_path / "source", tie_word_embeddings=tied)
    report = convert(Job(source=str(source), target=str(tmp_path / "made"), weights=bits))
    at_load = Driver(source, kernels=best(), bits=bits).run(PROMPT, 4)
    assert torch.equal(Driver(tmp_path / "made", kernels=best()).run(PROMPT, 4), at_load)
    restored = Driver(tmp_path / "made").run(PROMPT, 4)
    torch.testing.assert_close(restored, at_load, atol=0.1, rtol=0)
    assert (restored - Driver(source).run(PROMPT, 4)).abs().max() > 1e-3
    assert report.matrices == {bits: 14, "int8": 1} if bits == "int4" else {"int8": 15}
    assert report.bytes == sum(info.bytes for info in read_checkpoint(tmp_path / "made").tensors.values())


def test_experts_of_a_model_with_one_tensor_for_all(tmp_path):
    more = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 32}
    source = saved(tmp_path / "source", "Qwen3Moe", **more)
    convert(Job(source=str(source), target=str(tmp_path / "made"), weights="int8", shard_bytes=100_000))
    at_load = Driver(source, kernels=best(), bits="int8").run(PROMPT, 4)
    assert torch.equal(Driver(tmp_path / "made", kernels=best()).run(PROMPT, 4), at_load)
    gates = {name for name in read_checkpoint(tmp_path / "made").tensors if name.endswith("mlp.gate.weight")}
    assert len(gates) == 2, "routers are not quantized"


def test_the_numbers_are_those_of_the_definition(tmp_path):
    """Unpacked here: word by word, the lowest bits first, with 2^(bits - 1) as zero (compressed-tensors)."""
    source = saved(tmp_path / "source")
    convert(Job(source=str(source), target=str(tmp_path / "made"), weights="int4", head="int8", group_size=32))
    tensors, original = load_file(tmp_path / "made" / "model.safetensors"), load_file(source / "model.safetensors")
    for path, bits in (("model.layers.1.mlp.down_proj", 4), ("lm_head", 8)):
        words, weight = tensors[f"{path}.weight_packed"], original[f"{path}.weight"]
        each = 32 // bits
        numbers = torch.stack([(words >> bits * at) & (2**bits - 1) for at in range(each)], 2).flatten(1)
        scales = tensors[f"{path}.weight_scale"].float().repeat_interleave(32, 1)
        assert tensors[f"{path}.weight_shape"].tolist() == list(weight.shape)
        error = ((numbers.float() - 2 ** (bits - 1)) * scales - weight).abs()
        assert (error <= scales.abs() * (0.51 if bits == 8 else 1.6)).all()


def test_layers_of_another_format_and_files_in_parts(tmp_path):
    source = saved(tmp_path / "source")
    layers = {r"model\.layers\.0\..*": "int8", r".*\.1\.self_attn\..*": "stored"}
    job = Job(source=str(source), target=str(tmp_path / "made"), layers=layers, shard_bytes=200_000)
    report = convert(job)
    assert report.matrices == {"int8": 8, "int4": 3}
    names = {info.file.name for info in read_checkpoint(tmp_path / "made").tensors.values()}
    assert len(names) > 2 and all(name.endswith(f"-of-{len(names):05}.safetensors") for name in names)
    stored = load_file(source / "model.safetensors")["model.layers.1.self_attn.q_proj.weight"]
    found = read_checkpoint(tmp_path / "made").tensors["model.layers.1.self_attn.q_proj.weight"]
    assert torch.equal(load_file(found.file)["model.layers.1.self_attn.q_proj.weight"], stored)
    Driver(tmp_path / "made", kernels=best()).run(PROMPT, 4)


@pytest.mark.parametrize("most", [1, 800, 911, 1_711, 1_712, 2_700, 1 << 40])
def test_no_file_has_more_bytes_than_allowed_unless_one_matrix_has_more(most):
    parts = {"weight_packed": 100, "weight_scale": 13, "weight_shape": 1}
    outs = [_Out("norm", "I64", (100,), "norm")]
    outs += [
        _Out(f"{n}.{part}", "I64", (size,), f"{n}", part, part != "weight_packed")
        for n in range(7)
        for part, size in parts.items()
    ]
    shards = _shards(outs, most)
    assert [one for shard in shards for one in shard] == outs
    for shard in shards:
        assert sum(one.bytes for one in shard) <= most or len({one.source for one in shard}) == 1
        assert not shard[0].follows
    for one, other in pairwise(shards):
        first = other[0].source
        assert sum(out.bytes for out in one) + sum(out.bytes for out in other if out.source == first) > most


def test_checksums_and_other_files(tmp_path):
    source = saved(tmp_path / "source")
    convert(Job(source=str(source), target=str(tmp_path / "made")))
    lines = [line.split("  ") for line in (tmp_path / "made" / "SHA256SUMS").read_text().splitlines()]
    assert {name for _, name in lines} == {path.name for path in (tmp_path / "made").iterdir()} - {"SHA256SUMS"}
    for digest, name in lines:
        assert hashlib.sha256((tmp_path / "made" / name).read_bytes()).hexdigest() == digest
    assert (tmp_path / "made" / "tokenizer.json").read_text() == "{}"


def test_a_converted_checkpoint_is_converted_again(tmp_path):
    source = saved(tmp_path / "source")
    convert(Job(source=str(source), target=str(tmp_path / "eight"), weights="int8"))
    convert(Job(source=str(tmp_path / "eight"), target=str(tmp_path / "four"), weights="int4"))
    config = json.loads((tmp_path / "four" / "config.json").read_text())["quantization_config"]["config_groups"]
    assert sorted(group["weights"]["num_bits"] for group in config.values()) == [4, 8]
    Driver(tmp_path / "four", kernels=best()).run(PROMPT, 4)


def test_an_existing_folder_is_kept(tmp_path):
    source = saved(tmp_path / "source")
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "mine").write_text("1")
    with pytest.raises(CheckpointError, match=r"made: exists already; name a new folder"):
        convert(Job(source=str(source), target=str(tmp_path / "made")))
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["mine"]


def test_weights_of_modules_are_copied(tmp_path):
    """A Dense module of sentence-transformers has a file of its own."""
    source = saved(tmp_path / "source")
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense"}
    listed = [
        {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for at, (path, kind) in enumerate(kinds.items())
    ]
    (source / "modules.json").write_text(json.dumps(listed))
    for folder in ("1_Pooling", "2_Dense"):
        (source / folder).mkdir()
    (source / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    hidden = json.loads((source / "config.json").read_text())["hidden_size"]
    dense = {"in_features": hidden, "out_features": 16, "bias": False, "activation_function": "torch.nn.Tanh"}
    (source / "2_Dense" / "config.json").write_text(json.dumps(dense))
    save_file({"linear.weight": torch.randn(16, hidden)}, source / "2_Dense" / "model.safetensors")
    convert(Job(source=str(source), target=str(tmp_path / "made")))
    name = "2_Dense/model.safetensors"
    assert (tmp_path / "made" / name).read_bytes() == (source / name).read_bytes()
    assert name in (tmp_path / "made" / "SHA256SUMS").read_text()
    assert not [one for one in load_file(tmp_path / "made" / "model.safetensors") if one.startswith("2_Dense")]
    made = read_checkpoint(tmp_path / "made")
    check_tensors(made.model, made.tensors, made.quantization)


@pytest.mark.parametrize(
    ("more", "format"),
    [
        ({"layers": {"lm_head": "stored"}}, ""),
        ({"weights": "stored", "layers": {"lm_head": "int8"}}, "int8"),
        ({"weights": "stored", "head": "stored", "layers": {".*": "int8"}}, "int8"),
    ],
)
def test_a_tied_head_of_another_format(more, format, tmp_path):
    source = saved(tmp_path / "source", tie_word_embeddings=True)
    convert(Job(source=str(source), target=str(tmp_path / "made"), **more))
    made = read_checkpoint(tmp_path / "made")
    assert made.model.head.tied is not bool(format)
    assert ("lm_head.weight_packed" in made.tensors) is bool(format)
    Driver(tmp_path / "made", kernels=best()).run(PROMPT, 4)


def test_experts_with_biases(tmp_path):
    more = {"num_local_experts": 3, "num_experts_per_tok": 3, "head_dim": 32, "intermediate_size": 64}
    source = saved(tmp_path / "source", "GptOss", **more)
    convert(Job(source=str(source), target=str(tmp_path / "made"), weights="int8"))
    at_load = Driver(source, kernels=best(), bits="int8").run(PROMPT, 4)
    assert torch.equal(Driver(tmp_path / "made", kernels=best()).run(PROMPT, 4), at_load)


def test_scales_of_an_8_bit_cache_are_kept(tmp_path):
    """ModelOpt stores these scales in the modules of the projections."""
    source = saved(tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    scales = {
        f"model.layers.{layer}.self_attn.{part}_proj.{part}_scale": torch.tensor(0.25 + layer)
        for layer in range(2)
        for part in "kv"
    }
    save_file({**tensors, **scales}, source / "model.safetensors", {"format": "pt"})
    convert(Job(source=str(source), target=str(tmp_path / "made"), weights="int8"))
    read = [read_checkpoint(folder) for folder in (source, tmp_path / "made")]
    wanted, found = (read_kv_scales(one.path, one.model, one.tensors) for one in read)
    assert found == wanted and found.k == (0.25, 1.25)
