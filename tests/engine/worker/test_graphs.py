"""Which captured size runs a step; on a device without graphs the launches themselves."""

import pytest
import torch

from engine.api.config import graph_ladder
from engine.worker.graphs import Graphs

CPU = torch.device("cpu")


def graphs(*sizes):
    ran = []

    def run(size):
        ran.append(size)
        return f"outputs of {size}"

    return Graphs(sizes, run, CPU), ran


def test_a_step_runs_in_the_least_size_that_holds_it():
    made, ran = graphs(1, 2, 4, 8)
    assert [made.size_for(rows) for rows in (1, 2, 3, 4, 5, 8, 9)] == [1, 2, 4, 4, 8, 8, None]
    assert made.replay(4) == "outputs of 4" and ran == [4]


def test_without_sizes_no_step_is_captured():
    assert graphs()[0].size_for(1) is None


def test_a_size_that_is_not_on_the_ladder_is_refused():
    with pytest.raises(ValueError, match=r"no graph for 3 rows; there are \[1, 2, 4, 8\]"):
        graphs(1, 2, 4, 8)[0].replay(3)


@pytest.mark.parametrize("sizes", [(2, 1), (1, 1), (0, 1)])
def test_sizes_that_no_step_could_reach_are_refused(sizes):
    with pytest.raises(ValueError, match="must be ascending and at least 1"):
        graphs(*sizes)


def test_a_device_without_graphs_captures_nothing():
    made, ran = graphs(1, 2)
    assert made.capture(10**9) == 0 and ran == [] and made.replay(2) == "outputs of 2"


@pytest.mark.parametrize("most", [1, 3, 7, 64, 100, 256, 1000])
def test_the_ladder_ends_at_the_most_rows_and_pads_little(most):
    sizes = graph_ladder(most)
    assert sizes[-1] == most and list(sizes) == sorted(set(sizes))
    for rows in range(1, most + 1):
        size = next(size for size in sizes if size >= rows)
        assert size - rows <= max(8, rows // 4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_replay_is_what_the_launches_give():
    device = torch.device("cuda")
    weight = torch.randn(64, 64, device=device)
    x = torch.randn(8, 64, device=device)
    made = Graphs((1, 4, 8), lambda size: torch.tanh(x[:size] @ weight), device)
    assert made.capture(2**30) >= 0
    for size in (1, 4, 8):
        x.copy_(torch.randn(8, 64, device=device))
        assert torch.equal(made.replay(size), torch.tanh(x[:size] @ weight))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_sizes_beyond_the_budget_are_left_out():
    device = torch.device("cuda")
    made = Graphs((1, 64), lambda size: torch.zeros(size, 2**20, device=device) + 1, device)
    made.capture(64 * 2**20)
    assert made.size_for(64) is None and made.size_for(1) == 1
