"""Process of llama.cpp for comparisons in one run. It has its own interpreter, and waits between rounds."""

import argparse
import json
import os
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NAME = "llama.cpp"
BITS = {"int8": "Q8_0", "int4": "Q4_0"}
"""Types of weights with the same number of bits. Others are compared with F16."""


def add_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--python", type=_interpreter, metavar=f"{NAME}=PATH", help="also run llama.cpp, with this interpreter"
    )


def _interpreter(text: str) -> str:
    name, _, path = text.partition("=")
    if name != NAME or not path:
        raise argparse.ArgumentTypeError(f"{text}: must be {NAME}=PATH")
    return path


class LlamaCppPeer:
    """Process of `benchmarks.backends.llama_cpp_requests`."""

    def __init__(self, python: str, checkpoint: Path, weights: str, **options: int | Path) -> None:
        command = [python, "-m", "benchmarks.backends.llama_cpp_requests", "--checkpoint", str(checkpoint)]
        command += ["--bits", BITS.get(weights, "F16")]
        for name, value in options.items():
            command += [f"--{name}", str(value)]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])])
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
        )
        self._line("ready")

    def measure(self, do: str, **request: Any) -> float:
        """Return the rate in tokens per second."""
        assert self._process.stdin is not None, "a pipe"
        self._process.stdin.write(json.dumps({"do": do, **request}) + "\n")
        self._process.stdin.flush()
        return float(self._line())

    def _line(self, wanted: str = "") -> str:
        """Skip the output of libraries, and return the next line that equals `wanted`; without it, the next number."""
        assert self._process.stdout is not None, "a pipe"
        while line := self._process.stdout.readline():
            text = line.strip()
            if text == wanted or (not wanted and text.replace(".", "", 1).replace("e", "", 1).isdecimal()):
                return text
        raise SystemExit(f"{NAME} ended with code {self._process.wait()}")

    def __enter__(self) -> "LlamaCppPeer":
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate(timeout=90)
