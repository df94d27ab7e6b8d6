"""Memory of a multimodal model: planned bytes equal the allocated ones."""

import pytest
import torch

from engine.api.config import TaskConfig
from engine.distributed.world import SINGLE
from engine.layers.linear import Target
from engine.layers.tower import TowerModel
from engine.lowering.footprint import Holder, footprint, mapped_bytes, part_bytes
from engine.lowering.media_memory import tower_sizes
from engine.lowering.querying import QueryProgram
from engine.models.checkpoint import read_checkpoint
from engine.weights.files import Weights
from kernels.cpu.library import best, tiling
from kernels.cpu.program import Team
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


def test_blocks_of_keys_of_merged_squares_are_planned(tmp_path):
    """Four rows of a square attend to one another, and fill a block of 16 rows."""
    save(CASES["minicpm-v"], tmp_path)
    checkpoint = read_checkpoint(tmp_path)
    media = checkpoint.model.media
    tower = TowerModel(media, SINGLE, Target(torch.float32, torch.device("cpu"), Team("base", 1)))
    tower.load(Weights(checkpoint.tensors, lambda fraction: None).read)
    item = {"pixel_values": torch.ones(1, 3, 4, 4 * 16 * 16), "target_sizes": torch.tensor([[16, 16]])}
    (found,) = tower.encode([item])
    (squares,) = (one.context for one in tower.program.projectors[0].stages if isinstance(one, QueryProgram))
    kept = sum(one._ops.whole.nbytes for one in tower._executors.values() if one._ops.whole is not None)
    assert tower._executors[id(squares)]._ops.whole.nbytes == 4 * 256 * 4 * (2 * media.tower.hidden)
    used = kept + sum(one.buffer_bytes for one in tower._executors.values())
    assert used <= 4 * len(found) * tower_sizes(media).elements


@pytest.mark.parametrize(("name", "keeps"), [("llava", False), ("paligemma", True)])
def test_without_images_no_tower_is_loaded(name, keeps, tmp_path):
    """PaliGemma's prompts attend in both directions, which is declared with its tower."""
    family = FAMILIES[name][0](tmp_path)
    found = read_checkpoint(family.folder, task=TaskConfig(images=False))
    assert (found.model.media is not None) == keeps
    if not keeps:
        assert found.model == read_checkpoint(family.folder, task=TaskConfig(text_only=True)).model
