"""Time every operation at its bench cases, next to torch's own operation for the same arguments, and attention next to
FlashAttention if it is installed.

    python -m benchmarks.kernels                          all of them
    python -m benchmarks.kernels rms_norm --case decode   operations and cases whose names contain these texts
    python -m benchmarks.kernels attention --tune         tries the settings that operations declare as tunable
    python -m benchmarks.kernels --kernels avx512         the compiled kernels of a CPU (bench_cpu.py)
    python -m benchmarks.kernels --batch 8q1s4k q512s4k   their attention on these steps (kernels/attention/batches.py)

The share relates to this device's measured copy rate, or to its measured rate of bf16 products if a kernel is closer to
that rate. `x torch`, `x flash`: speedup over torch and FlashAttention; all take turns. Without a GPU the compiled
kernels are timed, and without compiled kernels the torch references at the small cases.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels import bench_cpu
from benchmarks.kernels.baselines import flash, flash_arguments, flash_attention
from benchmarks.kernels.timing import (
    Time,
    alternating,
    capturable,
    copy_rate,
    device_facts,
    device_is_lost,
    format_figure,
    has_fp8,
    input_sets,
    matmul_rate,
    sampler,
)
from benchmarks.kernels.tune import tune
from kernels.cpu.library import best, usable
from kernels.cpu.program import Team
from kernels.jit import installed, interpreted
from kernels.op import Case, Make, Op
from kernels.ops import OPS
from kernels.report import DTYPES, table

ROUNDS = 25
HEAD = ("op", "case", "us", "GB/s", "TFLOP/s", "share", "torch us", "x torch", "flash us", "x flash", "")


@dataclass(frozen=True)
class Measured:
    """Times and rates of one case."""

    op: str
    case: str
    dtype: str
    time: Time | None = None
    peer: Time | None = None  # of torch's own operation
    flash: Time | None = None  # of FlashAttention
    bytes: int = 0  # of a perfect kernel
    flops: int = 0  # of a perfect kernel
    of_copy: float = 0.0  # share of the device's measured copy rate
    of_matmul: float = 0.0  # share of the device's measured rate of products
    cold: bool = True  # whether the inputs were not in the device's cache
    error: str = ""  # reason for a missing time

    def cells(self) -> tuple[str, ...]:
        if self.time is None:
            return self.op, self.case, *[""] * (len(HEAD) - 3), self.error
        rates = (
            format_figure(self.bytes / self.time.us / 1e3),
            format_figure(self.flops / self.time.us / 1e6) if self.flops else "",
        )
        share = f"{max(self.of_copy, self.of_matmul):.0%}"
        others = [
            text
            for other in (self.peer, self.flash)
            for text in (("", "") if other is None else (str(other), f"{other.us / self.time.us:.2f}"))
        ]
        note = self.error or ("" if self.cold else "in cache")
        return self.op, self.case, str(self.time), *rates, share, *others, note


def selected_cases(
    names: Sequence[str], ids: Sequence[str], *, small: bool, fp8: bool, ops: Sequence[Op] | None = None
) -> Iterator[tuple[Op, Case]]:
    """Yield the bench cases, or the small cases that are not empty, whose names contain one of the texts."""
    for op in OPS if ops is None else ops:
        for case in op.cases:
            named = (not names or any(text in op.name for text in names)) and (
                not ids or any(text in case.id for text in ids)
            )
            wanted = case.bench != small and case.id != "empty" and (fp8 or case.needs != "fp8")
            if named and wanted:
                yield op, case


def measure(op: Op, case: Case, dtype: torch.dtype, device: torch.device, rounds: int = ROUNDS) -> Measured:
    """Time one case. Exceptions of the case are returned in `error`, not raised."""
    found = Measured(op.name, case.id, str(dtype).removeprefix("torch."))
    try:
        sets, cold = input_sets(lambda seed: op.inputs(Make(device, dtype, seed), **case.sizes), op.traffic, device)
        sides, error = {"time": sampler(op, sets, device)}, ""
        if device.type == "cuda" and not capturable(op, sets[0]):
            error = "waits for the device, so no graph can capture it"
        if op.peer is not None:
            try:
                sides["peer"] = sampler(op.peer, sets, device)
            except Exception as reason:  # torch's own operation may require more memory, or lack a type
                error = f"torch: {one_line(reason)}"
        try:
            if flash() is not None and (theirs := [flash_arguments(op.name, args) for args in sets])[0] is not None:
                sides["flash"] = sampler(flash_attention, [args for args in theirs if args is not None], device)
        except Exception as reason:
            error = error or one_line(reason)
        times = dict(zip(sides, alternating(list(sides.values()), rounds), strict=True))
    except Exception as reason:  # a failed case does not affect others; the table and the exit code report it
        return replace(found, error=one_line(reason))
    traffic, flops, seconds = op.traffic(*sets[0]), op.flops(*sets[0]), times["time"].us / 1e6
    return replace(
        found,
        time=times["time"],
        peer=times.get("peer"),
        flash=times.get("flash"),
        bytes=traffic,
        flops=flops,
        of_copy=traffic / seconds / copy_rate(device),
        of_matmul=flops / seconds / matmul_rate(device) if flops else 0.0,
        cold=cold,
        error=error,
    )


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def reference_times(names: Sequence[str], ids: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Time the torch references at the small cases, on this CPU in float32."""
    device = torch.device("cpu")
    for op, case in selected_cases(names, ids, small=True, fp8=False):
        args = op.inputs(Make(device, torch.float32), **case.sizes)
        (time,) = alternating([sampler(op.reference, [args], device)], 5)
        yield op.name, case.id, str(time)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if options.kernels or options.batch or (device.type == "cpu" and not (options.device and interpreted())):
        chosen_kernels = options.kernels or best()
        if chosen_kernels != "torch":
            return on_cpu(chosen_kernels, options)
        print("benchmarks.kernels: no GPU here; the torch references of the small cases on this CPU instead, float32")
        rows = list(reference_times(options.name, options.case))
        print(table([("op", "case", "us"), *rows], left=2))
        return 0
    if not installed():
        print("benchmarks.kernels: Triton is not installed", file=sys.stderr)
        return 2
    cases = list(selected_cases(options.name, options.case, small=device.type == "cpu", fp8=has_fp8(device)))
    if not cases:
        print("benchmarks.kernels: no operation and case matches", file=sys.stderr)
        return 2
    if options.limits:
        return bench([], device, options)
    if options.tune:
        return tune(cases, DTYPES[options.dtype], device, options.rounds, options.tuned)
    return bench(cases, device, options)


