import msgspec
import pytest

from appliance.supervisor.exit_status import ExitStatus
from appliance.supervisor.monitor import Notice, Policy, RestartMonitor
from appliance.supervisor.supervisord import take_event
from engine.api.errors import EXIT_DRIFT


class World:
    """Environment of a restart monitor: exit statuses and reports of reapers go in, starts and notices come out."""

    def __init__(self, policy: Policy, *, halted: bool = False) -> None:
        self.status: int | None = -1
        self.exit_status: ExitStatus | None = None
        self.started: list[str] = []
        self.notices: list[Notice] = []
        self.halts = 0
        self.monitor = RestartMonitor(
            policy,
            notify=self.notices.append,
            start=self.started.append,
            status=lambda name: self.status,
            exit_status=lambda program: self.exit_status,
            halt=self._halt,
            halted=halted,
        )

    def _halt(self) -> None:
        assert self.notices[-1].halt, "the launcher hears of it first"
        self.halts += 1

    def exits(self, now: float, name: str = "engine-0", status: int | None = -1) -> None:
        self.status = status
        group = "gateway" if name == "gateway" else "engines"
        payload = {"processname": name, "groupname": group, "from_state": "RUNNING", "expected": "0", "pid": "7"}
        self.monitor.event("PROCESS_STATE_EXITED", payload, now)


def test_first_restart_is_immediate_and_later_delays_double():
    world = World(Policy(max=9, window_s=1000.0))
    delays = []
    for now in range(0, 900, 100):
        world.exits(now)
        due = world.monitor.next_due()
        assert due is not None
        delays.append(due - now)
        world.monitor.start_due(due - 0.001)
        assert len(world.started) == len(delays) - 1
        world.monitor.start_due(due)
        assert world.started == ["engines:engine-0"] * len(delays)
    assert delays == [0, 1, 2, 4, 8, 16, 30, 30, 30]


def test_delays_follow_the_policy():
    policy = Policy(max=9, window_s=1000.0, backoff_s=3.0, max_backoff_s=10.0)
    assert [policy.delay([0.0] * crashes, 0.0) for crashes in range(1, 11)] == [0, 3, 6, 10, 10, 10, 10, 10, 10, None]
    assert Policy(max=9, window_s=1000.0, backoff_s=0.0).delay([0.0] * 9, 0.0) == 0


def test_exempt_crashes_do_not_count():
    world = World(Policy(max=2, window_s=600.0))
    for now in (1, 2, 3, 4, 5, 6):
        world.exits(now)
        world.monitor.start_due(now + 60)
        world.monitor.exempt("engine-0", 1)
        world.monitor.exempt("engine-1", 5)
    assert {notice.kind for notice in world.notices} == {"restart"}
    for now in (7, 8, 9):
        world.exits(now)
        world.monitor.start_due(now + 60)
    assert world.notices[-1].kind == "exhausted"


def test_notice_of_a_hung_program_has_the_reason():
    world = World(Policy(max=5, window_s=600.0))
    world.monitor.mark_hung("engine-0", "hung: no step finished for 90 s")
    world.exits(1)
    world.monitor.start_due(1)
    world.exits(2)
    assert [notice.how for notice in world.notices] == ["hung: no step finished for 90 s", "killed by a signal"]


@pytest.mark.parametrize("most", [0, 1, 5])
def test_crash_beyond_the_limit_is_reported_without_a_restart(most):
    world = World(Policy(max=most, window_s=600.0))
    for now in range(most + 1):
        world.exits(now * 100.0)
        world.monitor.start_due(now * 100.0 + 99)
    assert [notice.kind for notice in world.notices] == ["restart"] * most + ["exhausted"]
    assert len(world.started) == most
    assert world.monitor.next_due() is None


def test_second_drift_within_the_window_is_permanent():
    world = World(Policy(max=9, window_s=100.0))
    for now, kind in ((0.0, "restart"), (150.0, "restart"), (200.0, "permanent")):
        world.exits(now, status=EXIT_DRIFT)
        world.monitor.start_due(now)
        assert world.notices[-1].kind == kind
    assert len(world.started) == 2


def test_drift_of_another_engine_or_other_crashes_is_not_a_second_drift():
    world = World(Policy(max=9, window_s=100.0))
    for now, name, status in ((0, "engine-0", EXIT_DRIFT), (1, "engine-1", EXIT_DRIFT), (2, "engine-0", 70)):
        world.exits(now, name, status)
        world.monitor.start_due(now + 50)
    assert {notice.kind for notice in world.notices} == {"restart"}


def test_a_crash_counts_until_the_window_has_passed():
    world = World(Policy(max=1, window_s=10.0))
    world.exits(0.0)
    world.monitor.start_due(0.0)
    world.exits(10.0)
    world.monitor.start_due(10.0)
    assert [notice.kind for notice in world.notices] == ["restart", "restart"]
    world.exits(19.9)
    assert world.notices[-1].kind == "exhausted"


def test_crashes_are_counted_per_program():
    world = World(Policy(max=1, window_s=600.0))
    world.exits(0.0, "engine-0")
    world.exits(1.0, "engine-1")
    world.monitor.start_due(1.0)
    assert sorted(world.started) == ["engines:engine-0", "engines:engine-1"]


def test_permanent_failure_is_reported_and_not_restarted():
    world = World(Policy(max=5, window_s=600.0))
    world.exits(0.0, status=78)
    assert world.notices == [Notice(kind="permanent", program="engine-0", how="exit code 78")]
    assert world.monitor.next_due() is None


