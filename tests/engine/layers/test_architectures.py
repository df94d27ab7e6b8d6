"""Every architecture and rope scaling against transformers in float32: same checkpoint and tokens, logits within 1e-4.

Checkpoints are tiny, random, and saved by transformers in several shards.
"""

import random

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.api.errors import ConfigError
from engine.models.checkpoint import read_checkpoint
from engine.models.families import ARCHITECTURES
from kernels.cpu.library import best
from tests.engine.layers.families import CASES as FAMILIES
from tests.engine.layers.families import saved_architecture
from tests.engine.layers.test_families import REPEATED
from tests.tiers import thinned

# Names that first exporters gave to architectures which have a case under their present name.
ALIASES = {
    *("BaiChuanForCausalLM", "Ernie4_5_ForCausalLM", "Ernie4_5_MoEForCausalLM", "MPTForCausalLM", "RWForCausalLM"),
    *("MiniMaxM1ForCausalLM", "MiniMaxText01ForCausalLM", "PhiMoEForCausalLM", "StableLMEpochForCausalLM"),
}
PROMPT = 37  # more than every window and every original length of the cases


def close(got, want):
    assert got.shape == want.shape
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


def test_every_served_architecture_has_a_case(case_names, checkpoint, tmp_path):
    """Those that pool have theirs in test_encoders.py, families of dense decoders in test_families.py"""
    found = {read_checkpoint(checkpoint(name).path).architecture for name in case_names}
    for name in FAMILIES.keys() - set(REPEATED):
        found.add(saved_architecture(name, tmp_path / name))
    assert found | ALIASES == {name for name in ARCHITECTURES if name.endswith(("ForCausalLM", "LMHeadModel"))}


def test_a_prompt_in_one_step_equals_transformers(case, kernels, checkpoint, driver, ids, shows):
    prompt = ids(PROMPT)
    close(driver(checkpoint(case).path, kernels=kernels).run(prompt, PROMPT), checkpoint(case).logits(prompt))
    shows(checkpoint(case).path, *["compiled CPU"][: kernels == best()])


@pytest.mark.parametrize("chunk", thinned([1, 7, 13], kept=[7]))
def test_a_prompt_in_chunks_equals_transformers(case, kernels, chunk, checkpoint, driver, ids):
    prompt = ids(PROMPT, 1)
    close(driver(checkpoint(case).path, kernels=kernels).run(prompt, chunk), checkpoint(case).logits(prompt))


@pytest.mark.sampled(5)
def test_rows_of_all_kinds_in_one_step_equal_transformers(case, kernels, checkpoint, driver, ids):
    """Decoding rows of several lengths, first chunks and later chunks share steps in an order drawn at random."""
    draw = random.Random(7)
    engine = driver(checkpoint(case).path, kernels=kernels, block_tokens=3, seed=7)
    requests = [engine.add(ids(length, length)) for length in (1, 2, 9, 23, 24, 31)]
    while unfinished := [request for request in requests if request.done < len(request.ids)]:
        some = draw.sample(unfinished, draw.randint(1, len(unfinished)))
        engine.step([(r, min(draw.choice([1, 1, 1, 2, 5, 11]), len(r.ids) - r.done)) for r in some])
    for request in requests:
        close(request.result, checkpoint(case).logits(request.ids))


