"""Crash loops of every kind under the real Supervisor: the documented exit code in time, no leftovers, the right
reason."""

import json
import os
import resource
import signal
import time
from pathlib import Path

import pytest

from tests.tiers import NIGHTLY

END_S = 2.0  # from the last crash to the end


def busy() -> float:
    """Return the factor by which this machine is slower now: the number of runnable processes per core."""
    return max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


def bundles(appliance):
    """Return the contents of each crash bundle, oldest first."""
    return [json.loads(path.read_text()) for path in sorted((appliance.directory / "crashes").glob("*/death.json"))]


SHAPES = [
    (["end", "3", "0"], "exit-code", "exit code 3"),
    (["end", "3", "3"], "exit-code", "exit code 3"),
    (["end", "3", "ready"], "exit-code", "exit code 3"),
    (["end", "0", "0"], "exit-code", "exit code 0"),
    (["end", "0", "ready"], "exit-code", "exit code 0"),
    (["end", "SIGSEGV", "ready"], "signal", "killed by SIGSEGV"),
    (["end", "SIGABRT", "0"], "signal", "killed by SIGABRT"),
    (["end", "255", "0"], "exit-code", "exit code 255"),
    (["end", "SIGSEGV", "0"], "signal", "killed by SIGSEGV"),
    (["end", "SIGKILL", "0"], "signal", "killed by SIGKILL"),
    (["end", "SIGTERM", "0"], "signal", "killed by SIGTERM"),
    (["litter", "SIGSEGV"], "signal", "killed by SIGSEGV"),
    (["litter", "1"], "exit-code", "exit code 1"),
    (["litter", "0"], "exit-code", "exit code 0"),
]


IN_MAKE_TEST = ("end 3 ready", "end SIGKILL 0", "litter SIGSEGV")


@pytest.mark.parametrize(
    ("words", "cause", "how"),
    [
        pytest.param(*shape, id=" ".join(shape[0]), marks=() if " ".join(shape[0]) in IN_MAKE_TEST else NIGHTLY)
        for shape in SHAPES
    ],
)
def test_a_crash_loop_ends_with_the_documented_code_and_nothing_left(launched, tmp_path, words, cause, how):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "termination-log").touch()
    counter = tmp_path / "memory.events"
    counter.write_text("low 0\noom_kill 3\n")  # earlier kills do not count
    appliance = launched(engines=[words], max=1, memory=str(counter))
    appliance.until(lambda: b"ready " in appliance.out() or words[-1] != "ready")
    (appliance.directory / "seen").touch()
    appliance.started("engine-0", times=2)
    appliance.until(lambda: appliance.out().count(b"the end:") == 2)
    decided = time.monotonic()
    assert appliance.end() == 14
    assert time.monotonic() - decided < END_S * busy()
    assert appliance.alive() == {}
    assert list(appliance.runs.iterdir()) == []
    assert not list(Path("/dev/shm").glob(f"{appliance.mark}*"))
    reason = appliance.reason()
    assert (reason["exit"], reason["program"], reason["cause"]) == ("restarts", "engine-0", cause)
    assert how in reason["message"] and reason["last_lines"] == [f"the end: {words[1]}"]
    assert "lifecycle.restart.max is 1" in reason["message"] and len(appliance.pids("engine-0")) == 2
    assert json.loads((appliance.directory / "termination-log").read_text()) == reason
    assert [(told["cause"], told["how"]) for told in bundles(appliance)] == [(cause, how)] * 2
    assert Path(reason["bundle"], "log.txt").read_text() == f"the end: {words[1]}\n"
    assert [told["follows"] for told in bundles(appliance)] == ["restart", "exit"]
    if words[0] == "litter":
        assert all(len(told["death"]["killed"]) == 2 for told in bundles(appliance))


@pytest.mark.nightly(
    "tests/appliance/supervisor/test_crash_loops.py::test_a_crash_loop_ends_with_the_documented_code_and_nothing_left"
)
def test_leftovers_of_a_crashed_engine_are_removed_before_its_restart(launched):
    appliance = launched(engines=[["litter", "SIGKILL"]], max=1)
    appliance.started("engine-0", times=2)
    first, alive = appliance.pids("engine-0")[0], appliance.alive()
    assert len(children := appliance.pids("engine-0-child")) >= 2 and not set(children[:2]) & set(alive)
    assert not Path(f"/dev/shm/{appliance.mark}-{first}").exists()