@pytest.mark.parametrize(("status", "how"), [(-1, "killed by a signal"), (0, "exit code 0"), (3, "exit code 3")])
def test_other_exits_are_crashes_and_the_notice_has_the_status(status, how):
    world = World(Policy(max=5, window_s=600.0))
    world.exits(0.0, status=status)
    assert world.notices == [Notice(kind="restart", program="engine-0", how=how, restart=1, delay_s=0.0)]


def test_a_crash_that_is_reported_twice_counts_once():
    world = World(Policy(max=5, window_s=600.0))
    world.exits(0.0)
    world.monitor.start_due(0.0)
    world.exits(1.0)
    world.exits(1.1)
    assert len(world.notices) == 2


def test_a_late_crash_report_of_a_restarted_program_does_not_count():
    """Nor is anything restarted while Supervisor shuts down, which looks the same from here."""
    world = World(Policy(max=5, window_s=600.0))
    world.exits(0.0, status=None)
    assert world.notices == world.started == []
    assert world.monitor.next_due() is None


def test_a_program_that_cannot_be_started_is_reported():
    world = World(Policy(max=5, window_s=600.0))
    world.monitor.event("PROCESS_STATE_FATAL", {"processname": "gateway", "groupname": "gateway"}, 0.0)
    assert world.notices == [Notice(kind="unstartable", program="gateway")]


def _event(serial: int) -> bytes:
    payload = f"processname:engine-{serial} groupname:engines from_state:RUNNING expected:0 pid:{serial}"
    return (
        f"ver:3.0 server:supervisor serial:{serial} pool:monitor poolserial:{serial} "
        f"eventname:PROCESS_STATE_EXITED len:{len(payload)}\n{payload}"
    ).encode()


def test_events_are_parsed_for_any_split_of_the_bytes():
    stream = b"".join(_event(serial) for serial in range(3))
    for size in (1, 2, 7, 101, len(stream)):
        buffer, found = bytearray(), []
        for start in range(0, len(stream), size):
            buffer += stream[start : start + size]
            while (event := take_event(buffer)) is not None:
                found.append(event)
        assert [(kind, payload["processname"]) for kind, payload in found] == [
            ("PROCESS_STATE_EXITED", f"engine-{serial}") for serial in range(3)
        ]
        assert buffer == b""


def test_a_notice_is_written_in_one_piece():
    """A pipe keeps writes of up to 4096 bytes together."""
    told = tuple("4194304 " + "x" * 100 for _ in range(6))
    events = dict.fromkeys(("low", "high", "max", "oom", "oom_kill", "oom_group_kill", "sock_throttled"), 10**15)
    exit_status = ExitStatus(
        pid=2**22, duration_s=1e9, code=255, signal="SIGSEGV", core=True, peak_bytes=2**50, memory=events,
        killed=told, stuck=told, removed=told,
    )  # fmt: skip
    notice = Notice(
        kind="exhausted", program="engine-63", how="x" * 99, restart=10**6, delay_s=1e300, exit_status=exit_status
    )
    assert len(msgspec.json.encode(notice)) < 4096


def test_notice_has_the_exit_status_of_the_reaper():
    world = World(Policy(max=5, window_s=600.0))
    world.exit_status = ExitStatus(pid=3, duration_s=1.5, signal="SIGSEGV")
    world.exits(0.0)
    assert (world.notices[0].how, world.notices[0].exit_status) == ("killed by SIGSEGV", world.exit_status)


def test_a_crash_that_stops_the_appliance_is_reported_once():
    """A new monitor checks the state first and receives the earlier events afterwards"""
    world = World(Policy(max=0, window_s=600.0))
    world.exits(0.0)
    world.exits(0.1)
    assert [notice.kind for notice in world.notices] == ["exhausted"]


def test_halting_stops_all_engines_and_restarts_only_the_gateway():
    world = World(Policy(max=1, window_s=600.0, exhausted="halt"))
    world.exits(0.0, "engine-1")
    world.exits(0.0, "engine-0")
    world.monitor.start_due(0.0)
    world.exits(1.0, "engine-1")
    assert world.notices[-1].kind == "exhausted" and world.notices[-1].halt and world.halts == 1
    world.started.clear()
    world.exits(2.0, "engine-0")
    world.monitor.start_due(9.0)
    assert world.started == [] and len(world.notices) == 3
    world.exits(10.0, "gateway")
    world.monitor.start_due(10.0)
    assert world.started == ["gateway:gateway"]


def test_pending_restarts_are_cancelled_by_a_halt():
    world = World(Policy(max=9, window_s=600.0, exhausted="halt"))
    world.exits(0.0, "engine-0")
    world.monitor.start_due(0.0)
    world.exits(1.0, "engine-0")
    world.exits(1.0, "engine-1", status=78)
    world.monitor.start_due(100.0)
    assert world.started == ["engines:engine-0"] and world.notices[-1].kind == "permanent" and world.halts == 1


def test_new_monitor_of_a_halted_appliance_starts_no_engine():
    world = World(Policy(max=9, window_s=600.0, exhausted="halt"), halted=True)
    world.exits(0.0, "engine-0")
    assert world.notices == [] and world.monitor.next_due() is None


def test_gateway_beyond_its_limit_ends_the_appliance_that_halts_too():
    world = World(Policy(max=0, window_s=600.0, exhausted="halt"))
    world.exits(0.0, "gateway")
    assert not world.notices[-1].halt and world.halts == 0
