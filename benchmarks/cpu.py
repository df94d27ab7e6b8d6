"""Decoding and prefill on a CPU beside other engines: same shape, bits and threads, alternating rounds.

    python -m benchmarks.cpu --sides slipway:int8 slipway-http:int8 llama.cpp:Q8_0 openvino:int8 \\
        --python llama.cpp=/opt/llama/bin/python openvino=/opt/openvino/bin/python

A side is `ENGINE[@VARIANT]:BITS` (benchmarks/backends). Each runs in a process of its own that has loaded its model and
waits, so rounds can alternate without loading anything again; engines may live in other environments (`--python`).
A job is `decode:BATCH:CONTEXT` or `prefill:TOKENS`.

`--busy` keeps one core busy with another process meanwhile, in every second round: the quiet and the busy rate come of
the same run. The memory's read bandwidth is measured before and after the rounds with the same number of threads
(benchmarks/bandwidth.py). A decode step of one row reads all weights once, so the bytes of a side's weights times its
tokens a second are a share of that bandwidth. Prints medians, ranges, ratios to the first side and these shares; writes
JSON.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from benchmarks.backends import Job, Name, job, name
from benchmarks.bandwidth import MIB, Bandwidth, faster, line, measure
from benchmarks.machine import facts
from benchmarks.shapes import SHAPES, make
from benchmarks.weights import token_bytes

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).resolve().parent.parent
KEEP_TO_AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
Rates = dict[str, dict[str, list[float]]]  # by job, by side: tokens a second of each round


class Side:
    """A side's process and the pipes to it."""

    def __init__(self, side: Name, python: str, options: argparse.Namespace, most: tuple[int, int, int]) -> None:
        self.name = str(side)
        command = [python, "-m", "benchmarks.backends", self.name, "--checkpoint", str(options.checkpoint)]
        command += ["--threads", str(options.threads), "--most", *map(str, most)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        if side.variant == "avx2" and side.engine != "slipway":
            environment |= KEEP_TO_AVX2
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
        )
        self._expect("ready")

    def measure(self, asked: Job) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{asked.name}\n")
        self.process.stdin.flush()
        return float(self._expect())

    def _expect(self, wanted: str | None = None) -> str:
        """The next line that says something, or the one that is wanted: libraries print what they like before it."""
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            text = line.strip()
            if text == wanted or (wanted is None and _is_number(text)):
                return text
        raise SystemExit(f"{self.name} ended with code {self.process.wait()}")

    def close(self) -> None:
        self.process.communicate(timeout=90)  # the end of its input is the end of the side


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


@contextmanager
def busy() -> Iterator[None]:
    """Another process that never waits."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def run(sides: list[Side], jobs: list[Job], rounds: int, *, with_busy: bool) -> tuple[Rates, Rates]:
    """The rates of quiet rounds, and those of busy ones if they are wanted."""
    quiet: Rates = {one.name: {side.name: [] for side in sides} for one in jobs}
    loaded: Rates = {one.name: {side.name: [] for side in sides} for one in jobs} if with_busy else {}
    for asked in jobs:
        for number in range(rounds + 1):
            for side in sides:
                rate = side.measure(asked)
                if number:  # the first round reads the prompts, and first calls are nobody's speed
                    quiet[asked.name][side.name].append(rate)
            if number and with_busy:
                with busy():
                    for side in sides:
                        loaded[asked.name][side.name].append(side.measure(asked))
    return quiet, loaded


def report(rates: Rates, title: str, quiet: Rates | None = None) -> None:
    """quiet: what the rates are a share of, instead of the first side's."""
    for asked, sides in rates.items():
        print(f"\n{asked}, tokens a second{title}")
        first = statistics.median(next(iter(sides.values())))
        for side, values in sides.items():
            middle = statistics.median(values)
            base = statistics.median(quiet[asked][side]) if quiet else first
            note = "of its quiet rate" if quiet else "x"
            print(f"  {side:26s} {middle:8.1f}  [{min(values):.1f} – {max(values):.1f}]   {middle / base:.2f} {note}")


