"""Tests of 16-bit and 8-bit KV pages with a whole model: their error, and independence of the split into steps."""

import pytest
import torch

from kernels.cpu.library import best, usable
from tests.tiers import paired

SOME = ["llama", "qwen2", "qwen3", "gemma2", "mistral"]


@pytest.mark.parametrize("case_name", SOME)
def test_pages_of_whole_numbers_cost_little(case_name, compiled, checkpoint, driver, ids):
    """127 steps up and down from zero: each key and value is at most 0.4% of its largest off, and so logits of random
    weights move by a few hundredths of their size at most; in half precision by a hundredth of that."""
    prompt = ids(37, 1)
    want = checkpoint(case_name).logits(prompt)

    def change(dtype):
        got = driver(checkpoint(case_name).path, kernels=compiled, page_dtype=dtype).run(prompt, 13)
        return float((got - want).norm() / want.norm())

    assert change(torch.float32) < 1e-5 < change(torch.float16) < 2e-3 < change(torch.int8) < 3e-2
    assert 3e-2 < change(torch.uint8) < 0.3  # 16 steps in place of 255


@pytest.mark.parametrize("page_dtype", [torch.int8, torch.uint8], ids=["int8", "int4"])
@pytest.mark.parametrize("case_name", SOME)
@pytest.mark.sampled(2)
def test_rows_over_pages_of_whole_numbers_are_the_same_in_any_step(
    case_name, page_dtype, compiled, checkpoint, driver, ids
):
    path, prompt = checkpoint(case_name).path, ids(29, 9)
    options = {"kernels": compiled, "page_dtype": page_dtype}
    want = driver(path, **options).run(prompt, len(prompt))
    assert torch.equal(driver(path, threads=1, **options).run(prompt, 1), want)
    company = driver(path, block_tokens=3, seed=4, **options)
    request, other = company.add(prompt), company.add(ids(40, 40))
    company.step([(other, 20), (request, 11)])
    company.step([(request, 1), (other, 1)])
    company.step([(other, 19), (request, 17)])
    assert torch.equal(request.result, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case_name", SOME)
def test_torch_and_compiled_kernels_agree_over_16_bit_pages_however_steps_are_cut(
    case_name, dtype, compiled, checkpoint, driver, ids
):
    """Pages of both round to the same numbers. The order of float32 sums moves about 1 of 500 keys and values across a
    border of float16, by a whole unit where rounding moves all by 0.29 units (rms): √(12 / 500) = 0.15 of the cost."""
    path, prompt = checkpoint(case_name).path, ids(37, 1)
    runs = [
        driver(path, kernels=kernels, page_dtype=dtype).run(prompt, size)
        for kernels in (compiled, "torch")
        for size in (len(prompt), 13)
    ]
    exact = driver(path, kernels=compiled).run(prompt, 13)
    cost = float((runs[0] - exact).norm())
    for other in runs[1:]:
        assert float((other - runs[0]).norm()) < 0.3 * cost


@pytest.mark.parametrize(("page_dtype", "case_name"), paired([torch.int8, torch.uint8], ["llama", "gemma2"]), ids=str)
def test_executors_agree_over_pages_of_whole_numbers(case_name, page_dtype, checkpoint, driver, ids):
    """Torch, compiled and Triton kernels write the same codes, but for those at a tie, which the order of float32 sums
    moves across; prompts in one step and in several read the same numbers."""
    path, prompt = checkpoint(case_name).path, ids(21, 1)
    want = driver(path, kernels="torch", page_dtype=page_dtype).run(prompt, len(prompt))
    cost = float((want - driver(path, kernels="torch").run(prompt, len(prompt))).norm())
    for kernels, size in (("torch", 13), *((one, 13) for one in usable()), ("triton", 21), ("triton", 13)):
        got = driver(path, kernels=kernels, page_dtype=page_dtype).run(prompt, size)
        assert float((got - want).norm()) < 0.1 * cost, kernels


@pytest.mark.parametrize("page_dtype", [torch.int8, torch.uint8], ids=["int8", "int4"])
def test_a_block_of_pages_is_its_bytes(page_dtype, checkpoint, driver, ids):
    """A request with a copy of another request's blocks continues with the same results."""
    engine = driver(checkpoint("llama").path, kernels=best(), page_dtype=page_dtype)
    assert engine.pages[0].nbytes == engine.layout.block_bytes
    prompt = ids(21, 2)
    first, second = engine.add(prompt), engine.add(prompt)
    engine.step([(first, 17)])
    for ours, theirs in zip(first.tables[0], second.tables[0], strict=True):
        engine.pages[theirs] = engine.pages[ours]
    second.done = 17
    engine.step([(first, 4)])
    engine.step([(second, 4)])
    assert torch.equal(second.result, first.result[17:])
