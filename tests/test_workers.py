"""`--workers`: forked processes share the files, and report as one process does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SHARED = """
import os
import pathlib
import pytest

HERE = pathlib.Path(__file__).parent

@pytest.fixture(scope="session")
def service():
    yield os.getpid()
    (HERE / f"ended-{os.getpid()}").touch(exist_ok=False)
"""
FILE = """
import os
import time

def test_has_the_service_of_its_process(service, tmp_path):
    assert service == os.getpid()
    assert "worker-" in str(tmp_path)

def test_fails_with_its_output(service):
    print("printed in NUMBER")
    assert False

def test_is_the_last(service):
    while len(set(path.read_text() for path in MARKS.iterdir())) < 2:  # the other worker has begun, too
        time.sleep(0.01)
"""


def run(folder: Path, *options: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.workers", "-p", "no:cacheprovider", *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return f"{done.stdout}{done.stderr}\nexit code {done.returncode}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "conftest.py").write_text(SHARED)
    marks = f"import pathlib\nMARKS = pathlib.Path({str(tmp_path)!r}) / 'marks'\n"
    begun = "(MARKS / str(os.getpid())).write_text(str(os.getpid()))"
    for number in range(3):
        text = FILE.replace("NUMBER", f"file {number}").replace(
            "    assert service ==", f"    {begun}\n    assert service =="
        )
        (tmp_path / f"test_{number}.py").write_text(marks + text)
    (tmp_path / "marks").mkdir()
    return tmp_path


def test_workers_share_the_files_and_each_has_fixtures_of_its_own(folder: Path) -> None:
    output = run(folder, "--workers", "2")
    assert "3 failed, 6 passed" in output and output.endswith("exit code 1"), output
    assert all(f"printed in file {number}" in output for number in range(3))
    ended, begun = (
        {path.name.removeprefix("ended-") for path in place.glob("*[0-9]")} for place in (folder, folder / "marks")
    )
    assert ended == begun and len(begun) == 2


def test_first_failure_stops_all_workers(folder: Path) -> None:
    output = run(folder, "--workers", "2", "-x")
    assert "stopping after 1 failures" in output and output.endswith("exit code 1"), output
    ended, begun = (
        {path.name.removeprefix("ended-") for path in place.glob("*[0-9]")} for place in (folder, folder / "marks")
    )
    assert ended == begun, "fixtures end"


@pytest.mark.parametrize(("end", "how"), [("os.kill(os.getpid(), 9)", "signal 9"), ("os._exit(3)", "exit status 3")])
def test_crashed_worker_fails_its_test_and_the_others_go_on(tmp_path: Path, end: str, how: str) -> None:
    (tmp_path / "test_0.py").write_text(f"import os\ndef test_end(): {end}\ndef test_after(): pass\n")
    for number in (1, 2, 3):
        (tmp_path / f"test_{number}.py").write_text("def test_passes(): pass\n")
    output = run(tmp_path, "--workers", "2")
    assert f"a worker process crashed while running test_0.py::test_end: {how}" in output, output
    assert "1 failed, 3 passed" in output and output.endswith("exit code 1"), output


def test_files_that_cannot_be_collected_fail(tmp_path: Path) -> None:
    (tmp_path / "test_0.py").write_text("import missing_module\n")
    (tmp_path / "test_1.py").write_text("def test_passes(): pass\n")
    output = run(tmp_path, "--workers", "2")
    assert "1 error" in output and output.endswith("exit code 2"), output
