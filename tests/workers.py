"""`pytest --workers N`: collect all tests once, then run test files in N forked processes.

Collecting the tests imports torch, transformers and all test files, which takes 37 s of CPU time. Forked workers share
the imported modules; each worker of pytest-xdist imports them again. Workers take one file after another, in the order
of the collected tests. Each worker has its own session fixtures.

A worker that crashes fails its running test, and the remaining tests of its file do not run.
"""

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import pytest

CRASHED = pytest.StashKey[bool]()
"""Set if a worker crashed."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", default="", metavar="N", help="run test files in N processes, or `auto`")


def number_of_workers(config: pytest.Config) -> int:
    """Return the number of processes, 0 for tests in this process.

    `auto` is one more than there are CPUs: tests that start services wait as long as they compute. Unit tests start
    none.
    """
    given = config.getoption("workers")
    if given != "auto":
        return int(given or 0)
    return len(os.sched_getaffinity(0)) + ("not slow" not in config.option.markexpr)


def by_file(items: list[pytest.Item]) -> list[list[pytest.Item]]:
    """Return the tests of each file, in the order of the first ones."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    return [*files.values()]


@dataclass
class Worker:
    """A forked process. `running`: the test that it has started, with its location."""

    pid: int
    connection: Connection
    running: tuple[str, Any] | None = None
    is_done: bool = False


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> object:
    count = number_of_workers(session.config)
    if not count or session.config.option.collectonly or session.testsfailed:
        return None
    files = by_file(session.items)
    workers: list[Worker] = []
    try:
        for number in range(min(count, len(files))):
            workers.append(forked(session, files, number, workers))
        distribute(session, len(files), workers)
    finally:
        for worker in workers:
            worker.connection.close()
        for worker in workers:
            os.waitpid(worker.pid, 0)
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)
    return True


def forked(session: pytest.Session, files: list[list[pytest.Item]], number: int, others: list[Worker]) -> Worker:
    """Start a worker. In the worker, this function does not return."""
    ours, theirs = Pipe()
    folder = session.config._tmp_path_factory.getbasetemp() / f"worker-{number}"  # type: ignore[attr-defined]
    folder.mkdir(mode=0o700)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        theirs.close()
        return Worker(pid, ours)
    code = 1
    try:
        ours.close()
        for worker in others:  # the master's ends: a worker would not notice that the master is gone
            worker.connection.close()
        serve(session, files, theirs, folder)
        code = 0
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        pass  # the master is gone, or stops
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            session._setupstate.teardown_exact(None)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


# In the worker


def serve(session: pytest.Session, files: list[list[pytest.Item]], connection: Connection, folder: Path) -> None:
    """Run the files that the master names."""
    config = session.config
    config._tmp_path_factory._basetemp = folder  # type: ignore[attr-defined]
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()  # its files belong to all workers
    capture.start_global_capturing()
    capture.suspend_global_capture(in_=True)
    reporter = config.pluginmanager.unregister(name="terminalreporter")
    config.pluginmanager.register(Sender(config, connection, reporter._tw), "terminalreporter")
    tests = named(files, connection)
    item = next(tests, None)
    while item is not None:
        if connection.poll():  # the master has closed the connection
            return
        connection.send(("start", item.nodeid, item.location))
        following = next(tests, None)  # of the next file after the last test of a file, so that session fixtures stay
        config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        item = following
    connection.send(("done",))


def named(files: list[list[pytest.Item]], connection: Connection) -> Iterator[pytest.Item]:
    """Yield the tests of the files that the master names."""
    while True:
        connection.send(("next",))
        if (number := connection.recv()) is None:
            return
        yield from files[number]


class Sender:
    """Takes the place of the reporter: sends reports and warnings to the master. Other plugins write to `_tw`."""

    def __init__(self, config: pytest.Config, connection: Connection, writer: Any) -> None:
        self._config, self._connection, self._tw = config, connection, writer

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._connection.send(("report", data))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._connection.send(("finish", nodeid))

    def pytest_warning_recorded(self, warning_message: Any, nodeid: str) -> None:
        self._connection.send(("warning", f"{nodeid}: {warning_message.message}"))


# In the master


def distribute(session: pytest.Session, count: int, workers: list[Worker]) -> None:
    """Give files to the workers and pass their reports to the plugins of this process."""
    numbers = iter(range(count))
    while open_ones := {worker.connection: worker for worker in workers if not worker.is_done}:
        for connection in wait([*open_ones]):
            worker = open_ones[connection]  # type: ignore[index]
            try:
                message = worker.connection.recv()
            except (EOFError, ConnectionError):
                worker.is_done = True
                crashed(session, worker)
                continue
            if message[0] == "next":
                worker.connection.send(next(numbers, None))
            else:
                receive(session, worker, *message)
        if session.shouldfail or session.shouldstop:
            return


def receive(session: pytest.Session, worker: Worker, kind: str, *values: Any) -> None:
    config = session.config
    match kind, values:
        case "start", (nodeid, location):
            worker.running = (nodeid, location)
            config.hook.pytest_runtest_logstart(nodeid=nodeid, location=location)
        case "report", (data,):
            report = config.hook.pytest_report_from_serializable(config=config, data=data)
            config.hook.pytest_runtest_logreport(report=report)
        case "finish", (nodeid,):
            config.hook.pytest_runtest_logfinish(nodeid=nodeid, location=worker.running and worker.running[1])
            worker.running = None
        case "warning", (text,):
            config.pluginmanager.getplugin("terminalreporter").write_line(f"warning: {text}")
        case "done", ():
            worker.is_done = True


def crashed(session: pytest.Session, worker: Worker) -> None:
    """Fail the test that a worker ran when it crashed."""
    session.config.stash[CRASHED] = True
    nodeid, location = worker.running or ("a worker", ("", 0, "a worker"))
    ended = os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    how = "exit status" if ended.si_code == os.CLD_EXITED else "signal"
    text = f"a worker process crashed while running {nodeid}: {how} {ended.si_status}"
    report = pytest.TestReport(nodeid, location, {}, "failed", text, "call")
    session.config.hook.pytest_runtest_logreport(report=report)
