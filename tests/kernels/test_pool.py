"""The team of threads: where its threads run, and that it ends with right results when cores are short."""

import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from kernels.cpu.library import best, usable
from kernels.cpu.packing import pack
from kernels.cpu.program import Add, Program, StepData, Team, linear

PATIENCE_S = 240
ALLOWED = sorted(os.sched_getaffinity(0))


def affinities(before: set[str] = frozenset()) -> dict[str, set[int]]:  # type: ignore[assignment]
    """Return the CPU affinity of each thread of this process except those in `before`."""
    tasks = Path("/proc/self/task")
    return {t.name: os.sched_getaffinity(int(t.name)) for t in tasks.iterdir() if t.name not in before}


@contextmanager
def busy(cpus: list[int]) -> Iterator[None]:
    """Processes that never rest, one on each of these CPUs."""
    code = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"
    beside = [subprocess.Popen([sys.executable, "-c", code, str(cpu)]) for cpu in cpus]
    try:
        yield
    finally:
        for process in beside:
            process.kill()
            process.wait()


@contextmanager
def guard() -> Iterator[None]:
    """Ends the test process where a barrier hangs, which no exception could: the caller is in C++."""
    timer = threading.Timer(PATIENCE_S, lambda: (os.write(2, b"a team of threads hangs\n"), os._exit(70)))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@pytest.mark.parametrize("cpus", [ALLOWED[:1] * 4, (ALLOWED * 4)[:4]])
@pytest.mark.parametrize("variant", usable())
def test_threads_are_pinned_except_the_caller(variant, cpus):
    before = set(affinities())
    team = Team(variant, 4, cpus)
    twice(team, 3)  # all threads have begun
    try:
        found = affinities(before)
        assert sorted(map(sorted, found.values())) == sorted([cpu] for cpu in cpus[1:])
        assert os.sched_getaffinity(0) == set(ALLOWED)
    finally:
        team.close()


def test_threads_inherit_the_affinity_without_cpus():
    before = set(affinities())
    team = Team(best(), 3)
    try:
        assert list(affinities(before).values()) == [set(ALLOWED)] * 2
    finally:
        team.close()


def test_unavailable_cpu_leaves_the_thread_unpinned():
    before = set(affinities())
    team = Team(best(), 2, (0, 9000))
    twice(team, 3)
    try:
        assert list(affinities(before).values()) == [set(ALLOWED)]
    finally:
        team.close()


def test_number_of_cpus_must_match_the_threads():
    with pytest.raises(ValueError, match="1 CPUs for 2 threads"):
        Team(best(), 2, (0,))


def twice(team: Team, rows: int) -> None:
    """x + x of a few rows, the smallest program."""
    x = torch.arange(rows * 4, dtype=torch.float32).view(rows, 4)
    y = x.clone()
    op = Add(y=x.data_ptr(), x=y.data_ptr(), y_stride=4, x_stride=4, size=4, alpha=1.0)
    team.run(Program([op], (x, y)), StepData(rows))
    assert torch.equal(y, 2 * x)


def chain(team: Team, length: int, rows: int) -> tuple[Program, torch.Tensor, torch.Tensor]:
    """Build a program that repeats y = x + x Wᵀ `length` times, with two barriers per repetition."""
    make = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 32, generator=make)
    weight = torch.randint(-2, 3, (32, 32), generator=make).float() / 32
    packed = pack(weight, team.tiling)
    room, out = x.clone(), torch.empty(rows, 32)
    ops = []
    for _ in range(length):
        ops += [linear(packed, None, room, out)]
        ops += [Add(y=out.data_ptr(), x=room.data_ptr(), y_stride=32, x_stride=32, size=32, alpha=1.0)]
    wanted = x.double()
    for _ in range(length):
        wanted = wanted + wanted @ weight.double().T
    return Program(ops, (packed.data, room, out)), room, wanted


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("threads", [2, 3, 8])
@pytest.mark.sampled(3)
def test_small_programs_are_correct_on_a_busy_machine(threads, pinned):
    """Test more threads than cores, while another process uses one core."""
    cpus = [ALLOWED[at % len(ALLOWED)] for at in range(threads)] if pinned else ()
    with guard(), busy(ALLOWED[:1]):
        team = Team(best(), threads, cpus)
        for rows in range(1, 6):
            program, room, wanted = chain(team, 5, rows)
            x = room.clone()
            for _ in range(20):
                room.copy_(x)
                team.run(program, StepData(len(room)))
                assert ((room.double() - wanted).abs() <= 1e-5 * wanted.abs().max()).all()
        team.close()


def test_teams_are_created_and_closed_repeatedly():
    with guard():
        for number in range(150):
            team = Team(best(), 1 + number % 5)
            if number % 3:
                twice(team, number % 7 + 1)
            team.close()


def test_two_teams_at_once_do_not_disturb_each_other():
    """Two engines in one test process use two teams, each with its own calling thread."""
    failed = []

    def work(seed: int) -> None:
        team = Team(best(), 3)
        program, room, wanted = chain(team, 4, seed)
        x = room.clone()
        for _ in range(60):
            room.copy_(x)
            team.run(program, StepData(len(room)))
            failed.extend([seed] * (not torch.allclose(room.double(), wanted, rtol=1e-4, atol=1e-4)))
        team.close()

    with guard():
        callers = [threading.Thread(target=work, args=(seed,)) for seed in (2, 3)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    assert not failed


def test_threads_sleep_while_one_computes_the_last_piece():
    """One row is one piece of work, so that only one thread is busy. If the others yielded until it is done, they would
    use up the CPU quota: four threads would take several times the CPU time of one."""
    size, times, rounds = 1 << 23, 20, 5  # a piece takes milliseconds on any CPU: threads spin and yield for less
    x, y = torch.zeros(1, size), torch.ones(1, size)
    ops = [Add(y=y.data_ptr(), x=x.data_ptr(), y_stride=size, x_stride=size, size=size, alpha=1.0)] * times
    program, teams = Program(ops, (x, y)), (Team(best(), 1), Team(best(), 4))
    taken = {team: [] for team in teams}
    for team in teams * rounds:
        start = time.process_time()
        team.run(program, StepData(1))
        taken[team].append(time.process_time() - start)
    one, four = (statistics.median(taken[team]) for team in teams)
    for team in teams:
        team.close()
    assert (x == times * rounds * len(teams)).all()
    assert four < 1.5 * one, taken.values()


def test_a_waiting_team_sleeps():
    team = Team(best(), 4)
    twice(team, 1)
    start = time.process_time()
    threading.Event().wait(0.5)
    assert time.process_time() - start < 0.3
    team.close()
