"""Tests of the model with fused kernels in Triton's interpreter.

They compare every architecture with transformers, with chunked prompts, decoding, batches and 8-bit pages."""

import pytest
import torch

from engine.layers.fused import attention
from engine.models.kv_scales import KVScales
from kernels.jit import installed
from kernels.qk_norm_rope_kv import QK_NORM_ROPE_KV
from tests.tiers import thinned

pytestmark = [
    pytest.mark.skipif(not installed(), reason="Triton is not installed"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]


def close(got, want, tolerance=2e-5):
    scale = want.abs().max()
    assert (got - want).abs().max() <= tolerance * scale + 1e-6, (got - want).abs().max() / scale


def test_every_architecture_equals_transformers(part_case, checkpoint, driver, ids, shows):
    """Run a prompt in two chunks, then a single token; longer for models whose RoPE changes after 16 positions."""
    counts = (11, 7, 1) if part_case in ("llama-dynamic", "phi3-long") else (7, 4, 1)
    saved, prompt = checkpoint(part_case), ids(sum(counts))
    made = driver(saved.path, kernels="triton")
    request = made.add(prompt)
    for count in counts:
        made.step([(request, count)])
    close(request.result, saved.logits(prompt))
    shows(saved.path, "Triton interpreted")


@pytest.mark.parametrize("name", thinned(["gemma2", "qwen3-windows", "qwen2-moe", "qwen3-moe"], ["qwen3-moe"]))
@pytest.mark.nightly(
    "tests/engine/worker/test_fused_experts.py::test_an_invariant_request_is_the_same_in_any_batch_bit_for_bit"
)
def test_a_row_is_the_same_beside_others_bit_for_bit(name, checkpoint, driver, ids):
    """Prompts in pieces and single tokens together in one step."""
    prompts = [ids(length, seed=length) for length in (6, 8, 11)]
    together = driver(checkpoint(name).path, kernels="triton", seed=1)
    rows = [together.add(prompt) for prompt in prompts]
    for counts in ((5, 4, 1), (1, 3, 9), (0, 1, 1)):
        together.step([(row, count) for row, count in zip(rows, counts, strict=True) if count])
    for prompt, row, counts in zip(prompts, rows, ((5, 1), (4, 3, 1), (1, 9, 1)), strict=True):
        alone = driver(checkpoint(name).path, kernels="triton", seed=2)
        request = alone.add(prompt)
        for count in counts:
            alone.step([(request, count)])
        assert torch.equal(row.result, request.result)


def test_pages_of_8_bits_cost_little(checkpoint, driver, ids, monkeypatch):
    """Also with scales, which spread small keys and values over what 8 bits can hold. Torch writes the pages here: the
    interpreter loses the carry of a rounded mantissa."""
    monkeypatch.setattr(attention, "QK_NORM_ROPE_KV", QK_NORM_ROPE_KV.reference)
    prompt = ids(13)
    wanted = checkpoint("llama").logits(prompt)
    for scales in (None, KVScales((0.25,) * 3, (0.5,) * 3)):
        made = driver(checkpoint("llama").path, kernels="triton", page_dtype=torch.float8_e4m3fn, scales=scales)
        request = made.add(prompt)
        for count in (7, 4, 1, 1):
            made.step([(request, count)])
        close(request.result, wanted, 0.1)
