"""Memory of a multimodal model: planned bytes equal the allocated ones."""

import pytest

from engine.lowering.footprint import Holder, footprint, mapped_bytes, part_bytes
from engine.models.checkpoint import read_checkpoint
from kernels.cpu.library import best, tiling
from tests.engine.media_models import FAMILIES, opened


@pytest.mark.parametrize("kernels", ["torch", best()])
@pytest.mark.parametrize("name", ["llava", "qwen3-vl", "gemma3"])
def test_planned_weights_equal_allocated_ones(name, kernels, tmp_path):
    family = FAMILIES[name][0](tmp_path)
    found = read_checkpoint(family.folder)
    planned = footprint(found.model, found.tensors, None, Holder("float32", tiling=tiling(kernels)))
    with opened(family, kernels) as llm:
        (held,) = llm._worker.memory
    assert {part: size for part, size in held.held.items() if part in part_bytes(planned)} == part_bytes(planned)
    assert held.mapped == mapped_bytes(planned)
    assert part_bytes(planned)["tower"] > 0
