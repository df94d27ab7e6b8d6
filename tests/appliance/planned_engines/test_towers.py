"""Time of towers in the plan, and what text steps read of them."""

from pathlib import Path

import pytest

from appliance.planning.roofline import Limits, matrix_bytes, roofline
from appliance.planning.workspace import StepSize, media_memory
from engine.kv.layout import layout
from engine.lowering.footprint import Holding
from engine.lowering.media_memory import media_bytes, tower_operations
from engine.models.checkpoint import read_checkpoint
from tests.engine.layers.towers import CASES, save

LIMITS = Limits(bandwidth=1_000, operations=1_000_000, source="a device")


def test_the_time_of_a_steps_media_is_planned(tmp_path: Path) -> None:
    save(CASES["qwen2-vl"], tmp_path)
    model = read_checkpoint(tmp_path).model
    form = layout(model, block_tokens=16, element_bytes=4)
    holdings = [Holding("mlp", "a", "float32", (10, 4)), Holding("tower", "b", "float32", (1_000, 4))]
    made, text = (
        roofline(model, holdings, form, LIMITS, step_tokens=64, length=32, most=1, media_tokens=count)
        for count in (8, 0)
    )
    assert model.media is not None and made.media_s == pytest.approx(8 * tower_operations(model.media, 8) / 1_000_000)
    assert made.accounts[-1].key == "towers" and text.media_s is None
    assert made.decode == text.decode and made.prefill == text.prefill


def test_steps_of_text_do_not_read_towers() -> None:
    holdings = [Holding("mlp", "a", "float32", (10, 4)), Holding("tower", "b", "float32", (1_000, 4))]
    assert matrix_bytes(holdings, head=True) - matrix_bytes(holdings[:1], head=True) == 0
    assert matrix_bytes(holdings, head=False) == 40


@pytest.mark.parametrize(("ranks", "copies"), [(1, 2), (4, 7)])
def test_ranks_that_divide_items_have_buffers_for_all_embeddings(tmp_path: Path, ranks: int, copies: int) -> None:
    """Engines measure with the same sum."""
    save(CASES["qwen3-vl"], tmp_path)
    model = read_checkpoint(tmp_path).model
    steps = media_memory(model, StepSize(64, 4, media_tokens=10, media_cache=100), 4, ranks)
    assert model.media is not None
    assert sum(step.value for step in steps) == media_bytes(model.media, 10, 100, 4, ranks)
    assert steps[1].value == 10 * copies * model.media.width * 4