def on_cpu(variant: str, options: argparse.Namespace) -> int:
    """Run the benchmark. Return the exit code: 2 for options that this machine does not support."""
    if options.tune:
        print("benchmarks.kernels: --tune: compiled kernels have no settings", file=sys.stderr)
        return 2
    if variant not in usable():
        names = ", ".join(usable()) or "none"
        print(f"benchmarks.kernels: --kernels {variant}: usable here are {names}", file=sys.stderr)
        return 2
    team = Team(variant, options.threads or len(os.sched_getaffinity(0)))
    try:
        return bench_cpu.bench(
            team,
            options.name,
            options.case,
            batches=options.batch,
            pages=options.pages,
            rounds=options.rounds,
            json_file=options.json,
        )
    except ValueError as error:
        print(f"benchmarks.kernels: --batch {error}", file=sys.stderr)
        return 2
    finally:
        team.close()


def bench(cases: Sequence[tuple[Op, Case]], device: torch.device, options: argparse.Namespace) -> int:
    """Time the cases on a GPU. Return the exit code: 1 if a case has no time."""
    facts = device_facts(device)
    facts |= {"copy": copy_rate(device), "matmul": matmul_rate(device) if device.type == "cuda" else 0.0}
    library = flash()
    facts["flash"] = None if library is None else library.name
    limits = f"copy {facts['copy'] / 1e9:,.0f} GB/s, bf16 products {facts['matmul'] / 1e12:,.0f} TFLOP/s"
    limits += f"; {facts['flash'] or 'no FlashAttention to stand beside'}"
    print(f"{facts.get('device', 'CPU')}, torch {facts['torch']}, triton {facts['triton']}: {limits}", flush=True)
    rows: list[dict[str, Any]] = []
    if options.first and options.json.exists():
        rows = json.loads(options.json.read_text())["rows"]
    if options.json is not None:
        options.json.write_text(json.dumps({"facts": facts, "rows": rows}, indent=1) + "\n")
    lines = []
    for number, (op, case) in enumerate(cases[options.first :], options.first + 1):
        row = measure(op, case, DTYPES[options.dtype], device, options.rounds)
        rows.append(asdict(row))
        lines.append(row.cells())
        if options.json is not None:  # after each case, so that an interrupted run keeps its results
            options.json.write_text(json.dumps({"facts": facts, "rows": rows}, indent=1) + "\n")
        if device_is_lost(device):
            print(table([HEAD, *lines], left=2), flush=True)
            print(f"{op.name} {case.id} lost the device: continuing with the other cases in a new process", flush=True)
            if options.json is None or number == len(cases):
                return 1
            os.execv(sys.executable, [*sys.orig_argv, "--first", str(number)])
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if lines:
        print(table([HEAD, *lines], left=2))
    return int(any(row["time"] is None for row in rows))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="*", help="operations whose names contain this")
    parser.add_argument("--case", nargs="+", default=(), metavar="ID", help="cases whose ids contain this")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="type of the inputs")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="samples of each implementation")
    parser.add_argument("--json", type=Path, metavar="FILE", help="JSON file for all results")
    parser.add_argument("--limits", action="store_true", help="measure only the limits of the device")
    parser.add_argument("--tune", action="store_true", help="search settings, and store those that are faster")
    parser.add_argument(
        "--tuned", type=Path, metavar="FILE", help="file for the settings (default: kernels/tuned/DEVICE.json)"
    )
    parser.add_argument(
        "--kernels", metavar="NAME", help="compiled kernels of a CPU: amx, avx512bf16, avx512, avxvnni, avx2 or base"
    )
    parser.add_argument("--threads", type=int, help="threads of the compiled kernels and of torch")
    parser.add_argument("--batch", nargs="+", default=(), metavar="SPEC", help="steps such as 8q1s4k or q512+8q1s2k")
    parser.add_argument("--pages", choices=bench_cpu.PAGES, default="float16", help="type of the pages on a CPU")
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)  # the case to continue with
    # with TRITON_INTERPRET=1, cpu: by the interpreter
    parser.add_argument("--device", choices=("cuda", "cpu"), help="cpu: the compiled kernels of a CPU")
    return parser.parse_args(arguments)
