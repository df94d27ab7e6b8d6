"""The restart monitor itself: killed repeatedly, and unresponsive."""

import contextlib
import os
import signal

from appliance.supervisor.monitor_watch import MAX_STARTS, SILENT_S, WINDOW_S, MonitorWatchdog
from appliance.supervisor.programs import program


def test_repeated_monitor_exits_end_the_appliance(launched):
    appliance = launched()
    appliance.started("engine-0")
    killed = set()

    def ended() -> bool:
        if pid := program(appliance.process.pid, "monitor"):
            killed.add(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return appliance.process.poll() is not None

    appliance.until(ended)
    reason = appliance.reason()
    assert appliance.end() == 16 and reason["program"] == "monitor"
    assert "restart monitor" in reason["message"]
    assert len(killed) <= MAX_STARTS + 1
    assert len(appliance.out().splitlines()) < 10 * MAX_STARTS
    assert appliance.alive() == {}


def test_monitor_starts_are_counted_within_a_window():
    watch = MonitorWatchdog()
    assert [watch.started(number * WINDOW_S / 5) for number in range(100)] == [""] * 100
    watch = MonitorWatchdog()
    assert [bool(watch.started(float(number))) for number in range(MAX_STARTS + 1)] == [False] * MAX_STARTS + [True]


def test_a_silent_monitor_is_killed_once_and_then_ends_the_appliance():
    watch = MonitorWatchdog()
    watch.alive(10.0)
    assert [watch.silent(10.0 + after_s) for after_s in (0.0, SILENT_S - 1, SILENT_S, SILENT_S + 1)] == [
        *(False, False, True, False)
    ]
    assert not watch.lost(10.0 + 2 * SILENT_S - 1)
    assert "sent no message" in watch.lost(10.0 + 2 * SILENT_S)


def test_monitor_that_sends_messages_again_is_not_lost():
    watch = MonitorWatchdog()
    assert watch.silent(SILENT_S)
    watch.alive(SILENT_S + 1)
    assert not watch.lost(10 * SILENT_S) and watch.silent(10 * SILENT_S)
