"""Tests of a World over a process group: sums in rank order, batch invariance, and no endless waits."""

import threading

import pytest
import torch

from engine.distributed.group import in_order, open_group
from engine.distributed.world import least

CPU = torch.device("cpu")


@pytest.fixture
def groups(tmp_path):
    """Runs a function for each rank of a new group, in threads; all results."""
    number = iter(range(100))

    def run(size, work):
        store, results, errors = tmp_path / f"store{next(number)}", [None] * size, []

        def one(rank):
            try:
                results[rank] = work(open_group(CPU, store, rank, size, ordered=False, timeout_s=60))
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results

    return run


def brought(rank, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)) * 10.0**rank


@pytest.mark.parametrize("size", [2, 3, 5])
def test_row_does_not_depend_on_other_rows(size, groups):
    """Bit for bit, which gloo's own sum does not: it cuts a message by its size and begins each piece elsewhere."""

    def work(world):
        x = brought(world.rank, 129, 33)
        return [world.all_reduce(x[:rows].clone()) for rows in (1, 2, 17, 129)]

    want = brought(0, 129, 33)
    for rank in range(1, size):
        want += brought(rank, 129, 33)
    for results in groups(size, work):
        for result in results:
            assert torch.equal(result, want[: len(result)])


def test_bf16_is_summed_in_float32():
    shares = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    assert in_order(shares).tolist() == [258.0]  # in bf16 each 1 would be lost


def test_gather_returns_ranks_in_order_for_any_type_and_shape(groups):
    def work(world):
        whole = world.all_gather(torch.full((2, 3), world.rank, dtype=torch.int64).t())
        return whole, least(world, 100 - world.rank, CPU)

    for whole, smallest in groups(3, work):
        assert whole.shape == (3, 3, 2) and whole[:, 1, 1].tolist() == [0, 1, 2]
        assert smallest == 98


def test_groups_do_not_become_the_default_of_the_process(groups):
    groups(2, lambda world: world.all_reduce(torch.ones(3)))
    assert not torch.distributed.is_initialized()
