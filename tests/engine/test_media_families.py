"""Multimodal families through the whole engine: M-RoPE, additions to hidden states, bidirectional attention, recurrent
layers. The towers themselves have tests in tests/engine/layers."""

import pytest

from engine.llm import MediaPrompt
from kernels.cpu.library import best
from tests.engine.media_models import FAMILIES, Family, Picture, check, counts, greedy, opened

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
