"""llama.cpp for `benchmarks.quality`: runs benchmarks/backends/llama_cpp_scores.py in an interpreter that has it."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
QUANTIZED = (
    "Q8_0",
    "Q4_0",
    "Q6_K",
    "Q4_K_M",
    "IQ4_XS",
)  # llama.cpp quantizes to these types


class LlamaCpp:
    """One installation of llama-cpp-python. Each method raises SystemExit if its process fails."""

    def __init__(self, python: str) -> None:
        self._python = python
        self.version = self._run("version").strip()

    def write_formats(self, plain: Path, wanted: Collection[str]) -> dict[str, Path]:
        """Quantize the file of float32 weights in the folder `plain`; return one folder for each wanted
        format."""
        made = {}
        for kind in QUANTIZED:
            name = f"llama_{kind}"
            if name not in wanted:
                continue
            made[name] = plain.with_name(name)
            made[name].mkdir(exist_ok=True)
            self._run("quantize", str(plain / "model.gguf"), str(made[name] / "model.gguf"), kind)
        return made

    def log_probabilities(self, file: Path, windows: Sequence[Sequence[int]], threads: int) -> list[Tensor]:
        """Return per window [tokens - 1, vocab] float32."""
        with tempfile.TemporaryDirectory() as scratch:
            listed = Path(scratch) / "windows.json"
            listed.write_text(json.dumps([list(window) for window in windows]))
            self._run("score", str(file), str(listed), scratch, "--threads", str(threads))
            logits = (np.load(Path(scratch) / f"{number}.npy") for number in range(len(windows)))
            return [torch.from_numpy(rows).log_softmax(1) for rows in logits]

    def _run(self, *arguments: str) -> str:
        command = [self._python, "-m", "benchmarks.backends.llama_cpp_scores", *arguments]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
        return done.stdout


def installed() -> str | None:
    """Return this interpreter if it has llama-cpp-python."""
    return sys.executable if importlib.util.find_spec("llama_cpp") else None