@pytest.mark.sampled(2)
def test_generation_past_the_prompt_equals_transformers_with_its_cache(part_case, kernels, checkpoint, driver, ids):
    """Scalings that depend on the length leave earlier keys as they were rotated."""
    prompt, rest = ids(18, 3), ids(9, 4)
    model, cache, want = checkpoint(part_case).transformers(), None, []
    with torch.no_grad():
        for piece in (prompt, *([token] for token in rest)):
            out = model(torch.tensor([piece]), past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            want.append(out.logits[0])
    engine = driver(checkpoint(part_case).path, kernels=kernels)
    request = engine.add(prompt + rest, rope_length=len(prompt))
    engine.step([(request, len(prompt))])
    for _ in rest:
        engine.step([(request, 1)])
    close(request.result, torch.cat(want))


@pytest.mark.sampled(4)
def test_a_bf16_checkpoint_equals_transformers_in_float32(part_case, kernels, bf16_checkpoint, driver, ids):
    """Compiled kernels keep bf16 weights unchanged; activations are float32 on both sides."""
    prompt = ids(PROMPT, 8)
    close(
        driver(bf16_checkpoint(part_case).path, kernels=kernels).run(prompt, 30),
        bf16_checkpoint(part_case).logits(prompt),
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_checkpoints_of_other_types_are_served(dtype, kernels, own_checkpoint, driver, ids):
    saved, prompt = own_checkpoint("qwen2"), ids(11)
    file = saved.path / "model.safetensors"
    save_file({name: tensor.to(dtype) for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    close(driver(saved.path, kernels=kernels).run(prompt, 5), saved.logits(prompt))


@pytest.mark.parametrize("saved", ["checkpoint", "bf16_checkpoint"])
@pytest.mark.sampled(3)
def test_compiled_kernels_make_a_row_the_same_whatever_stands_beside_it(
    part_case, compiled, saved, request, driver, ids
):
    """Bit for bit: in one step, in chunks, token by token, and among other rows."""
    path = request.getfixturevalue(saved)(part_case).path
    prompt = ids(29, 9)
    want = driver(path, kernels=compiled).run(prompt, len(prompt))
    assert torch.equal(driver(path, kernels=compiled, threads=1).run(prompt, 1), want)
    company = driver(path, kernels=compiled, block_tokens=3, seed=4)
    request_, others = company.add(prompt), [company.add(ids(length, length)) for length in (1, 40, 17)]
    company.step([(others[0], 1), (request_, 11), (others[1], 20)])
    company.step([(request_, 1), (others[2], 17)])
    company.step([(others[1], 1), (request_, 17)])
    assert torch.equal(request_.result, want)


@pytest.mark.sampled(2)
def test_two_ranks_compute_what_one_computes(part_case, kernels, checkpoint, driver, ids, on_ranks, shows):
    prompt, path = ids(19, 5), checkpoint(part_case).path
    want = checkpoint(part_case).logits(prompt)

    def work(world):
        return driver(path, world=world, kernels=kernels, threads=1).run(prompt, 7)

    if "odd" in part_case:
        with pytest.raises(ConfigError, match=r"2 ranks cannot share 5 heads; use one of 1, 5 ranks"):
            on_ranks(2, work, kernels)
        return
    for got in on_ranks(2, work, kernels):
        close(got, want)
    shows(path, "2 ranks")


@pytest.mark.parametrize("case_name", ["llama", "olmo2", "cohere-qk-norm"])
def test_ranks_that_outnumber_the_kv_heads_share_them(case_name, kernels, checkpoint, driver, ids, on_ranks):
    prompt, path = ids(11, 6), checkpoint(case_name).path
    for got in on_ranks(6, lambda world: driver(path, world=world, kernels=kernels, threads=1).run(prompt, 4), kernels):
        close(got, checkpoint(case_name).logits(prompt))


@pytest.mark.parametrize(("case_name", "size"), [("llama", 2), ("llama", 6), ("qwen2-moe", 2), ("olmo2", 6)])
@pytest.mark.sampled(3)
def test_a_row_is_the_same_bit_for_bit_on_ranks_too(case_name, size, compiled, checkpoint, driver, ids, on_ranks):
    """In one step, token by token, and among other rows; with teams of one thread and of two."""
    path, prompt = checkpoint(case_name).path, ids(29, 9)

    def alone(chunk, threads):
        def work(world):
            return driver(path, kernels=compiled, world=world, threads=threads).run(prompt, chunk)

        return on_ranks(size, work, compiled)

    def among_others(world):
        company = driver(path, kernels=compiled, world=world, block_tokens=3, seed=4, threads=1)
        row, others = company.add(prompt), [company.add(ids(length, length)) for length in (1, 40, 17)]
        company.step([(others[0], 1), (row, 11), (others[1], 20)])
        company.step([(row, 1), (others[2], 17)])
        company.step([(others[1], 1), (row, 17)])
        return row.result

    want = alone(len(prompt), 2)
    for got in (want, alone(1, 1), on_ranks(size, among_others, compiled)):
        for result in got:
            assert torch.equal(result, want[0])


@pytest.mark.parametrize("length", [15, 16, 17])
def test_longrope_changes_its_factors_past_the_original_length(length, checkpoint, driver, ids):
    prompt = ids(length, 8)
    close(driver(checkpoint("phi3-long").path).run(prompt, 5), checkpoint("phi3-long").logits(prompt))
