"""Tests of weights quantized to 8, 6 and 4 bits at load: accuracy, batch invariance, and the cache file."""

import logging
import os
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from benchmarks.quantization_error import DEMO, compare, conversations
from engine.api.errors import CheckpointError, ConfigError
from engine.lowering.footprint import part_bytes
from engine.lowering.operations import ExpertLinear, Linear
from engine.weights.packed import PackedFile
from kernels.cpu.library import Tiling, best
from kernels.cpu.program import Team
from kernels.ggml_blocks import to_int6
from kernels.quantisation import to_int4, to_int8
from tests.engine.layers.planned import predicted
from tests.engine.quantized_writers import random_model

SOME = ["llama", "qwen2", "gemma2", "cohere", "starcoder2", "olmo2", "mixtral", "qwen2-moe", "olmoe"]

QKV = "model.layers.0.self_attn.q_proj+k_proj+v_proj"


@pytest.mark.parametrize("case_name", SOME)
@pytest.mark.parametrize("bits", ["int8", "int6", "int4"])
@pytest.mark.sampled(5)
def test_a_rounded_row_is_the_same_whatever_stands_beside_it(case_name, bits, compiled, checkpoint, driver, ids):
    path, prompt = checkpoint(case_name).path, ids(29, 9)
    want = driver(path, kernels=compiled, bits=bits).run(prompt, len(prompt))
    assert torch.equal(driver(path, kernels=compiled, bits=bits, threads=1).run(prompt, 1), want)
    company = driver(path, kernels=compiled, bits=bits, block_tokens=3, seed=4)
    request, other = company.add(prompt), company.add(ids(40, 40))
    company.step([(other, 20), (request, 11)])
    company.step([(request, 1), (other, 1)])
    company.step([(other, 19), (request, 17)])
    assert torch.equal(request.result, want)


@pytest.mark.parametrize("case_name", SOME)
@pytest.mark.sampled(4)
def test_every_variant_rounds_alike(case_name, checkpoint, driver, ids):
    """All variants use the same integers; only the order of float additions differs."""
    prompt = ids(29, 9)
    for bits in ("int8", "int4"):
        want = driver(checkpoint(case_name).path, kernels="base", bits=bits).run(prompt, 29)
        got = driver(checkpoint(case_name).path, kernels=best(), bits=bits).run(prompt, 29)
        # An activation on the edge between two whole numbers may fall to either side.
        assert (got - want).norm() / want.norm() < 2e-2


def test_rounding_costs_a_trained_model_little():
    """Held-out conversations of the demo model, where it answers. Those about keys of the manifest are left out: the
    manifest has keys that the model has not seen."""
    found = compare(DEMO, conversations(2, without=("keys",)), ("int8", "int4"))
    stored, eight, four = found["stored"], found["int8"], found["int4"]
    assert stored.perplexity < 1.2 and stored.same_best == 1.0 and stored.logprob_change == 0.0
    assert 0 < eight.logprob_change < four.logprob_change
    assert eight.perplexity < stored.perplexity * 1.005 and eight.same_best > 0.995
    assert four.perplexity < stored.perplexity * 1.02 and four.same_best > 0.98


def test_rounded_numbers_are_the_nearest_there_are():
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    weight[3] = 0.0
    eight = to_int8(weight, 64)
    wide = eight.scales.float().repeat_interleave(64, 1)[:, :96]
    assert ((eight.restored() - weight).abs() <= wide * 0.5001).all()
    four = to_int4(weight, 32)
    steps = four.scales.float().abs().repeat_interleave(32, 1)
    inside = weight.abs() < steps * 7
    assert ((four.restored() - weight).abs()[inside] <= steps[inside] * 0.5001).all()
    assert (four.restored()[3] == 0).all() and (eight.restored()[3] == 0).all()
    # Clipping is only chosen where it helps.
    plain = (weight.unflatten(1, (-1, 32)).abs().amax(2) / 8).repeat_interleave(32, 1)
    naive = (weight / plain).round().clamp(-8, 7).nan_to_num() * plain
    assert (four.restored() - weight).square().sum() < (naive - weight).square().sum()


