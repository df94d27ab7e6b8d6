"""Operations of towers, compared with those that torch counts in transformers' models."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from engine.lowering.media_memory import tower_operations
from engine.models.checkpoint import read_checkpoint
from tests.engine.layers.towers import CASES, save


@pytest.mark.parametrize("name", ["qwen2-vl", "qwen3-vl", "kimi-vl", "glm-ocr"])
def test_operations_of_an_image_are_those_that_torch_counts(name: str, tmp_path: Path) -> None:
    model, item = save(CASES[name], tmp_path), CASES[name].items()[0]
    _set_eager(model)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        (found,) = CASES[name].features(model, [item])
    media = read_checkpoint(tmp_path).model.media
    assert media is not None
    count = len(found)
    assert count * tower_operations(media, count) == pytest.approx(counter.get_total_flops(), rel=0.02)


def _set_eager(model: Any) -> None:
    """Let attention be products that torch counts."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, transformers.PreTrainedConfig):
            config._attn_implementation = "eager"
