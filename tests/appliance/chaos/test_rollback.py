"""Faults are rolled back: by the tool, harmlessly if repeated, and by the guard process if the tool is killed."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from appliance.chaos.rollback import Continued, Limited, Replaced, Undo, take_back
from appliance.supervisor import programs


@pytest.fixture
def victim():
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def until(check):
    deadline = time.monotonic() + 60
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def state(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def limit(pid):
    return resource.prlimit(pid, resource.RLIMIT_FSIZE)[0]


def test_steps_are_taken_back_in_reverse_and_may_be_twice(tmp_path, victim):
    path, first, second = (tmp_path / name for name in ("file", "first", "second"))
    for each, text in ((path, "third"), (second, "second"), (first, "first")):
        each.write_text(text)
    began, soft = programs.began(victim.pid), limit(victim.pid)
    steps = [
        Replaced(str(path), str(first)),
        Replaced(str(path), str(second)),
        Continued(victim.pid, began),
        Limited(victim.pid, began, soft),
    ]
    os.kill(victim.pid, signal.SIGSTOP)
    until(lambda: state(victim.pid) == "T")
    resource.prlimit(victim.pid, resource.RLIMIT_FSIZE, (0, resource.prlimit(victim.pid, resource.RLIMIT_FSIZE)[1]))
    for _ in range(2):
        assert take_back(steps) == []
        assert path.read_text() == "first" and [each.name for each in tmp_path.iterdir()] == ["file"]
        until(lambda: state(victim.pid) == "S")
        assert limit(victim.pid) == soft


def test_another_process_of_the_same_id_is_let_alone(victim):
    os.kill(victim.pid, signal.SIGSTOP)
    until(lambda: state(victim.pid) == "T")
    take_back([Continued(victim.pid, programs.began(victim.pid) + 1)])
    assert state(victim.pid) == "T"


def test_what_cannot_be_taken_back_is_told_and_the_rest_is(tmp_path):
    (tmp_path / "kept").write_text("kept")
    steps = [Replaced(str(tmp_path / "path"), str(tmp_path / "kept")), Replaced(str(tmp_path), str(tmp_path / "kept"))]
    (said,) = take_back(steps)
    assert str(tmp_path) in said
    assert (tmp_path / "path").read_text() == "kept"


KILLED = """
import os, signal, sys
from appliance.chaos.rollback import Replaced, Undo
undo = Undo()
undo.will(Replaced(sys.argv[1], sys.argv[2]))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_guard_takes_back_what_a_killed_one_left(tmp_path):
    path, kept = tmp_path / "path", tmp_path / "kept"
    path.write_text("broken")
    kept.write_text("whole")
    done = subprocess.run([sys.executable, "-c", KILLED, str(path), str(kept)], check=False)
    assert done.returncode == -signal.SIGKILL
    until(lambda: path.read_text() == "whole")


def test_the_guard_leaves_alone_what_was_taken_back_already(tmp_path):
    path, kept = tmp_path / "path", tmp_path / "kept"
    path.write_text("broken")
    kept.write_text("whole")
    undo = Undo()
    undo.will(Replaced(str(path), str(kept)))
    assert undo.all() == []
    path.write_text("newer")
    kept.write_text(json.dumps("somebody else's"))
    undo.close()
    assert path.read_text() == "newer"
