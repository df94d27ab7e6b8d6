"""A test that hangs where Python hears no signal ends with its process, also when it has failed before."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tiers import thinned

ROOT = Path(__file__).parents[1]
HANGS = """
import ctypes, pytest

def hang():
    while True:  # swallows what an alarm raises, as native code does that waits in a loop
        try:
            ctypes.CDLL(None).sleep(1000)
        except BaseException:
            pass

@pytest.fixture
def held():
    yield
    hang()

def test_that_hangs():
    hang()

def test_that_fails_and_hangs_as_it_ends(held):
    assert False, "found"
"""


@pytest.mark.parametrize(
    "name",
    thinned(["test_that_hangs", "test_that_fails_and_hangs_as_it_ends"], ["test_that_fails_and_hangs_as_it_ends"]),
)
def test_a_test_that_hangs_ends_and_says_where(name, tmp_path):
    (tmp_path / "test_it.py").write_text(HANGS)
    began = time.monotonic()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-c", str(ROOT / "pyproject.toml")),
            *("-o", "timeout=1", "-o", "faulthandler_timeout=3", f"{tmp_path / 'test_it.py'}::{name}"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 1 and "Timeout (0:00:03)!" in done.stderr, done.stdout + done.stderr
    assert "in hang\n" in done.stderr
    assert time.monotonic() - began < 100
