"""The heartbeat file on a file system without room: a small tmpfs in a mount namespace of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.api.heartbeat import Heartbeat, HeartbeatWriter, State, allocate_heartbeat, read_heartbeat

# Write a heartbeat on a full file system and print the beat that a monitor reads.
SCRIPT = """
import sys
from pathlib import Path
from engine.api.heartbeat import HeartbeatWriter, State, allocate_heartbeat, read_heartbeat
folder, prepared = Path(sys.argv[1]), sys.argv[2] == "allocated"
path = folder / "engine-0.pulse"
if prepared:
    allocate_heartbeat(path)
with (folder / "rest").open("wb", buffering=0) as rest:
    try:
        while rest.write(bytes(4096)):
            pass
    except OSError as error:
        print(error.strerror)
pulse = HeartbeatWriter(str(path))
pulse.write(State.BUSY)
beat = read_heartbeat(path)
print("none" if beat is None else f"{beat.state.name} {beat.count}", path.exists())
"""


def on_a_full_file_system(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    mount = 'mount -t tmpfs -o size=64k none "$1" && exec "$2" -c "$3" "$1" "$4"'
    namespace = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--map-root-user"]
    if subprocess.run([*namespace, "true"], capture_output=True, check=False).returncode:
        pytest.skip("a mount namespace is not permitted here")
    command = [*namespace, "sh", "-c", mount, "sh", str(folder), sys.executable, SCRIPT, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_engine_on_a_full_file_system_runs_without_heartbeat(tmp_path):
    done = on_a_full_file_system(tmp_path, "missing")
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert done.stdout.splitlines() == ["No space left on device", "none False"]
    (line,) = done.stderr.splitlines()
    assert "engine-0.pulse: No space left on device" in line and "without" in line


def test_an_allocated_heartbeat_is_written_on_a_full_file_system(tmp_path):
    done = on_a_full_file_system(tmp_path, "allocated")
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert done.stdout.splitlines() == ["No space left on device", "BUSY 1 True"]
    assert done.stderr == ""


def test_a_second_engine_takes_over_the_file_of_the_first(tmp_path):
    path = tmp_path / "pulse"
    allocate_heartbeat(path)
    assert read_heartbeat(path) is None and path.stat().st_size > 0
    inode = path.stat().st_ino
    HeartbeatWriter(str(path)).write(State.BUSY)
    HeartbeatWriter(str(path))
    assert read_heartbeat(path) == Heartbeat(os.getpid(), State.LOADING, 0)
    assert path.stat().st_ino == inode


def test_unwritable_heartbeat_file_is_not_fatal(tmp_path, capfd):
    pulse = HeartbeatWriter(str(tmp_path / "missing" / "pulse"))
    pulse.write(State.IDLE)
    assert pulse.state is State.IDLE
    assert "No such file" in capfd.readouterr().err
