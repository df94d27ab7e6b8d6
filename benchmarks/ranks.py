"""Measure the all-reduce of tensor-parallel ranks in microseconds, for each backend.

    python -m benchmarks.ranks [--ranks 2] [--rows 1,8,512] [--hidden 896] [--rounds 25] [--json FILE]

On a CPU: shared memory of the compiled kernels (kernels/cpu/shm_collective.h), torch.distributed with gloo in rank
order as in the engine, and gloo's own all-reduce, whose order depends on the message size. On GPUs: nccl's all-reduce,
and the sum in rank order that `hardware.batch_invariant` uses. Ranks are processes; backends take turns; each sum is
checked once, and rank 0 measures the time (median, range). A failing rank ends all of them. A layer of a model has two
such sums.
"""

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.kernels.timing import Time
from engine.distributed.group import Group, in_order, open_group
from kernels.cpu.library import best
from kernels.cpu.program import Program, StepData, Team, all_reduce
from kernels.cpu.shm_collective import ShmCollective
from kernels.report import table

TIMEOUT_S = 120.0
CALLS = 1 << 19  # floats that a sample adds up, at least in one call
MAX_CALLS = 200
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # for sums in another order

Sum = Callable[[Tensor], Tensor]  # x, which may be overwritten, to the sum over all ranks


@dataclass(frozen=True)
class Row:
    side: str
    rows: int
    hidden: int
    ranks: int
    dtype: str
    us: float
    low: float
    high: float


@dataclass(frozen=True)
class Settings:
    ranks: int
    rows: tuple[int, ...]
    hidden: int
    rounds: int
    device: str
    folder: Path  # where the ranks meet

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.device == "cpu" else torch.bfloat16


Work = Callable[[Settings, int], list[Row]]  # of a rank


def rank_input(settings: Settings, rank: int, rows: int) -> Tensor:
    draw = torch.Generator().manual_seed(rank)
    return torch.randn(rows, settings.hidden, generator=draw).to(settings.dtype)


def backends(settings: Settings, rank: int) -> dict[str, Sum]:
    """By name. All ranks open them in the same order."""
    device = torch.device("cpu") if settings.device == "cpu" else torch.device("cuda", rank)
    kind = "gloo" if settings.device == "cpu" else "nccl"
    opened = open_group(device, settings.folder / "group", rank, settings.ranks, ordered=True, timeout_s=TIMEOUT_S)
    assert isinstance(opened, Group)
    own = Group(rank, settings.ranks, opened.group, ordered=False)
    found: dict[str, Sum] = {f"{kind}, in order": opened.all_reduce, f"{kind}'s own": own.all_reduce}
    variant = best()
    if settings.device == "cpu" and variant != "torch":
        floats = max(settings.rows) * settings.hidden
        with (settings.folder / "memory").open("r+b") as file:
            collective = ShmCollective(variant, file.fileno(), rank, settings.ranks, floats)
        found = {f"shared memory ({variant})": partial(_in_memory, Team(variant, 1), collective), **found}
    return found


def _in_memory(team: Team, collective: ShmCollective, x: Tensor) -> Tensor:
    team.run(Program([all_reduce(collective, x, x, gathers=False)], (x,)), StepData(len(x)))
    return x


def measured(settings: Settings, rank: int) -> list[Row]:
    """Run the measurements of one rank. Raise AssertionError for a wrong sum."""
    torch.set_num_threads(1)
    device = "cpu" if settings.device == "cpu" else f"cuda:{rank}"
    adders, found = backends(settings, rank), []
    for rows in settings.rows:
        shares = torch.stack([rank_input(settings, one, rows) for one in range(settings.ranks)])
        wanted, x = in_order(shares), shares[rank].to(device)
        for side, add in adders.items():
            check(side, add(x.clone()).cpu(), wanted)
        calls = max(1, min(MAX_CALLS, CALLS // x.numel()))
        samples: dict[str, list[float]] = {side: [] for side in adders}
        for _ in range(settings.rounds):
            for side, add in adders.items():
                samples[side].append(_sample(add, x.clone(), calls))
        for side, values in samples.items():
            spread = Time.of(values)
            name = str(settings.dtype).removeprefix("torch.")
            found.append(Row(side, rows, settings.hidden, settings.ranks, name, spread.us, spread.low, spread.high))
    return found


def check(side: str, total: Tensor, wanted: Tensor) -> None:
    error = (total.float() - wanted).abs().max() / wanted.abs().max()
    assert error <= TOLERANCE[total.dtype], f"{side}: {error:.2g} beside the sum"


def _sample(add: Sum, x: Tensor, calls: int) -> float:
    """Microseconds of a call, of numbers that stay finite."""
    x.zero_()
    add(x)  # all begin together
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    start = time.perf_counter()
    for _ in range(calls):
        add(x)
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return (time.perf_counter() - start) * 1e6 / calls


class RankFailed(Exception):
    """The message says which one, and how it ended."""


def run_ranks(settings: Settings, work: Work = measured) -> list[Row]:
    """Run each rank in a process and return the results of rank 0.

    Raise RankFailed after all have ended: a rank would wait forever in shared memory for a rank that has exited.
    """
    (settings.folder / "memory").touch()
    processes = multiprocessing.get_context("spawn")
    receiver, sender = processes.Pipe(duplex=False)
    ranks = [
        processes.Process(target=_rank, args=(work, settings, rank, sender if rank == 0 else None), daemon=True)
        for rank in range(settings.ranks)
    ]
    try:
        for rank in ranks:
            rank.start()
        running = dict(enumerate(ranks))
        while running:
            wait([rank.sentinel for rank in running.values()])
            for number, rank in list(running.items()):
                code = rank.exitcode  # may still be None just after the process sentinel is signalled
                if code:
                    raise RankFailed(f"rank {number} of {settings.ranks} exited with {code}")
                if code is not None:
                    del running[number]
        found: list[Row] = receiver.recv()
        return found
    finally:
        for rank in ranks:
            if rank.pid is not None:
                rank.kill()
                rank.join()


def _rank(work: Work, settings: Settings, rank: int, to: Connection | None) -> None:
    found = work(settings, rank)
    if to is not None:
        to.send(found)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    gpus = torch.cuda.device_count() if options.device != "cpu" else 0
    if options.device == "cuda" and gpus < options.ranks:
        print(f"benchmarks.ranks: --device cuda: {options.ranks} ranks need {options.ranks} GPUs; there are {gpus}")
        return 2
    device = "cuda" if gpus >= options.ranks else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(options.ranks, options.rows, options.hidden, options.rounds, device, Path(folder))
        try:
            rows = run_ranks(settings)
        except RankFailed as error:
            print(f"benchmarks.ranks: {error}")
            return 1
    print(f"{settings.ranks} ranks on {device}, torch {torch.__version__}: microseconds of a sum")
    print(table([("side", "rows", "hidden", "us", "x own"), *_cells(rows)], left=1))
    if options.json is not None:
        facts = {"torch": torch.__version__, "device": device, "ranks": settings.ranks}
        options.json.write_text(json.dumps({"facts": facts, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    return 0


def _cells(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """`x own`: how many times as fast as the library's own sum of the same shape."""
    own = {row.rows: row.us for row in rows if row.side.endswith("own")}
    return [
        (
            row.side,
            str(row.rows),
            str(row.hidden),
            str(Time(row.us, row.low, row.high)),
            f"{own[row.rows] / row.us:.2f}",
        )
        for row in rows
    ]


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ranks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=_at_least(2), default=2, help="processes that share a model")
    parser.add_argument("--rows", type=_numbers, default=(1, 8, 512), metavar="N,…", help="tokens of a step")
    parser.add_argument("--hidden", type=_at_least(1), default=896, help="hidden size")
    parser.add_argument("--rounds", type=_at_least(1), default=25, help="samples of each backend")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: GPUs if there is one per rank")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for all results")
    return parser.parse_args(arguments)


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text}: must be a whole number of at least {least}")
        return int(text)

    return number


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(_at_least(1), text.split(",")))


if __name__ == "__main__":
    sys.exit(main())
