"""Hang detection with a synthetic clock and synthetic heartbeats; the e2e tests stop real engines."""

import os

import pytest

from appliance.supervisor.hangs import SLOW_FACTOR, Budgets, HangDetector
from engine.api.heartbeat import Heartbeat, HeartbeatWriter, State, read_heartbeat

PID = 7


@pytest.fixture
def hangs():
    hangs = HangDetector(Budgets(loading_s=300, busy_s=90, idle_s=60, testing_s=30))
    hangs.started("engine-0", PID, 0.0)
    return hangs


def checks(hangs, heartbeat, *times):
    """Return, for each check of the same heartbeat, True if it counts as a hang."""
    return [bool(hangs.check("engine-0", heartbeat, now)) for now in times]


@pytest.mark.parametrize(
    ("state", "budget", "key"),
    [
        (State.LOADING, 300, "stalled_loading"),
        (State.BUSY, 90, "stalled_busy"),
        (State.IDLE, 60, "stalled_idle"),
        (State.TESTING, 30, "stalled_testing"),
    ],
)
def test_each_state_has_its_own_limit_without_progress(hangs, state, budget, key):
    heartbeat = Heartbeat(PID, state, 5)
    assert checks(hangs, heartbeat, 10, 10 + budget - 1) == [False, False]
    assert key in hangs.check("engine-0", heartbeat, 10 + budget)


def test_progress_resets_the_clock(hangs):
    for number in range(100):
        assert checks(hangs, Heartbeat(PID, State.LOADING, number), 299.0 * number) == [False]
    assert checks(hangs, Heartbeat(PID, State.LOADING, 99), 299.0 * 99 + 300) == [True]


def test_engine_without_heartbeat_counts_as_loading(hangs):
    assert checks(hangs, None, 299, 300) == [False, True]


def test_the_heartbeat_of_the_previous_process_is_ignored(hangs):
    """A stale BUSY of a killed engine must not shorten the time limit of its successor, which starts slowly"""
    old = Heartbeat(PID - 1, State.BUSY, 1000)
    assert checks(hangs, old, 89, 91, 299, 300) == [False, False, False, True]


def test_slow_engine_with_progress_does_not_count_as_hung(hangs):
    """Steps of eighty seconds, then a step that takes four times as long"""
    now = 0.0
    for number in range(10):
        assert checks(hangs, Heartbeat(PID, State.BUSY, number), now) == [False]
        now += 80
    assert checks(hangs, Heartbeat(PID, State.BUSY, 9), now - 80 + 4 * 80) == [False]
    assert checks(hangs, Heartbeat(PID, State.BUSY, 9), now - 80 + SLOW_FACTOR * 80) == [True]


def test_limit_covers_the_slowest_step_of_the_plan():
    """A long prompt of a large model on a CPU may take minutes."""
    hangs = HangDetector(Budgets(busy_s=20, step_s=60))
    hangs.started("engine-0", PID, 0.0)
    assert checks(hangs, Heartbeat(PID, State.BUSY, 1), 0, SLOW_FACTOR * 60 - 1, SLOW_FACTOR * 60) == [
        False,
        False,
        True,
    ]


@pytest.mark.parametrize(("state", "budget"), [(State.BUSY, 90), (State.IDLE, 60), (State.LOADING, 300)])
def test_active_engine_gets_a_longer_limit(hangs, state, budget):
    """On a loaded machine its step may take long, however short the others were."""
    hangs.check("engine-0", Heartbeat(PID, state, 1), 0.0)
    assert not hangs.check("engine-0", Heartbeat(PID, state, 1), SLOW_FACTOR * budget - 1, active=True)
    assert hangs.check("engine-0", Heartbeat(PID, state, 1), SLOW_FACTOR * budget, active=True)
    assert hangs.check("engine-0", Heartbeat(PID, state, 1), budget, active=False)


def test_idle_time_does_not_count_as_step_time(hangs):
    hangs.check("engine-0", Heartbeat(PID, State.IDLE, 1), 0)
    hangs.check("engine-0", Heartbeat(PID, State.BUSY, 2), 59)
    assert checks(hangs, Heartbeat(PID, State.BUSY, 2), 59 + 89, 59 + 90) == [False, True]


def test_zero_disables_the_limit():
    hangs = HangDetector(Budgets(0, 0, 0, 0))
    hangs.started("engine-0", PID, 0.0)
    for state in State:
        assert checks(hangs, Heartbeat(PID, state, 1), 1, 1e9) == [False, False]


def test_stopped_program_does_not_count_as_hung(hangs):
    hangs.ended("engine-0")
    assert checks(hangs, Heartbeat(PID, State.BUSY, 1), 0, 1e9) == [False, False]
    assert hangs.pid("engine-0") is None


def test_heartbeat_is_read_as_written(tmp_path):
    path = tmp_path / "pulse"
    assert read_heartbeat(path) is None
    pulse = HeartbeatWriter(str(path))
    assert read_heartbeat(path) == Heartbeat(os.getpid(), State.LOADING, 0)
    for state in (State.LOADING, State.BUSY, State.BUSY, State.IDLE):
        pulse.write(state)
    assert read_heartbeat(path) == Heartbeat(os.getpid(), State.IDLE, 4)
    path.write_bytes(b"torn")
    assert read_heartbeat(path) is None
