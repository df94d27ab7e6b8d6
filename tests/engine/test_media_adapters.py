"""LoRA adapters of models that read images: they change the text decoder, as merged weights do."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest

from engine.api.errors import CheckpointError
from kernels.cpu.library import best
from tests.engine.adapters import merge, random_pairs, write_adapter
from tests.engine.media_models import REPLY, check, greedy, llava, llava_picture, opened

PARTS = ((7,), (3, llava_picture(1), 5))


def test_rows_with_images_and_adapters_equal_merged_weights(tmp_path: Path) -> None:
    family = llava(tmp_path / "llava")
    pairs = random_pairs(family.model, ("q_proj", "down_proj"), chosen=lambda name: "language_model" in name)
    merged = replace(family, model=copy.deepcopy(family.model))
    merge(merged.model, pairs)
    folder = write_adapter(tmp_path / "a", pairs)
    with opened(family, best(), adapters={"a": folder}) as llm:
        rows = [(parts, adapter) for parts in PARTS for adapter in ("", "a")]
        found = llm.generate([family.prompt(*parts) for parts, _ in rows], [greedy(adapter=one) for _, one in rows])
    for (parts, adapter), generation in zip(rows, found, strict=True):
        check(generation, (merged if adapter else family).reply(*parts))
    assert family.reply(*PARTS[1]) != merged.reply(*PARTS[1]) and len(found[0].ids) == REPLY
    tower = random_pairs(family.model, ("q_proj",), chosen=lambda name: "vision" in name)
    with pytest.raises(CheckpointError, match="only the text decoder is served"):
        opened(family, "torch", adapters={"a": write_adapter(tmp_path / "tower", tower)})
