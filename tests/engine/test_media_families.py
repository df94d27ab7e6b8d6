"""Multimodal families through the whole engine: M-RoPE, additions to hidden states, bidirectional attention, recurrent
layers. The towers themselves have tests in tests/engine/layers."""

import pytest

from kernels.cpu.library import best
from tests.engine.media_models import FAMILIES, check, greedy, opened

NAMES = [name for name in FAMILIES if name != "llava"]
KERNELS = ("torch", best())


@pytest.fixture(scope="module", params=NAMES)
def case(request, tmp_path_factory):
    make, picture = FAMILIES[request.param]
    family = make(tmp_path_factory.mktemp("family"))
    one, other = picture(1), picture(2)
    prompts = ((7,), (3, one, 5), (one, 2, other, 1), (2, other))
    return family, one, other, {parts: family.reply(*parts) for parts in prompts}


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.sampled(3)
def test_replies_equal_those_of_transformers(case, kernels):
    """Prompts run together, in chunks where attention permits it."""
    family, _, _, replies = case
    with opened(family, kernels, max_step_tokens=24, max_running=4) as llm:
        found = llm.generate([family.prompt(*parts) for parts in replies], greedy())
        again = llm.generate([family.prompt(*parts) for parts in replies], greedy())
    for parts, cold, warm in zip(replies, found, again, strict=True):
        check(cold, replies[parts])
        check(warm, replies[parts])
    assert any(one.timing.cached_tokens for one in again)


@pytest.mark.parametrize("name", ["qwen3-vl", "gemma3"])
def test_replies_with_triton_equal_those_of_transformers(name, tmp_path):
    """M-RoPE with additions to hidden states, and bidirectional attention; the reply continues after the grid."""
    make, picture = FAMILIES[name]
    family = make(tmp_path)
    parts = (2, picture(1), 3)
    with opened(family, "triton", max_step_tokens=12, max_running=2, max_context=40, kv_bytes=1 << 17) as llm:
        (found,) = llm.generate(family.prompt(*parts), greedy(3))
    check(found, family.reply(*parts, count=3))