def test_next_reaper_cleans_up_after_a_killed_one(launched):
    appliance = launched(engines=[["escape"]])
    child, engine = appliance.started("engine-0-child"), appliance.started("engine-0")
    (reaper,) = [pid for pid, command in appliance.alive().items() if "supervisor.reaper" in command]
    os.kill(reaper, signal.SIGKILL)
    appliance.started("engine-0", times=2)
    assert not {child, engine} & set(appliance.alive())


def test_an_out_of_memory_kill_differs_from_other_kills(launched, tmp_path):
    counter = tmp_path / "memory.events"
    counter.write_text("low 0\noom_kill 3\n")
    (tmp_path / "memory.max").write_text("1000\n")
    appliance = launched(engines=[["oom", str(counter)], ["run"]], max=0, memory=str(counter))
    assert appliance.end() == 14
    reason, (told,) = appliance.reason(), bundles(appliance)
    assert reason["cause"] == told["cause"] == "oom-kill" and "SIGKILL, oom-kill" in reason["message"]
    assert "memory limit" in reason["cure"]
    assert told["death"]["memory"] == {"oom_kill": 1} and told["memory_limits"] == {"memory.max": "1000"}


def test_repeated_hangs_end_the_appliance_with_cause_hang(launched):
    appliance = launched(engines=[["run"]], max=1, stalled_s=1.0)
    assert appliance.end() == 14
    reason = appliance.reason()
    assert reason["cause"] == "hang" and "its start made no progress" in reason["message"]
    assert [told["death"]["signal"] for told in bundles(appliance)] == ["SIGKILL"] * 2


def test_bundles_are_bounded_and_hide_secrets(launched):
    environment = {"KEYS": "first-secret"}
    words = ["end", "first-secret sk-abcdefgh12345", "0"]
    appliance = launched(engines=[words], max=3, backoff_s=0.1, keep=2, secrets=["KEYS"], environment=environment)
    assert appliance.end() == 14
    crashes = appliance.directory / "crashes"
    assert len(bundles(appliance)) == 2 == len(list(crashes.iterdir()))
    assert crashes.stat().st_mode & 0o777 == 0o700
    text = "".join(path.read_text() for path in crashes.glob("*/*"))
    assert "the end: •••" in text and "first-secret" not in text and "sk-abcdefgh12345" not in text


def test_unwritable_bundle_folder_does_not_change_the_outcome(launched, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "crashes").touch()
    appliance = launched(engines=[["end", "1", "0"]], max=0)
    assert appliance.end() == 14
    assert b"cannot write a crash bundle" in appliance.out() and "bundle" not in appliance.reason()


@pytest.mark.parametrize(
    ("words", "code"),
    [
        pytest.param(["end", "1", "0"], 14, marks=NIGHTLY),
        (["permanent", "memory: no"], 11),
        pytest.param(["litter", "1"], 14, marks=NIGHTLY),
    ],
)
def test_halted_appliance_keeps_its_gateway_until_a_signal(launched, words, code):
    appliance = launched(engines=[words, ["run"]], max=1, exhausted="halt")
    gateway, other = appliance.started("gateway"), appliance.started("engine-1")
    appliance.until(lambda: appliance.err().endswith("\n"))
    appliance.until(lambda: other not in appliance.alive())
    reason = appliance.reason()
    assert reason["code"] == code and gateway in appliance.alive()
    (run,) = (path for path in appliance.runs.iterdir() if (path / "halted").exists())
    assert json.loads((run / "halted").read_text())["message"] == reason["message"]
    (monitor,) = [pid for pid, command in appliance.alive().items() if "supervisor.monitor" in command]
    lives = len(appliance.pids("engine-0"))
    os.kill(monitor, signal.SIGKILL)
    os.kill(gateway, signal.SIGKILL)  # it comes back, which also shows that the new monitor works
    appliance.started("gateway", times=2)
    began = time.monotonic()
    appliance.until(lambda: time.monotonic() - began > 1.0)  # time for an engine with a wrong start command to begin
    assert len(appliance.pids("engine-0")) == lives and len(appliance.pids("engine-1")) == 1
    assert appliance.terminate() == code
    assert appliance.alive() == {} and appliance.reason() == reason
    assert list(appliance.runs.iterdir()) == [] and not list(Path("/dev/shm").glob(f"{appliance.mark}*"))


def test_appliance_exits_if_a_full_disk_prevents_the_halted_state(launched):
    appliance = launched(engines=[["end", "1", "ready"]], max=0, exhausted="halt")
    appliance.until(lambda: b"ready " in appliance.out())
    launcher = appliance.process.pid
    resource.prlimit(launcher, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))  # no write into a file succeeds
    (appliance.directory / "seen").touch()
    assert appliance.end() == 14
    assert appliance.alive() == {}  # its output also goes into files, so only the exit code is checked
