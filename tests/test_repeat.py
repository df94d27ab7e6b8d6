"""`--repeat-failed`: what passes alone is a warning, anything else fails the run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiers import NIGHTLY

TESTS = """
import os
import pathlib
import signal

HERE = pathlib.Path(__file__).parent

def fails_until(times, name):
    runs = HERE / name
    runs.write_text(runs.read_text() + "." if runs.exists() else ".")
    assert len(runs.read_text()) > times

def test_once():
    fails_until(1, "once")

def test_always():
    fails_until(99, "always")

def test_another_once():
    fails_until(1, "another")

def test_dies():
    os.kill(os.getpid(), signal.SIGKILL)

def test_passes():
    fails_until(0, "passes")
"""


@pytest.mark.parametrize(
    ("tests", "limit", "code", "said", "runs"),
    [
        (("once", "passes"), 2, 0, "warning: failed beside other tests, passed alone: ", {"once": 2, "passes": 1}),
        (("once", "another_once"), 2, 0, "passed alone: ", {"once": 2, "another": 2}),
        (("once", "always", "passes"), 2, 1, "failed twice", {"once": 2, "always": 2, "passes": 1}),
        (("once", "another_once"), 1, 1, "2 failed", {"once": 1, "another": 1}),
        pytest.param(("once", "passes"), 0, 1, "1 failed", {"once": 1, "passes": 1}, marks=NIGHTLY),
        (("once", "dies", "passes"), 2, 1, "crashed while running", {"once": 1}),
    ],
    ids=["alone", "both", "twice", "too-many", "off", "died"],
)
@pytest.mark.sampled(2)
def test_failed_tests_are_repeated_alone(tmp_path: Path, tests, limit, code, said, runs):
    file = tmp_path / "test_it.py"
    file.write_text(TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.repeat", f"--repeat-failed={limit}"]
        + ["-n", "1", "--max-worker-restart", "0", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
        + [f"{file}::test_{name}" for name in tests],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    output = done.stdout + done.stderr
    assert done.returncode == code, output
    assert said in output
    assert {name: len((tmp_path / name).read_text()) for name in runs} == runs


def test_the_tests_of_the_project_start_without_xdist() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "--collect-only", __file__]
    ended = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout
