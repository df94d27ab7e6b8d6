import json
import os
import signal
import time

import pytest

from tests.tiers import NIGHTLY


def test_killed_programs_restart_and_the_others_continue(launched):
    """An engine, the gateway on the same port, and a monitor that missed the crash of an engine."""
    appliance = launched(engines=[["run"], ["run"]])
    first, other, gateway = (appliance.started(name) for name in ("engine-0", "engine-1", "gateway"))
    appliance.ready()
    os.kill(first, signal.SIGKILL)
    second = appliance.started("engine-0", times=2)
    assert second != first and appliance.pids("gateway") == [gateway] and appliance.pids("engine-1") == [other]
    assert appliance.process.poll() is None
    appliance.until(lambda: b"engine-0   exited (killed by SIGKILL); restart 1 of 5" in appliance.out())

    os.kill(gateway, signal.SIGKILL)
    appliance.started("gateway", times=2)
    appliance.until(lambda: b"ready      again" in appliance.out())
    assert appliance.pids("engine-0") == [first, second] and appliance.pids("engine-1") == [other]

    (monitor,) = [pid for pid, command in appliance.alive().items() if "appliance.supervisor.monitor" in command]
    os.kill(monitor, signal.SIGSTOP)
    os.kill(other, signal.SIGKILL)
    appliance.until(lambda: other not in appliance.alive())
    os.kill(monitor, signal.SIGKILL)
    appliance.started("engine-1", times=2)


def test_permanent_failure_ends_the_appliance_with_its_message(launched):
    appliance = launched(engines=[["run"], ["permanent", "slipway engine: memory: one block needs 96 MiB"]], max=5)
    assert appliance.end() == 11
    reason = appliance.reason()
    assert reason["exit"] == "memory"
    assert reason["program"] == "engine-1"
    assert reason["message"] == "engine-1 failed permanently: memory: one block needs 96 MiB"
    assert len(appliance.pids("engine-1")) == 1
    assert appliance.alive() == {}


@pytest.mark.parametrize(
    ("text", "code"),
    [
        pytest.param("checkpoint: model.safetensors is cut short", 10, marks=NIGHTLY),
        pytest.param("architecture: FooForCausalLM", 10, marks=NIGHTLY),
        pytest.param("config: no", 15, marks=NIGHTLY),
        ("slipway download: source: http: the server answered 403", 20),
        pytest.param("", 15, marks=NIGHTLY),
    ],
)
def test_first_word_of_a_permanent_failure_selects_the_exit_code(launched, text, code):
    assert launched(engines=[["permanent", text]]).end() == code


@pytest.mark.nightly(
    "tests/appliance/supervisor/test_crash_loops.py::test_a_crash_loop_ends_with_the_documented_code_and_nothing_left"
)
def test_crash_loop_ends_the_appliance_with_the_last_lines_of_the_program(launched):
    appliance = launched(engines=[["crash"]], max=2)
    assert appliance.end() == 14
    reason = appliance.reason()
    assert reason["exit"] == "restarts"
    assert "engine-0" in reason["message"]
    assert "lifecycle.restart.max is 2" in reason["message"]
    assert reason["last_lines"][-1] == "engine-0: about to crash"
    assert len(appliance.pids("engine-0")) == 3
    assert appliance.alive() == {}


@pytest.mark.nightly(
    "tests/appliance/supervisor/test_crash_loops.py::test_a_crash_loop_ends_with_the_documented_code_and_nothing_left"
)
def test_crashes_after_a_successful_start_count(launched):
    """Supervisor itself would restart such a program forever."""
    appliance = launched(max=1)
    appliance.started("gateway")
    appliance.ready()
    for times in (1, 2):
        pid = appliance.started("engine-0", times=times)
        # Two seconds of uptime exceed any start-up second of Supervisor.
        appliance.until(lambda pid=pid: _age(pid) > 2)
        os.kill(pid, signal.SIGKILL)
    assert appliance.end() == 14
    assert len(appliance.pids("engine-0")) == 2


@pytest.mark.nightly(
    "tests/appliance/supervisor/test_restart_monitor.py::test_a_crash_counts_until_the_window_has_passed"
)
def test_crashes_outside_the_window_do_not_count(launched):
    appliance = launched(max=1, window_s=0.8)
    for times in (1, 2, 3, 4):
        pid = appliance.started("engine-0", times=times)
        appliance.until(lambda pid=pid: _age(pid) > 1.2)
        if times < 4:
            os.kill(pid, signal.SIGKILL)
    assert appliance.terminate() == 0


def test_reason_is_written_to_an_existing_termination_log(launched, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "termination-log").write_text("from the run before, and longer than the new text " * 50)
    appliance = launched(engines=[["permanent", "checkpoint: no such shard"]])
    assert appliance.end() == 10
    reason = json.loads((appliance.directory / "termination-log").read_text())
    assert reason == appliance.reason()


@pytest.mark.nightly("tests/appliance/supervisor/test_reason.py::test_long_reason_is_shortened_to_valid_json")
def test_termination_log_stays_json_with_long_last_lines(launched, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "termination-log").touch()
    appliance = launched(engines=[["permanent", "a" * 2500 + "\n" + "b" * 2500 + "\nmemory: too little"]])
    assert appliance.end() == 11
    text = (appliance.directory / "termination-log").read_bytes()
    assert len(text) <= 4096 and json.loads(text)["last_lines"] == ["b" * 2500, "memory: too little"]
    assert len(appliance.reason()["last_lines"]) == 3


def test_killed_supervisord_ends_the_appliance_and_all_programs(launched):
    appliance = launched()
    appliance.started("engine-0")
    appliance.started("gateway")
    (supervisor,) = [pid for pid, command in appliance.alive().items() if "supervisor.supervisord" in command]
    os.kill(supervisor, signal.SIGKILL)
    assert appliance.end() == 16
    assert "SIGKILL" in appliance.reason()["message"]
    assert appliance.alive() == {}
    assert list(appliance.runs.iterdir()) == []


def _age(pid: int) -> float:
    """Seconds since a process was started, by the kernel's clock."""
    with open(f"/proc/{pid}/stat") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
