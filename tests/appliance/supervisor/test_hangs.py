"""Hang detection with a synthetic clock and synthetic heartbeats; the e2e tests stop real engines."""

import os

import pytest

from appliance.supervisor.hangs import SLOWER, Budgets, Hangs
from engine.api.heartbeat import Heartbeat, HeartbeatWriter, State, read_heartbeat

PID = 7


@pytest.fixture
def hangs():
    hangs = Hangs(Budgets(loading_s=300, busy_s=90, idle_s=60, testing_s=30))
    hangs.started("engine-0", PID, 0.0)
    return hangs


def looks(hangs, beat, *times):
    """Return, for each check of the same heartbeat, True if it counts as a hang."""
    return [bool(hangs.look("engine-0", beat, now)) for now in times]


@pytest.mark.parametrize(
    ("state", "budget", "key"),
    [
        (State.LOADING, 300, "stalled_loading"),
        (State.BUSY, 90, "stalled_busy"),
        (State.IDLE, 60, "stalled_idle"),
        (State.TESTING, 30, "stalled_testing"),
    ],
)
def test_silence_in_each_state_has_its_own_budget(hangs, state, budget, key):
    beat = Heartbeat(PID, state, 5)
    assert looks(hangs, beat, 10, 10 + budget - 1) == [False, False]
    assert key in hangs.look("engine-0", beat, 10 + budget)


def test_progress_resets_the_clock(hangs):
    for number in range(100):
        assert looks(hangs, Heartbeat(PID, State.LOADING, number), 299.0 * number) == [False]
    assert looks(hangs, Heartbeat(PID, State.LOADING, 99), 299.0 * 99 + 300) == [True]


def test_an_engine_that_never_wrote_a_pulse_is_loading(hangs):
    assert looks(hangs, None, 299, 300) == [False, True]


def test_the_heartbeat_of_the_previous_process_is_ignored(hangs):
    """A stale BUSY of a killed engine must not shorten the time limit of its successor, which starts slowly"""
    old = Heartbeat(PID - 1, State.BUSY, 1000)
    assert looks(hangs, old, 89, 91, 299, 300) == [False, False, False, True]


def test_a_slow_engine_that_moves_is_never_killed(hangs):
    """Steps of eighty seconds, then a step that takes four times as long"""
    now = 0.0
    for number in range(10):
        assert looks(hangs, Heartbeat(PID, State.BUSY, number), now) == [False]
        now += 80
    assert looks(hangs, Heartbeat(PID, State.BUSY, 9), now - 80 + 4 * 80) == [False]
    assert looks(hangs, Heartbeat(PID, State.BUSY, 9), now - 80 + SLOWER * 80) == [True]


def test_a_step_that_the_plan_expects_to_be_slow_is_awaited():
    """A long prompt of a large model on a CPU may take minutes."""
    hangs = Hangs(Budgets(busy_s=20, step_s=60))
    hangs.started("engine-0", PID, 0.0)
    assert looks(hangs, Heartbeat(PID, State.BUSY, 1), 0, SLOWER * 60 - 1, SLOWER * 60) == [False, False, True]


@pytest.mark.parametrize(("state", "budget"), [(State.BUSY, 90), (State.IDLE, 60), (State.LOADING, 300)])
def test_an_engine_that_uses_the_cpu_gets_several_times_as_long(hangs, state, budget):
    """On a loaded machine its step may take long, however short the others were."""
    hangs.look("engine-0", Heartbeat(PID, state, 1), 0.0)
    assert not hangs.look("engine-0", Heartbeat(PID, state, 1), SLOWER * budget - 1, active=True)
    assert hangs.look("engine-0", Heartbeat(PID, state, 1), SLOWER * budget, active=True)
    assert hangs.look("engine-0", Heartbeat(PID, state, 1), budget, active=False)


def test_pauses_without_work_are_no_long_steps(hangs):
    hangs.look("engine-0", Heartbeat(PID, State.IDLE, 1), 0)
    hangs.look("engine-0", Heartbeat(PID, State.BUSY, 2), 59)
    assert looks(hangs, Heartbeat(PID, State.BUSY, 2), 59 + 89, 59 + 90) == [False, True]


def test_zero_is_never():
    hangs = Hangs(Budgets(0, 0, 0, 0))
    hangs.started("engine-0", PID, 0.0)
    for state in State:
        assert looks(hangs, Heartbeat(PID, state, 1), 1, 1e9) == [False, False]


def test_what_does_not_run_does_not_hang(hangs):
    hangs.ended("engine-0")
    assert looks(hangs, Heartbeat(PID, State.BUSY, 1), 0, 1e9) == [False, False]
    assert hangs.pid("engine-0") is None


def test_a_pulse_reads_as_it_was_written(tmp_path):
    path = tmp_path / "pulse"
    assert read_heartbeat(path) is None
    pulse = HeartbeatWriter(str(path))
    assert read_heartbeat(path) == Heartbeat(os.getpid(), State.LOADING, 0)
    for state in (State.LOADING, State.BUSY, State.BUSY, State.IDLE):
        pulse.beat(state)
    assert read_heartbeat(path) == Heartbeat(os.getpid(), State.IDLE, 4)
    path.write_bytes(b"torn")
    assert read_heartbeat(path) is None