def test_no_scale_of_a_group_of_4_bits_leaves_a_much_smaller_error():
    """Compared with 2,001 scales of either sign per group, each with its nearest integers."""
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(1))
    weight[3, :32] = 0.0
    weight[4, 5] = 9.0  # an outlier, which the best scale does not reach
    groups = weight.unflatten(1, (-1, 32))
    top = groups.abs().amax(2, keepdim=True)
    best = torch.full(groups.shape[:2], torch.inf)
    for step in torch.linspace(-1, 1, 2001).tolist():
        scales = top * step / 5
        found = (groups / scales).nan_to_num().round().clamp(-8, 7) * scales
        best = torch.minimum(best, (found - groups).square().sum(2))
    error = (to_int4(weight, 32).restored() - weight).unflatten(1, (-1, 32)).square().sum(2)
    assert error.sum() < 1.02 * best.sum() and (error <= 1.35 * best + 1e-12).all()


def test_torch_refuses_rounded_weights(checkpoint, driver):
    with pytest.raises(ValueError, match="torch cannot multiply by int8"):
        driver(checkpoint("llama").path, bits="int8")


@pytest.mark.parametrize("bits", ["stored", "int8", "int6", "int4"])
def test_the_planned_bytes_of_experts_are_those_that_are_held_to_the_byte(bits, tmp_path, driver, compiled):
    """Use sizes without padding: router and shared gate, which are never quantized, have 32 rows together."""
    config = transformers.Qwen2MoeConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=128,
        num_experts=31,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        mlp_only_layers=[1],
        num_attention_heads=4,
        num_key_value_heads=2,
        qkv_bias=False,
        tie_word_embeddings=True,
    )
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    engine = driver(tmp_path, kernels=compiled, bits=bits)
    assert part_bytes(predicted(engine.checkpoint, compiled, bits=bits)) == engine.model.memory_usage.parts
    kept = [matrices[0] for matrices in experts_of(engine.model)]
    assert [router.weight.form.partition("_")[2] for router in kept] == ["bf16"]
    experts = 31 * 3 * 64 * 64
    each = {"stored": 2 * experts, "int8": experts + experts // 64 * 2, "int4": experts // 2 + experts // 32 * 2}
    each["int6"] = experts // 64 * 50
    held = sum(matrix.weight.nbytes for matrices in experts_of(engine.model) for matrix in matrices[1:])
    assert held == each[bits]


@pytest.mark.parametrize("bits", ["stored", "int8", "int6", "int4"])
@pytest.mark.parametrize(("group", "head"), [(32, "auto"), (128, "int4"), (0, "int8"), (64, "stored"), (32, "int6")])
@pytest.mark.sampled(3)
def test_groups_and_head_are_quantized_as_the_manifest_says(group, head, bits, checkpoint, driver, compiled, ids):
    path, prompt = checkpoint("qwen2").path, ids(9, 1)
    engine = driver(path, kernels=compiled, bits=bits, group=group, head=head)
    assert part_bytes(predicted(engine.checkpoint, compiled, bits=bits, group=group, head=head)) == (
        engine.model.memory_usage.parts
    )
    matrix, made = engine.model.weights.by_name[QKV].weight, engine.model.vocabulary.head
    kinds = {"stored": ("tiles_f32", 0), "int8": ("tiles_int8", group or 64), "int4": ("tiles_int4", group or 32)}
    kinds["int6"] = "blocks_int6", 64
    assert (matrix.form, matrix.group) == kinds[bits]
    expected = head if head != "auto" else "stored" if bits == "stored" else "int8"
    assert (made.form, made.group) == kinds[expected]
    got, want = engine.run(prompt, 9), driver(path).run(prompt, 9)
    assert torch.nn.functional.cosine_similarity(got, want, dim=-1).min() > 0.9


@pytest.mark.parametrize("executor", [best(), "torch"])
def test_the_embedding_alone_is_quantized(executor, tmp_path, driver, ids):
    """A tied head has the numbers of the checkpoint, and the rows of tokens those of 6 bits."""
    random_model("Llama", hidden_size=64, head_dim=16, tie_word_embeddings=True).save_pretrained(tmp_path)
    prompt = ids(9, 1)
    plain, found = (driver(tmp_path, kernels=executor, embedding=one) for one in ("stored", "int6"))
    assert part_bytes(predicted(found.checkpoint, executor, embedding="int6")) == found.model.memory_usage.parts
    own, other = found.model.vocabulary, plain.model.vocabulary
    want = to_int6(other.table).restored()
    torch.testing.assert_close(own.embed(torch.arange(own.part.vocab), torch.float32), want, rtol=1e-6, atol=1e-7)
    got, base = found.run(prompt, 9), plain.run(prompt, 9)
    assert not torch.equal(got, base) and torch.nn.functional.cosine_similarity(got, base, dim=-1).min() > 0.99
    heads = (one.head.data if executor != "torch" else one.head for one in (own, other))
    assert torch.equal(*heads)


def test_rows_that_are_not_whole_blocks_are_refused(checkpoint, driver):
    with pytest.raises(ConfigError, match="rows of 48 numbers; must be a multiple of 64"):
        driver(checkpoint("llama").path, embedding="int6")


def experts_of(model):
    """Return the router and the matrices of the experts of each layer."""
    ops, matrix = model.program.ops, model.weights.matrix
    found = []
    for at, op in enumerate(ops):
        if isinstance(op, Linear) and op.fp32:
            experts = [one for later in ops[at : at + 5] if isinstance(later, ExpertLinear) for one in later.matrices]
            found.append([matrix(op.weight), *map(matrix, experts)])
    return found


def test_experts_of_one_layer_in_several_types_are_refused_by_name(bf16_checkpoint, tmp_path, driver, compiled):
    shutil.copytree(bf16_checkpoint("mixtral").path, tmp_path / "mixed")
    file = tmp_path / "mixed" / "model.safetensors"
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    tensors = load_file(file)
    save_file({**tensors, name: tensors[name].float()}, file, {"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"layers\.1\.block_sparse_moe\.experts\.3 is stored in another type than .*0, "
    ):
        driver(tmp_path / "mixed", kernels=compiled)
    driver(tmp_path / "mixed", kernels=compiled, bits="int8")


class Kept:
    """The file of a checkpoint's rounded weights in a folder of its own."""

    def __init__(self, folder: Path, path: Path, kernels: str) -> None:
        self.folder, self.files, self.team = folder, sorted(path.glob("*.safetensors")), Team(kernels, 1)

    def open(self, bits: str = "int8") -> PackedFile:
        return PackedFile(self.folder, self.files, bits, self.team.tiling)


@pytest.fixture(params=["qwen2", "olmoe"])
def kept(request, own_checkpoint, tmp_path, compiled):
    saved = own_checkpoint(request.param)
    return Kept(tmp_path / "cache", saved.path, compiled), saved.path


@pytest.mark.parametrize("bits", ["int8", "int6", "int4"])
def test_a_second_start_takes_what_the_first_one_kept(kept, compiled, bits, driver, ids, monkeypatch):
    store, path = kept
    first = store.open(bits)
    want = driver(path, kernels=compiled, bits=bits, known=first).run(ids(9, 1), 9)
    first.close()
    assert [file.name for file in store.folder.iterdir()] == [first.path.name]
    monkeypatch.setattr("kernels.quantisation.to_int8", None)  # nothing is rounded again
    monkeypatch.setattr("kernels.quantisation.to_int4", None)
    monkeypatch.setattr("kernels.ggml_blocks.to_int6", None)
    assert torch.equal(driver(path, kernels=compiled, bits=bits, known=store.open(bits)).run(ids(9, 1), 9), want)


def test_another_checkpoint_rounding_or_cpu_has_another_file(kept):
    store, path = kept
    names = {store.open("int8").path, store.open("int4").path}
    names.add(PackedFile(store.folder, store.files, "int8", Tiling("other", 4, 1, 1)).path)
    stat = store.files[0].stat()
    os.utime(store.files[0], ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    names.add(store.open("int8").path)
    assert len(names) == 4


def test_a_damaged_file_is_made_anew(kept, compiled, driver, ids, caplog):
    store, path = kept
    first = store.open()
    want = driver(path, kernels=compiled, bits="int8", known=first).run(ids(9, 1), 9)
    first.close()
    first.path.write_bytes(first.path.read_bytes()[:100])
    with caplog.at_level(logging.WARNING):
        again = store.open()
    assert "are recomputed" in caplog.text
    assert torch.equal(driver(path, kernels=compiled, bits="int8", known=again).run(ids(9, 1), 9), want)
    again.close()
    assert store.open().get("lm_head") is not None


def test_a_folder_that_cannot_be_written_costs_nothing_else(kept, compiled, driver, ids, caplog):
    store, path = kept
    store.folder.write_text("a file where the folder should be")
    known = store.open()
    driver(path, kernels=compiled, bits="int8", known=known).run(ids(9, 1), 9)
    with caplog.at_level(logging.WARNING):
        known.close()
    assert "are not cached" in caplog.text
