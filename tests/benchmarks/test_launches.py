"""Test of the count of launches, in a process that compiles kernels for a simulated GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.jit import installed

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.nightly(
    "tests/engine/worker/test_graphs.py::test_padded_mixed_and_decode_steps_sample_the_tokens_of_plain_launches"
)
@pytest.mark.skipif(not installed(), reason="Triton is not installed")
def test_a_mixed_step_is_one_graph_and_a_few_launches(tmp_path):
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    arguments = ["small", "--rows", "4", "--chunk", "20", "--repeats", "2", "--json", str(tmp_path / "found.json")]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.launches", *arguments],
        cwd=ROOT,
        env=kept | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    decode, mixed = json.loads((tmp_path / "found.json").read_text())
    assert (decode["step"], decode["graphs"], decode["triton"], decode["products"]) == ("decode", 1, 0, 0)
    assert (mixed["step"], mixed["graphs"], mixed["triton"], mixed["products"]) == ("mixed", 1, 3, 1)
    assert mixed["others"] < 12
