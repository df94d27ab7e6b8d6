"""Towers and projectors of multimodal families, compared with transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.distributed.world import Single
from engine.layers.linear import Target
from engine.layers.tower import TowerModel
from engine.models.checkpoint import Checkpoint, check_tensors, read_checkpoint
from engine.weights.files import Weights
from kernels.cpu.program import Team
from tests.engine.layers.towers import CASES, Case, save

Saved = tuple[Case, Path, Any]
CPU = Target(torch.float32, torch.device("cpu"))


@pytest.fixture(scope="module", params=CASES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    path = tmp_path_factory.mktemp("towers") / request.param
    return CASES[request.param], path, save(CASES[request.param], path)


def loaded(found: Checkpoint, target: Target = CPU) -> TowerModel:
    """Return the tower of a checkpoint. Every tensor of the tower and the projectors is read once."""
    assert found.model.media is not None
    tower = TowerModel(found.model.media, Single(), target)
    weights = Weights(found.tensors, lambda fraction: None)
    tower.load(weights.read)
    return tower


def compiled(threads: int = 2) -> Target:
    return Target(torch.float32, torch.device("cpu"), Team("base", threads))


def assert_close(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert [one.shape for one in found] == [one.shape for one in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()


def test_embeddings_are_those_of_transformers(saved: Saved) -> None:
    """Also if several items of different sizes are computed together."""
    case, path, model = saved
    found, items = read_checkpoint(path), case.items()
    check_tensors(found.model, found.tensors, found.quantization)
    with torch.no_grad():
        wanted = case.features(model, items)
    assert found.model.media is not None and wanted[0].shape[1] == found.model.media.width
    for target in (CPU, compiled()):
        tower = loaded(found, target)
        assert_close([embeddings for item in items for embeddings in tower.encode([item])], wanted)
        assert_close(tower.encode(items), wanted)
