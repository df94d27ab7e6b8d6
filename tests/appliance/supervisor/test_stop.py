import os
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.tiers import thinned

SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT]


@pytest.mark.parametrize("number", thinned(SIGNALS, kept=[signal.SIGQUIT]), ids=lambda number: number.name)
def test_a_stop_signal_ends_all_programs_with_code_0_and_no_restart(launched, number):
    appliance = launched()
    appliance.started("engine-0")
    appliance.started("gateway")
    appliance.process.send_signal(number)
    assert appliance.end() == 0
    assert appliance.alive() == {}
    assert appliance.err() == ""
    assert len(appliance.pids("engine-0")) == len(appliance.pids("gateway")) == 1


def test_stop_during_the_start_leaves_no_process(launched):
    appliance = launched()
    appliance.until(lambda: b"starting" in appliance.out())
    assert appliance.terminate() == 0
    assert appliance.alive() == {}


def test_the_gateway_is_stopped_before_the_engines(launched):
    appliance = launched(drain_s=1.0, engines=[["run"], ["run"]])
    (appliance.directory / "deaf").touch()
    appliance.started("gateway")
    engines = {appliance.started("engine-0"), appliance.started("engine-1")}
    appliance.process.send_signal(signal.SIGTERM)
    # The unresponsive gateway keeps running through its drain, and the engines keep running until it exits.
    (gateway,) = appliance.pids("gateway")
    while gateway in (alive := appliance.alive()):
        seen = engines & set(alive)
        if gateway in appliance.alive():
            assert seen == engines
    assert appliance.end() == 0
    assert appliance.alive() == {}


def test_a_child_in_another_session_is_killed_and_an_orphan_adopted_and_reaped(launched):
    """The child ignores SIGTERM."""
    appliance = launched(engines=[["escape"], ["orphan"]])
    child, orphan = appliance.started("engine-0-child"), appliance.started("engine-1-grandchild")
    appliance.started("engine-0")
    appliance.started("engine-1")
    assert os.getsid(child) == child
    reapers = [pid for pid, command in appliance.alive().items() if "supervisor.reaper" in command]
    appliance.until(lambda: _parent(orphan) in reapers)
    os.kill(orphan, signal.SIGKILL)
    appliance.until(lambda: not Path(f"/proc/{orphan}").exists())  # a zombie would still be there
    assert appliance.terminate() == 0
    assert appliance.alive() == {}


@pytest.mark.nightly(
    "tests/appliance/supervisor/test_crash_loops.py::test_a_crash_loop_ends_with_the_documented_code_and_nothing_left"
)
def test_children_of_a_killed_engine_do_not_outlive_the_appliance(launched):
    appliance = launched(engines=[["escape"]], max=0)
    child = appliance.started("engine-0-child")
    os.kill(appliance.started("engine-0"), signal.SIGKILL)
    assert appliance.end() == 14
    assert child not in appliance.alive()
    assert appliance.alive() == {}


def test_a_second_signal_does_not_wait_for_the_drain(launched):
    appliance = launched(drain_s=600.0)
    (appliance.directory / "deaf").touch()
    appliance.started("gateway")
    appliance.process.send_signal(signal.SIGINT)
    appliance.until(lambda: b"stopping" in appliance.out())

    def signalled_until_gone() -> bool:
        appliance.process.send_signal(signal.SIGINT)
        return appliance.process.poll() is not None

    appliance.until(signalled_until_gone)
    assert appliance.end() == 0
    assert appliance.alive() == {}


@contextmanager
def hangup(action):
    """Set the disposition of SIGHUP that a child inherits."""
    before = signal.signal(signal.SIGHUP, action)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def test_sighup_is_ignored_under_nohup(launched):
    with hangup(signal.SIG_IGN):  # what nohup does
        appliance = launched()
    engine = appliance.started("engine-0")
    appliance.process.send_signal(signal.SIGHUP)
    os.kill(engine, signal.SIGKILL)
    appliance.started("engine-0", times=2)
    assert appliance.terminate() == 0
    assert "SIGHUP" not in appliance.output()


def test_sighup_stops_the_appliance_without_a_reloader(launched):
    with hangup(signal.SIG_DFL):  # however these tests themselves were started
        appliance = launched()
    appliance.started("engine-0")
    appliance.process.send_signal(signal.SIGHUP)
    assert appliance.end() == 0
    assert "SIGHUP: stopping" in appliance.output()


def test_all_programs_exit_when_the_launcher_is_killed(launched):
    appliance = launched()
    appliance.started("engine-0")
    appliance.started("gateway")
    appliance.process.kill()
    appliance.end()
    appliance.until(lambda: appliance.alive() == {})


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
