"""Ranks divide the items of a step, and have the embeddings of a single rank."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.distributed.world import SINGLE, World
from engine.layers.linear import Target
from engine.layers.towers import Towers, divided
from engine.models.checkpoint import read_checkpoint
from engine.weights.files import Weights
from tests.engine.layers.towers import CASES, save

CPU = Target(torch.float32, torch.device("cpu"))


class Threads:
    """A world whose ranks are threads of this process."""

    def __init__(self, rank: int, size: int, shared: dict[int, Tensor], barrier: threading.Barrier) -> None:
        self.rank, self.size, self._shared, self._barrier = rank, size, shared, barrier
        self.gathered = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        return self.all_gather(x).sum(0)

    def all_gather(self, x: Tensor) -> Tensor:
        self.gathered += 1
        self._shared[self.rank] = x
        self._barrier.wait(60)
        found = torch.stack([self._shared[rank] for rank in range(self.size)])
        self._barrier.wait(60)
        return found


def on_ranks(size: int, run: Any) -> list[Any]:
    """Return the result, or the ValueError, of each rank."""
    shared, barrier, found = dict[int, Tensor](), threading.Barrier(size), dict[int, Any]()

    def work(rank: int) -> None:
        try:
            found[rank] = run(Threads(rank, size, shared, barrier))
        except ValueError as error:
            found[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(120)
    return [found[rank] for rank in range(size)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("towers")
    save(CASES["qwen3-vl"], folder)
    return folder


def loaded(path: Path, world: World) -> Towers:
    found = read_checkpoint(path)
    assert found.model.media is not None
    towers = Towers(found.model.media, world, CPU)
    towers.load(Weights(found.tensors, lambda fraction: None).read)
    return towers


@pytest.mark.parametrize(("ranks", "count"), [(2, 3), (3, 2), (2, 1)])
def test_ranks_have_the_embeddings_of_one_rank(path: Path, ranks: int, count: int) -> None:
    """Also if a rank has no item. A single item is computed by all, without an exchange."""
    items = CASES["qwen3-vl"].items()[:count]
    wanted = loaded(path, SINGLE).encode(items)
    computed = list[int]()

    def run(world: Threads) -> tuple[list[Tensor], int]:
        towers = loaded(path, world)
        alone = towers.encode_alone
        towers.encode_alone = lambda own: computed.append(len(own)) or alone(own)  # type: ignore[method-assign]
        return towers.encode(items), world.gathered

    results = on_ranks(ranks, run)
    for found, gathered in results:
        assert [one.shape for one in found] == [one.shape for one in wanted]
        assert all(torch.allclose(one, other, rtol=0, atol=1e-6) for one, other in zip(found, wanted, strict=True))
        assert all(map(torch.equal, found, results[0][0]))
        assert gathered == (0 if count == 1 else 3)
    assert sum(computed) == (ranks if count == 1 else count)


def test_every_rank_raises_the_error_of_one(path: Path) -> None:
    good, other = CASES["qwen3-vl"].items()[:2]
    errors = on_ranks(2, lambda world: loaded(path, world).encode([good, {"input_ids": torch.zeros(1)}, other]))
    assert [str(one) for one in errors] == [str(errors[0])] * 2 and "input_ids" in str(errors[0])


def test_items_are_divided_by_their_cost() -> None:
    assert divided([5, 1, 1, 1, 1, 1], 2) == [0, 1, 1, 1, 1, 1]
    assert divided([1, 2, 3], 1) == [0, 0, 0]
    assert sorted(divided([4, 4, 4], 4)) == [0, 1, 2]
