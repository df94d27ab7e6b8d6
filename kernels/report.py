"""Compile every kernel without a GPU and print the resources that each takes.

    python -m kernels.report --target sm_90 --op rms_norm
    python -m kernels.report --check                     exits 1 if a kernel spills (over 16 bytes) or is too large
    python -m kernels.report --cache DIR --target sm_90  fills a folder that a process on such a device finds complete

It compiles the launches of all operations at their bench cases, or of `--launches MODULE:FUNCTION`: a function that
takes a Target and returns a list of OpLaunch. Launches that share a kernel are one line.
"""

import argparse
import dataclasses
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

import torch

from kernels import tuning
from kernels.jit import Launch, installed, interpreted, recorded, triton
from kernels.op import Make, Op
from kernels.ops import OPS
from kernels.tools.aot import TARGETS, Compiled, Target, compile_for, signature
from kernels.tools.launchers import Launchers, build_stub
from kernels.tools.process_pool import ProcessLost, run_in_processes

LIMIT_S = 300.0  # for one kernel
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class OpLaunch:
    """A launch with its operation and case."""

    op: str
    case: str
    launch: Launch
    may_spill: bool = False


Source = Callable[[Target], list[OpLaunch]]  # returns the same launches each time; picklable


FEW_BYTES = 16  # per thread: up to four registers may spill, whose number differs between releases of Triton


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    op: str
    cases: tuple[str, ...]  # cases that share this kernel
    target: str
    device: str
    may_spill: bool
    compiled: Compiled | None = None
    error: str = ""  # reason for a missing kernel

    def faults(self) -> Iterator[str]:
        target = TARGETS[self.target]
        where = f"{self.op}, case {self.cases[0]}, {self.target}"
        made = self.compiled
        if made is None:
            yield f"{where}: {self.error}"
            return
        if made.spilled > FEW_BYTES and target.gated and not self.may_spill:
            yield f"{where}: {made.kernel} spills {made.spilled} bytes per thread"
        if made.shared > target.shared:
            has = f"the target has {target.shared:,}"
            yield f"{where}: {made.kernel} needs {made.shared:,} bytes of shared memory; {has}"
        if made.columns > target.columns:
            has = f"the target has {target.columns}"
            yield f"{where}: {made.kernel} needs {made.columns} columns of tensor memory; {has}"


def op_launches(
    target: Target,
    *,
    ops: Sequence[str] = (),
    cases: Sequence[str] = (),
    dtypes: Sequence[str] = ("bfloat16",),
    small: bool = False,
) -> list[OpLaunch]:
    """Return the launches of operations and cases whose names contain one of these texts (default: all). small: include
    the test cases."""
    found = []
    for op in OPS:
        for case in op.cases:
            if not _named(op.name, ops) or not _named(case.id, cases) or not (case.bench or small):
                continue
            if case.needs == "fp8" and not target.fp8:
                continue
            for name in dtypes:
                if DTYPES[name] in op.tolerance:
                    suffix = "" if len(dtypes) == 1 else f" {name}"
                    found += [
                        OpLaunch(op.name, case.id + suffix, one, op.may_spill) for one in _recorded(op, case, name)
                    ]
    return found


def _recorded(op: Op, case: Any, dtype: str) -> list[Launch]:
    with recorded() as launches:
        op(*op.inputs(Make(torch.device("meta"), DTYPES[dtype]), **case.sizes))
    return launches


def _named(name: str, wanted: Sequence[str]) -> bool:
    return not wanted or any(text in name for text in wanted)


def named_source(text: str) -> Source:
    """Return the source that MODULE:FUNCTION names."""
    module, _, name = text.partition(":")
    return getattr(importlib.import_module(module), name)


# -- compiling, in separate processes ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """Settings of a compiling process."""

    cache: Path | None = None
    """Folder for Triton's cache. It receives only files that a launch needs, and the modules of a first launch. The
    default is Triton's usual folder."""

    @property
    def libcuda(self) -> Path | None:
        return None if self.cache is None else self.cache / "libcuda"


@dataclass(frozen=True)
class CompileJob:
    """Launch number `number` of source number `source`, with the settings of this device."""

    source: int
    target: str
    device: str
    number: int


def _prepare(sources: Sequence[Source], settings: Settings) -> Callable[[CompileJob], Compiled | str]:
    """Prepare a process and return the function that compiles a job there, or returns an error message."""
    if settings.cache is not None:
        triton.knobs.cache.dir = str(settings.cache)
    launchers = None if settings.libcuda is None else Launchers(settings.libcuda)

    @cache
    def launches(source: int, target: str, device: str) -> list[OpLaunch]:
        with tuning.assumed(device, TARGETS[target].shared, tensor_memory=TARGETS[target].columns > 0):
            return sources[source](TARGETS[target])

    def compile_job(job: CompileJob) -> Compiled | str:
        target = TARGETS[job.target]
        launch = launches(job.source, job.target, job.device)[job.number].launch
        nvidia = launchers is not None and target.backend == "cuda"
        triton.knobs.compilation.store_binary_only = nvidia  # facts about AMD kernels are in the assembly
        each = launchers.add if launchers is not None and nvidia else _nothing
        try:
            return compile_for(target, [launch], each)[0]
        except Exception as error:  # exceptions of a compiler are results of this kernel
            return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"

    return compile_job


def _nothing(kernel: Any) -> None:
    """Do nothing, for targets whose launches require no other modules."""


