"""Faults are rolled back: by the tool itself, harmlessly if repeated, or by the guard process if it is killed."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from appliance.chaos.rollback import RestoreFile, RestoreFileLimit, ResumeProcess, Rollback, roll_back
from appliance.supervisor import programs


@pytest.fixture
def victim():
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def until(check):
    deadline = time.monotonic() + 100
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def state(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def limit(pid):
    return resource.prlimit(pid, resource.RLIMIT_FSIZE)[0]


def test_steps_are_rolled_back_in_reverse_and_are_idempotent(tmp_path, victim):
    path, first, second = (tmp_path / name for name in ("file", "first", "second"))
    for each, text in ((path, "third"), (second, "second"), (first, "first")):
        each.write_text(text)
    start_ticks, soft = programs.start_ticks(victim.pid), limit(victim.pid)
    steps = [
        RestoreFile(str(path), str(first)),
        RestoreFile(str(path), str(second)),
        ResumeProcess(victim.pid, start_ticks),
        RestoreFileLimit(victim.pid, start_ticks, soft),
    ]
    os.kill(victim.pid, signal.SIGSTOP)
    until(lambda: state(victim.pid) == "T")
    resource.prlimit(victim.pid, resource.RLIMIT_FSIZE, (0, resource.prlimit(victim.pid, resource.RLIMIT_FSIZE)[1]))
    for _ in range(2):
        assert roll_back(steps) == []
        assert path.read_text() == "first" and [each.name for each in tmp_path.iterdir()] == ["file"]
        until(lambda: state(victim.pid) == "S")
        assert limit(victim.pid) == soft


def test_other_process_with_the_same_id_is_not_changed(victim):
    os.kill(victim.pid, signal.SIGSTOP)
    until(lambda: state(victim.pid) == "T")
    roll_back([ResumeProcess(victim.pid, programs.start_ticks(victim.pid) + 1)])
    assert state(victim.pid) == "T"


def test_failed_step_is_reported_and_the_others_are_rolled_back(tmp_path):
    (tmp_path / "kept").write_text("kept")
    steps = [
        RestoreFile(str(tmp_path / "path"), str(tmp_path / "kept")),
        RestoreFile(str(tmp_path), str(tmp_path / "kept")),
    ]
    (said,) = roll_back(steps)
    assert str(tmp_path) in said
    assert (tmp_path / "path").read_text() == "kept"


KILLED = """
import os, signal, sys
from appliance.chaos.rollback import RestoreFile, Rollback
rollback = Rollback()
rollback.register(RestoreFile(sys.argv[1], sys.argv[2]))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_guard_rolls_back_the_steps_of_a_killed_process(tmp_path):
    path, kept = tmp_path / "path", tmp_path / "kept"
    path.write_text("broken")
    kept.write_text("whole")
    done = subprocess.run([sys.executable, "-c", KILLED, str(path), str(kept)], check=False)
    assert done.returncode == -signal.SIGKILL
    until(lambda: path.read_text() == "whole")


def test_guard_ignores_steps_that_are_already_rolled_back(tmp_path):
    path, kept = tmp_path / "path", tmp_path / "kept"
    path.write_text("broken")
    kept.write_text("whole")
    rollback = Rollback()
    rollback.register(RestoreFile(str(path), str(kept)))
    assert rollback.run() == []
    path.write_text("newer")
    kept.write_text(json.dumps("somebody else's"))
    rollback.close()
    assert path.read_text() == "newer"
