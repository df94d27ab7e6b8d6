"""Planned memory of selected experts, and of the scores of an indexer."""

from pathlib import Path

import pytest
import torch

from appliance.planning.workspace import BUFFER, StepSize, indexer_scores, workspace
from engine.distributed.world import SINGLE
from engine.kv.layout import layout
from engine.layers.model import TextModel
from engine.models.checkpoint import read_checkpoint
from kernels.cpu.library import best
from kernels.cpu.program import Team
from tests.engine.layers.conftest import random_model
from tests.engine.layers.families import random_family, save_family


@pytest.mark.parametrize("routes", [False, True])
def test_buffers_of_compiled_kernels_with_selected_experts_have_the_planned_size(tmp_path: Path, routes: bool) -> None:
    random_model("qwen3-moe").save_pretrained(tmp_path)
    checkpoint = read_checkpoint(tmp_path)
    form = layout(checkpoint.model, block_tokens=16, element_bytes=4)
    model = TextModel(checkpoint.model, form, SINGLE, torch.float32, "cpu", Team(best(), 1), routes=routes)
    model.load(checkpoint)
    model.reserve(256, 4)
    size = StepSize(256, 4, routes=routes)
    steps = workspace(checkpoint.model, device="cpu", kernels=best(), size=size, element_bytes=4)
    assert model.compiled is not None
    planned = {one.name.split()[1]: one.value for one in steps if one.name.startswith(BUFFER)}
    allocated = {name: 4 * one.numel() for name, one in model.compiled.buffers.tensors.items()}
    assert planned == allocated
    chosen = [name for name in planned if name.startswith("chosen")]
    assert chosen == ([f"chosen_{layer}" for layer in range(len(chosen))] if routes else ["chosen"])


@pytest.mark.parametrize(("kernels", "words"), [("torch", 3), ("triton", 8)])
def test_plan_counts_kept_experts_for_other_kernels(tmp_path: Path, kernels: str, words: int) -> None:
    random_model("qwen3-moe").save_pretrained(tmp_path)
    model = read_checkpoint(tmp_path, weights=False).model
    sizes = [
        sum(one.value for one in workspace(model, device="cpu", kernels=kernels, size=size, element_bytes=4))
        for size in (StepSize(100, 4), StepSize(100, 4, routes=True))
    ]
    experts = sum(routes.width for routes in TextModel(
        model, layout(model, block_tokens=16, element_bytes=4), SINGLE, torch.float32, "cpu", routes=True
    ).program.routes)  # fmt: skip
    assert sizes[1] - sizes[0] >= 100 * experts * 4 * words


@pytest.mark.parametrize(("kernels", "expected"), [("torch", (7 + 5) * 37 * 50 * 4), ("triton", 37 * 50 * 4)])
def test_plan_counts_the_scores_of_an_indexer(tmp_path: Path, kernels: str, expected: int) -> None:
    """Count 37 tokens, 50 positions and 7 heads."""
    save_family("deepseek-v32-odd", random_family("deepseek-v32-odd"), tmp_path)
    model = read_checkpoint(tmp_path, weights=False).model
    found = indexer_scores(model, kernels=kernels, size=StepSize(37, 4), max_context=50)
    assert sum(one.value for one in found) == expected
    assert indexer_scores(model, kernels=best(), size=StepSize(37, 4), max_context=50) == ()
