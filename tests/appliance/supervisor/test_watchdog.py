"""Detection of hanging programs by the restart monitor: real processes and sockets, a synthetic clock for timeouts."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from appliance.supervisor.activity import Activity, RunningClock, queued_s
from appliance.supervisor.hangs import Budgets
from appliance.supervisor.watchdog import GatewayProbe, Watchdog

BUDGETS = Budgets(loading_s=100.0, gateway_s=20.0)


class Listener:
    """A control socket that answers while `answers` is true."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(self.path)
        self._socket.listen()
        self.waiting: list[socket.socket] = []

    def answer(self) -> bytes:
        """Answer the oldest request; return it."""
        connection = self.waiting.pop(0) if self.waiting else self._socket.accept()[0]
        with connection:
            asked = connection.recv(4096)
            connection.sendall(b"{}\n")
        return asked

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[Listener]:
    made = Listener(tmp_path / "control")
    yield made
    made.close()


@pytest.fixture
def stopped() -> Iterator[int]:
    """A stopped process is not ready to run, so its time in a run queue does not grow. The signal is delivered when the
    process next runs, so on a busy machine it can wait in a run queue until then."""
    process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    yield process.pid
    process.kill()
    process.wait()


@pytest.fixture
def probe_of(stopped: int) -> Iterator[Callable[..., GatewayProbe]]:
    """A probe of a gateway that listens at a path."""
    made: list[GatewayProbe] = []

    def probe(path: str, budgets: Budgets = BUDGETS) -> GatewayProbe:
        made.append(GatewayProbe(path, budgets))
        made[-1].started(stopped, 0.0)
        return made[-1]

    yield probe
    for each in made:
        each.ended()


def test_a_gateway_that_answers_never_counts_as_hung(listener, probe_of):
    probe = probe_of(listener.path)
    for step in range(200):
        assert probe.check(float(step)) == ""
        if step % 3 == 0:
            assert listener.answer() == b'{"type":"ping"}\n'


def test_gateway_without_replies_counts_as_hung_after_its_limit(listener, probe_of):
    probe = probe_of(listener.path)
    probe.check(0.0)
    listener.answer()
    assert [bool(probe.check(now)) for now in (1.0, 3.0, 22.0, 24.0)] == [False, False, False, True]
    assert "health.stalled_gateway" in probe.check(25.0)


def test_a_gateway_that_has_never_answered_is_starting(tmp_path, probe_of):
    probe = probe_of(str(tmp_path / "nobody"))
    assert [bool(probe.check(now)) for now in (0.0, 50.0, 99.0, 101.0)] == [False, False, False, True]
    assert "health.stalled_loading" in probe.check(102.0)


def test_a_late_answer_restarts_the_budget(listener, probe_of):
    probe = probe_of(listener.path)
    now = 0.0
    for _ in range(5):
        assert probe.check(now) == ""
        assert probe.check(now + 19.0) == ""
        listener.answer()
        assert probe.check(now + 19.5) == ""
        now += 25.0


def test_no_limit_or_no_socket_disables_hang_detection(tmp_path, probe_of):
    for path, budgets in ((str(tmp_path / "nobody"), Budgets(loading_s=0.0)), ("", BUDGETS)):
        probe = probe_of(path, budgets)
        assert [probe.check(now) for now in (1.0, 1e6)] == ["", ""]


def test_pause_of_the_monitor_counts_as_one_check():
    times = iter([10.0, 10.5, 11.0, 5000.0, 5000.5])
    clock = RunningClock(1.0, lambda: next(times))
    assert [clock.now_s() for _ in range(4)] == [0.5, 1.0, 2.0, 2.5]


SPIN = "import sys\nprint(flush=True)\nwhile True: pass"


def test_a_process_that_computes_is_active_and_one_that_was_stopped_is_not(stopped):
    with subprocess.Popen([sys.executable, "-c", SPIN], stdout=subprocess.PIPE) as spinning:
        assert spinning.stdout is not None
        spinning.stdout.readline()
        one, other = Activity(), Activity()
        one.active([spinning.pid], 0.0), other.active([stopped], 0.0)
        seconds = 0.0
        while not one.active([spinning.pid], 1.0):  # until it had a tenth of a second, whatever else runs here
            seconds += 0.01
            threading.Event().wait(0.01)
            assert seconds < 60
        assert not other.active([stopped], 1.0)
        one.reset()
        assert not one.active([spinning.pid], 2.0)
        spinning.kill()


def test_queue_time_grows_for_processes_that_share_a_cpu(stopped):
    """Two processes that spin on one CPU: each waits while the other runs."""
    cpu = min(os.sched_getaffinity(0))

    def pinned() -> None:
        os.sched_setaffinity(0, {cpu})

    pair = [subprocess.Popen([sys.executable, "-c", "while True: pass"], preexec_fn=pinned) for _ in range(2)]
    try:
        before = queued_s(stopped)
        for _ in range(6000):
            if all(queued_s(each.pid) > 0.2 for each in pair):
                break
            threading.Event().wait(0.01)
        assert all(queued_s(each.pid) > 0.2 for each in pair)
        assert queued_s(stopped) == before
    finally:
        for each in pair:
            each.kill()
            each.wait()


def test_a_start_that_is_reported_twice_counts_once(listener, stopped):
    """A new monitor asks Supervisor for its programs, and receives the events of their starts afterwards."""
    killed: list[str] = []
    budgets = Budgets(loading_s=1e9, gateway_s=1e-9)
    watchdog = Watchdog(budgets, {}, listener.path, lambda program, why: killed.append(why))
    watchdog.started("gateway", stopped)
    watchdog.check()
    listener.answer()
    watchdog.check()
    watchdog.started("gateway", stopped)
    end_s = time.monotonic() + 100
    while not killed and time.monotonic() < end_s:
        watchdog.check()
        threading.Event().wait(0.01)
    watchdog.ended("gateway")
    assert ["stalled_gateway" in why for why in killed] == [True]


def test_stopped_gateway_is_killed_and_the_next_one_answers_waiting_clients(launched):
    appliance = launched(gateway_s=2.0)
    appliance.started("engine-0")
    first = appliance.started("gateway")
    appliance.ready()
    appliance.until(appliance.pings)
    os.kill(first, signal.SIGSTOP)
    with socket.create_connection(("127.0.0.1", appliance.port), timeout=100) as waiting:
        appliance.started("gateway", times=2)
        waiting.sendall(b"GET /live HTTP/1.0\r\n\r\n")
        assert waiting.recv(100).startswith(b"HTTP/1.0 200")
    appliance.until(lambda: b"it sent no reply" in appliance.out())
    assert len(appliance.pids("engine-0")) == 1
    assert appliance.terminate() == 0


def test_pause_of_all_processes_kills_none(launched):
    """`docker pause` does this. The pause is longer than any budget."""
    appliance = launched(gateway_s=1.0, stalled_s=600.0)
    appliance.started("engine-0")
    appliance.started("gateway")
    appliance.ready()
    appliance.until(appliance.pings)
    every = list(appliance.alive())
    for pid in every:
        os.kill(pid, signal.SIGSTOP)
    resumes_s = time.monotonic() + 4.0
    appliance.until(lambda: time.monotonic() > resumes_s)
    asked = appliance.pings()
    for pid in every:
        os.kill(pid, signal.SIGCONT)
    appliance.until(lambda: appliance.pings() > asked + 1)  # the monitor has looked again
    assert len(appliance.pids("gateway")) == 1 and b"hung" not in appliance.out()
    assert appliance.terminate() == 0
