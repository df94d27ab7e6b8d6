import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.supervisor import rundir
from appliance.supervisor.rundir import Address


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder with a path that is short enough for Unix sockets."""
    with tempfile.TemporaryDirectory(prefix="slipway-test-") as folder:
        yield Path(folder)


def test_folder_with_too_long_path_is_skipped_and_left_empty(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 80)
    folder.mkdir()
    with rundir.run_directory({"XDG_RUNTIME_DIR": str(folder)}) as directory:
        assert len(os.fsencode(directory / "supervisor.sock.4194304")) <= 107  # sun_path without its final zero
        assert folder not in directory.parents
    assert list(folder.iterdir()) == [] and not directory.exists()


def test_error_without_usable_folder_lists_all_folders_and_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("x" * 80)
    folder.mkdir()
    monkeypatch.setattr(rundir, "folders", lambda environment: [folder, tmp_path / "none"])
    with pytest.raises(rundir.NoRunDirectory) as caught, rundir.run_directory({}):
        pass
    for words in (f"{folder}: path too long", f"{tmp_path / 'none'}: No such file", "set XDG_RUNTIME_DIR"):
        assert words in str(caught.value)


def test_appliances_without_launcher_process_are_not_listed(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for name, address in (
        ("slipway-alive", Address(os.getpid(), "alive", 1)),
        ("slipway-dead", Address(ended.pid, "dead", 2)),
        ("other-alive", Address(os.getpid(), "other", 3)),
    ):
        (tmp_path / name).mkdir()
        rundir.write_address(tmp_path / name, address)
    (tmp_path / "slipway-damaged").mkdir()
    (tmp_path / "slipway-damaged" / "address.json").write_text("{")
    found = {address.host for address in rundir.running({"XDG_RUNTIME_DIR": str(tmp_path)})}
    assert found & {"alive", "dead", "other"} == {"alive"}


HOLD = """
import sys
from appliance.supervisor import rundir
with rundir.run_directory({}) as directory:
    print(directory, flush=True)
    sys.stdin.read()
"""


def held(folder: Path) -> subprocess.Popen[str]:
    """A process that has a run directory until it is killed."""
    environment = {**os.environ, "XDG_RUNTIME_DIR": "", "TMPDIR": str(folder)}
    command = [sys.executable, "-c", HOLD]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def test_the_next_start_removes_run_directories_of_killed_services(short: Path) -> None:
    """Run directories in use, without a lock file, and other folders stay."""
    (short / "slipway-new").mkdir()
    (short / "slipway-crashes-0").mkdir()
    (short / "other").mkdir()
    with held(short) as killed, held(short) as running:
        assert killed.stdout is not None and running.stdout is not None
        left, used = Path(killed.stdout.readline().strip()), Path(running.stdout.readline().strip())
        killed.kill()
        killed.wait()
        assert left.is_dir() and left.parent == used.parent == short
        with rundir.run_directory({"XDG_RUNTIME_DIR": str(short)}) as directory:
            names = {path.name for path in short.iterdir()}
            assert names == {"slipway-new", "slipway-crashes-0", "other", used.name, directory.name}
        running.kill()


def test_a_run_directory_is_in_use_as_long_as_supervisor_has_the_lock(short: Path) -> None:
    with rundir.run_directory({"XDG_RUNTIME_DIR": str(short)}) as directory:
        copy = short / "slipway-copy"
        copy.mkdir()
        (copy / rundir.LOCK).touch()
        with rundir.lock_to_pass(copy), rundir.run_directory({"XDG_RUNTIME_DIR": str(short)}):
            assert copy.is_dir() and directory.is_dir()
        with rundir.run_directory({"XDG_RUNTIME_DIR": str(short)}):
            assert not copy.exists() and directory.is_dir()
