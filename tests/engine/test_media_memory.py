"""Memory of a multimodal model: planned bytes equal the allocated ones."""

import pytest

from engine.api.config import TaskConfig
from engine.lowering.footprint import Holder, footprint, mapped_bytes, part_bytes
from engine.models.checkpoint import read_checkpoint
from kernels.cpu.library import best, tiling
from tests.engine.layers.test_footprint import compare
from tests.engine.layers.towers import CASES, save
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


@pytest.mark.parametrize("kernels", ["torch", best()])
@pytest.mark.parametrize("name", ["aria", "blip-2", "idefics2", "minicpm-v"])
def test_planned_weights_of_learned_queries_equal_loaded_ones(name, kernels, tmp_path):
    save(CASES[name], tmp_path)
    compare(read_checkpoint(tmp_path), kernels)


@pytest.mark.parametrize(("name", "keeps"), [("llava", False), ("paligemma", True)])
def test_without_images_no_tower_is_loaded(name, keeps, tmp_path):
    """PaliGemma's prompts attend in both directions, which is declared with its tower."""
    family = FAMILIES[name][0](tmp_path)
    found = read_checkpoint(family.folder, task=TaskConfig(images=False))
    assert (found.model.media is not None) == keeps
    if not keeps:
        assert found.model == read_checkpoint(family.folder, task=TaskConfig(text_only=True)).model
