"""ik_llama.cpp through its llama-batched-bench, whose path SLIPWAY_BENCH_IK has (or SLIPWAY_BENCH_IK_<VARIANT>).

A measurement is one run of the program: it computes the prompts each time. Weights are repacked at load (-rtr).
"""

import os
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.backends import STEPS, Job, Measure
from benchmarks.backends.gguf_file import gguf

COLUMNS = {"prefill": 5, "decode": 7}  # of its table, tokens a second


def load(checkpoint: Path, bits: str, variant: str, threads: int, most: list[int]) -> Measure:
    """bits: a type of llama.cpp, such as Q8_0, Q4_0."""
    key = f"SLIPWAY_BENCH_IK_{variant.upper()}" if variant else "SLIPWAY_BENCH_IK"
    if key not in os.environ:
        raise SystemExit(f"ik_llama.cpp: set {key} to the path of its llama-batched-bench")
    file = gguf(checkpoint, bits)

    def measure(job: Job) -> float:
        rows = max(1, job.batch)
        command = [
            os.environ[key],
            "-m",
            str(file.resolve()),
            "-t",
            str(threads),
            "-rtr",
            "-c",
            str(most[2] + rows * 64 + 512),
        ]
        command += ["-b", "512", "-ub", "512", "-npp", str(job.context), "-ntg", str(STEPS), "-npl", str(rows)]
        with TemporaryDirectory() as folder:  # it leaves a log where it runs
            done = subprocess.run(
                command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
            )
        lines = [line.strip("|").split("|") for line in done.stdout.splitlines() if line.startswith("|")]
        if len(lines) != 3:  # two of them are the table's head
            raise SystemExit(f"{' '.join(command)} printed no result:\n{done.stdout[-2000:]}")
        return float(lines[-1][COLUMNS["decode" if job.batch else "prefill"]])

    return measure
