"""Tests of shared-memory collectives: all data arrives in order, and no rank waits for a rank that exited."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from kernels.cpu import program
from kernels.cpu.library import usable
from kernels.cpu.program import Program, StepData, Team
from kernels.cpu.shm_collective import CollectiveAborted, ShmCollective

ROOT = Path(__file__).parents[2]


def collectives(size, variant, floats=1 << 12):
    file = os.memfd_create("test")
    try:
        return [ShmCollective(variant, file, rank, size, floats) for rank in range(size)]
    finally:
        os.close(file)


def together(made, work):
    """work(collective) in a thread for each rank; all results."""
    results = [None] * len(made)

    def one(rank):
        try:
            results[rank] = work(made[rank])
        except CollectiveAborted as error:
            results[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(made))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
        assert not thread.is_alive()
    return results


def brought(rank, turn, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * turn + rank)) * 10**rank


@pytest.mark.parametrize("variant", usable())
@pytest.mark.parametrize("size", [2, 3, 5])
def test_all_ranks_receive_all_data_over_many_rounds(size, variant):
    """Includes tensors that are larger than the shared buffer and tensors that are not float."""

    def work(collective):
        for turn in range(40):
            got = collective.gather(brought(collective.rank, turn, 3, 1 + 601 * (turn % 4)))
            want = torch.stack([brought(rank, turn, 3, 1 + 601 * (turn % 4)) for rank in range(size)])
            assert torch.equal(got, want), turn
            assert collective.gather(torch.tensor([collective.rank + turn])).flatten().tolist() == [
                rank + turn for rank in range(size)
            ]
        return True

    assert together(collectives(size, variant, floats=1 << 10), work) == [True] * size


@pytest.mark.parametrize("variant", usable())
@pytest.mark.parametrize(("size", "threads", "rows"), [(2, 1, 1), (2, 2, 37), (3, 2, 5), (4, 1, 3)])
def test_program_reduces_and_gathers_in_rank_order(size, threads, rows, variant):
    """Sums to the bit of float32 added from rank 0 on, which another order is not; columns of unequal shares."""
    width, total = 33, 10 * size + 1
    sums = sum_in_order([brought(rank, 0, rows, width) for rank in range(size)])
    backwards = sum_in_order([brought(rank, 0, rows, width) for rank in range(size)][::-1])
    assert size == 2 or not torch.equal(sums, backwards), "the order cannot be seen"

    def work(collective):
        team, first = Team(variant, threads), total * collective.rank // size
        own = total * (collective.rank + 1) // size - first
        columns = brought(9, 1, rows, total)
        for _ in range(5):
            x = brought(collective.rank, 0, rows, width + 3)[:, :width]
            x.copy_(brought(collective.rank, 0, rows, width))
            part, joined = columns[:, first : first + own], torch.full((rows, total), torch.nan)
            ops = [
                program.all_reduce(collective, x, x, gathers=False),
                program.all_reduce(collective, part, joined, gathers=True),
                program.all_reduce(collective, x, x, gathers=False),
            ]
            team.run(Program(ops, (x, part, joined)), StepData(rows))
            assert torch.equal(x, sum_in_order([sums] * size))
            assert torch.equal(joined, columns)
        return True

    assert together(collectives(size, variant), work) == [True] * size


def sum_in_order(shares):
    total = shares[0].clone()
    for share in shares[1:]:
        total += share
    return total


def test_waiting_ranks_return_when_the_collective_is_aborted():
    made = collectives(3, usable()[0])
    timer = threading.Timer(0.3, made[0].abort)
    timer.start()
    began = time.monotonic()
    # rank 2 never comes
    results = together(made[:2], lambda collective: collective.gather(torch.zeros(3)))
    assert all(isinstance(result, CollectiveAborted) for result in results) and time.monotonic() - began < 10
    with pytest.raises(CollectiveAborted):
        made[2].gather(torch.zeros(3))
    timer.join()


def test_program_raises_after_an_abort():
    made = collectives(2, usable()[0])
    team, x = Team(usable()[0], 2), torch.ones(7, 5)
    threading.Timer(0.2, made[1].abort).start()
    with pytest.raises(CollectiveAborted):
        team.run(Program([program.all_reduce(made[0], x, x, gathers=False)] * 3, (x,)), StepData(7))


# Three ranks, forked after the import of torch, which takes longer than their work.
RANKS = """
import os, sys, torch
from kernels.cpu.shm_collective import ShmCollective

def synchronize(rank):
    collective = ShmCollective(sys.argv[1], int(sys.argv[2]), rank, 3, 1 << 12)
    for turn in range(1000):
        got = collective.gather(torch.full((64,), float(turn * 3 + rank)))
        assert got[:, 0].tolist() == [turn * 3 + rank for rank in range(3)], (turn, got[:, 0])
        assert (got == got[:, :1]).all(), turn

def run(rank):
    try:
        synchronize(rank)
        os._exit(0)
    finally:
        os._exit(1)

made = [os.fork() or run(rank) for rank in range(3)]
print([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in made])
"""


def test_processes_synchronize_repeatedly_on_few_cores():
    file = os.memfd_create("test")
    process = subprocess.Popen(
        [sys.executable, "-c", RANKS, usable()[0], str(file)],
        pass_fds=[file],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    os.close(file)
    try:
        assert process.communicate(timeout=120)[0].strip() == "[0, 0, 0]"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