def compile_all(
    sources: Sequence[Source],
    targets: Iterable[Target],
    *,
    devices: Sequence[str] = (),
    settings: Settings = Settings(),
    processes: int = 1,
    brief: bool = False,
) -> Iterator[Row]:
    """Compile every kernel of the sources' launches, once for each target, with the settings of its tuned devices or of
    the named devices. brief: for targets that are not gated, compile only the first launch of each function."""
    jobs: list[CompileJob] = []
    rows: list[Row] = []
    for target in targets:
        place: dict[Any, int] = {}
        for device in devices or dict.fromkeys((*target.devices, *tuning.devices(target.name))):
            for number, source in enumerate(sources):
                with tuning.assumed(device, target.shared, tensor_memory=target.columns > 0):
                    wanted = source(target)
                for at, one in enumerate(wanted):
                    key = one.launch.kernel if brief and not target.gated else signature(one.launch)
                    if key in place:
                        old = rows[place[key]]
                        cases = dict.fromkeys((*old.cases, one.case))
                        spills = old.may_spill and one.may_spill
                        rows[place[key]] = dataclasses.replace(old, cases=tuple(cases), may_spill=spills)
                        continue
                    place[key] = len(rows)
                    jobs.append(CompileJob(number, target.name, device, at))
                    rows.append(Row(one.op, (one.case,), target.name, device, one.may_spill))
    prepare = partial(_prepare, tuple(sources), settings)
    results = run_in_processes(prepare, jobs, processes, LIMIT_S, modules=["kernels.ops", "kernels.tools.launchers"])
    for row, result in zip(rows, results, strict=True):
        if isinstance(result, Compiled):
            yield dataclasses.replace(row, compiled=result)
        else:
            yield dataclasses.replace(
                row, error=f"the compiler {result.reason}" if isinstance(result, ProcessLost) else result
            )


# -- the table ---------------------------------------------------------------------------------------------------------

HEAD = ("op", "case", "kernel", "target", "registers", "spilled", "shared", "warps", "matrix", "s")


def cells(row: Row) -> tuple[str, ...]:
    more = f" (+{len(row.cases) - 1})" if len(row.cases) > 1 else ""
    made = row.compiled
    if made is None:
        return row.op, row.cases[0] + more, "not compiled", row.target, *[""] * 6
    numbers = f"{made.registers}", f"{made.spilled or ''}", f"{made.shared:,}", f"{made.warps}"
    return row.op, row.cases[0] + more, made.kernel, row.target, *numbers, " ".join(made.matrix), f"{made.seconds:.1f}"


def table(rows: Sequence[tuple[str, ...]], left: int) -> str:
    """Format columns of one width each; the first `left` and empty-headed ones flush left. The first row is the
    head."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            text.ljust(width) if at < left else text.rjust(width)
            for at, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kernels.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--op", nargs="+", default=(), metavar="NAME", help="operations whose names contain this")
    parser.add_argument("--case", nargs="+", default=(), metavar="ID", help="cases whose ids contain this")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["bfloat16"], help="types of the inputs")
    parser.add_argument("--small", action="store_true", help="include the small test cases")
    parser.add_argument(
        "--launches", nargs="+", default=(), metavar="MODULE:FUNCTION", help="compile these launches, not operations"
    )
    add_options(parser)
    options = parser.parse_args(arguments)
    sources: list[Source] = [named_source(text) for text in options.launches]
    chosen = partial(op_launches, ops=options.op, cases=options.case, dtypes=options.dtype, small=options.small)
    return report(sources or [chosen], options)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `report` to the parser of a command that has launches to compile."""
    parser.add_argument("--target", nargs="+", choices=TARGETS, default=list(TARGETS), help="architectures")
    parser.add_argument("--device", nargs="+", default=(), help="names of devices whose tuned settings are compiled")
    parser.add_argument("--brief", action="store_true", help="compile one launch per kernel for targets that may spill")
    parser.add_argument("--check", action="store_true", help="exit 1 on spills, too much shared memory and errors")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="fill this cache folder (needs a C compiler)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="JSON file for all results")
    parser.add_argument(
        "--processes", type=int, default=len(os.sched_getaffinity(0)), help="number of compiling processes"
    )


def report(sources: Sequence[Source], options: argparse.Namespace) -> int:
    """Compile, print the table and write the files that `add_options` defines. Return the exit code."""
    if not installed() or interpreted():
        why = "TRITON_INTERPRET is set: kernels run in the interpreter" if installed() else "Triton is not installed"
        print(f"nothing can be compiled: {why}", file=sys.stderr)
        return 2
    settings = Settings(options.cache.resolve() if options.cache else None)
    if settings.libcuda is not None:
        try:
            build_stub(settings.libcuda)
        except (OSError, CalledProcessError) as error:
            print(f"--cache needs a C compiler: {error}", file=sys.stderr)
            return 2
    targets = [TARGETS[name] for name in options.target]
    chosen = {"devices": options.device, "processes": options.processes, "brief": options.brief}
    rows = list(compile_all(sources, targets, settings=settings, **chosen))
    print(table([HEAD, *map(cells, rows)], left=4) if rows else "no launch matches")
    faults = [fault for row in rows for fault in row.faults()]
    print(f"\n{len(rows)} kernels, {sum(row.compiled is None for row in rows)} of them not compiled")
    print("\n".join([*faults, f"{len(faults)} faults"]))
    if settings.cache is not None:
        print(f"to use them, set TRITON_CACHE_DIR={settings.cache} TRITON_LIBCUDA_PATH={settings.libcuda}")
    if options.json is not None:
        kernels = [dataclasses.asdict(row) for row in rows]
        value = {"triton": triton.__version__, "kernels": kernels, "faults": faults}
        options.json.write_text(json.dumps(value, indent=1) + "\n")
    return int(not rows or bool(options.check and faults))


if __name__ == "__main__":
    sys.exit(main())