def shares(rates: Rates, weights: dict[str, int | None], bytes_per_s: float) -> dict[str, dict[str, float]]:
    """By decode job of one row and by side: weights read per second (median), as a share of the memory's bandwidth."""
    return {
        asked: {
            side: statistics.median(values) * size / bytes_per_s
            for side, values in sides.items()
            if (size := weights[side]) is not None
        }
        for asked, sides in rates.items()
        if job(asked).batch == 1
    }


def report_shares(found: dict[str, dict[str, float]], weights: dict[str, int | None], memory: Bandwidth) -> None:
    print(f"\n{line(memory)}")
    for asked, sides in found.items():
        print(f"{asked}, weights read, share of the bandwidth")
        for side, share in sides.items():
            size = weights[side] or 0
            rate = share * memory.bytes_per_s
            print(f"  {side:26s} {size / 1e6:8.1f} MB a token, {rate / 1e9:.1f} GB/s   {share:.0%}")


def _pythons(entries: list[str]) -> dict[str, str]:
    found = {}
    for entry in entries:
        build, _, path = entry.partition("=")
        if not path:
            raise SystemExit(f"--python {entry}: must be ENGINE[@VARIANT]=INTERPRETER")
        found[build] = path
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = ["slipway:stored", "slipway:int8", "slipway:int4"]
    parser.add_argument("--sides", nargs="+", type=name, default=[name(one) for one in default])
    parser.add_argument("--jobs", nargs="+", type=job, default=[Job(1, 64), Job(8, 64), Job(8, 1024), Job(0, 512)])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shape", default="qwen2.5-0.5b", choices=SHAPES, help="of the random checkpoint")
    parser.add_argument("--checkpoint", type=Path, help="its folder; made if it is not there")
    parser.add_argument("--python", nargs="+", default=[], metavar="ENGINE=PATH", help="interpreter that has an engine")
    parser.add_argument("--busy", action="store_true", help="every second round beside a process that never waits")
    parser.add_argument("--buffer", type=int, default=1024, help="MiB that the measurement of the bandwidth reads")
    parser.add_argument("--out", type=Path, help="JSON file; default benchmarks/results/cpu-….json")
    options = parser.parse_args()
    pythons = _pythons(options.python)
    options.checkpoint = make(options.shape, options.checkpoint or Path("/tmp/slipway-shapes") / options.shape)
    jobs: list[Job] = options.jobs
    most = (
        max(one.batch for one in jobs),
        max(one.context for one in jobs),
        max(max(1, one.batch) * one.context for one in jobs),
    )
    sides: list[Side] = []
    before = measure(options.threads, options.buffer * MIB)
    try:
        for side in options.sides:
            python = pythons.get(side.build, pythons.get(side.engine, sys.executable))
            sides.append(Side(side, python, options, most))
        quiet, loaded = run(sides, jobs, options.rounds, with_busy=options.busy)
    finally:
        for open_side in sides:
            open_side.close()
    memory = faster(before, measure(options.threads, options.buffer * MIB))
    weights = {str(side): token_bytes(options.checkpoint, side) for side in options.sides}
    of_memory = shares(quiet, weights, memory.bytes_per_s)
    report(quiet, "")
    report(loaded, " beside a busy process", quiet)
    report_shares(of_memory, weights, memory)
    path = options.out or RESULTS / f"cpu-{options.shape}.json"
    settings = {"shape": options.shape, "threads": options.threads, "rounds": options.rounds}
    found = {
        "settings": settings,
        "tokens_per_s": quiet,
        "beside_a_busy_process": loaded,
        "memory": asdict(memory),
        "weight_bytes_per_token": weights,
        "share_of_bandwidth": of_memory,
        "machine": asdict(facts()),
    }
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
