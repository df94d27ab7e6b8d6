"""Tests of services that worker processes share. A lock belongs to an open file, so threads can replace processes."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

from tests.e2e.conftest import ROOT
from tests.e2e.shared import OtherProcess, shared


def test_workers_share_a_service_and_the_first_one_stops_it_after_the_last_use(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    folders, events = SimpleNamespace(getbasetemp=lambda: tmp_path), []

    @contextmanager
    def start():
        events.append("start")
        yield {"url": "http://a"}
        events.append("stop")

    first, second = (shared("one", start, folders) for _ in range(2))
    assert first.__enter__() == second.__enter__() == {"url": "http://a"}
    leaving = threading.Thread(target=first.__exit__, args=(None, None, None))
    leaving.start()
    leaving.join(0.2)
    assert leaving.is_alive() and events == ["start"]
    second.__exit__(None, None, None)
    leaving.join(100)
    assert events == ["start", "stop"]
    with shared("one", start, folders):
        assert events == ["start", "stop", "start"]
    assert events == ["start", "stop"] * 2


CRASHED = """
import os
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from tests.e2e.shared import shared

@contextmanager
def start():
    yield {"url": "http://crashed"}

with shared("one", start, SimpleNamespace(getbasetemp=lambda: Path(FOLDER))):
    os._exit(3)
"""


def test_the_service_of_a_worker_that_crashed_is_not_used(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    script = CRASHED.replace("FOLDER", repr(str(tmp_path)))
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False).returncode == 3

    @contextmanager
    def start():
        yield {"url": "http://new"}

    folders = SimpleNamespace(getbasetemp=lambda: tmp_path)
    with shared("one", start, folders) as found, shared("one", start, folders) as again:
        assert found == again == {"url": "http://new"}


LAUNCHING = """
import os
from pathlib import Path
from types import SimpleNamespace
import tests.e2e.conftest as conftest

conftest.SLIPWAY = ["sh", "-c", "sleep 200"]
with conftest.launcher(SimpleNamespace(mktemp=lambda name: Path(FOLDER))) as launch:
    print(launch().process.pid, flush=True)
    os._exit(3)
"""


def test_an_appliance_ends_with_the_worker_that_started_it(tmp_path, eventually):
    script = LAUNCHING.replace("FOLDER", repr(str(tmp_path)))
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 3
    eventually("the appliance ends", lambda: OtherProcess(int(done.stdout)).poll() == -1)


def test_a_process_whose_exit_code_is_not_read_does_not_run():
    with subprocess.Popen(["sleep", "100"]) as process:
        assert OtherProcess(process.pid).poll() is None
        process.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + 100
        while OtherProcess(process.pid).poll() is None and time.monotonic() < deadline:
            os.sched_yield()
        assert OtherProcess(process.pid).poll() == -1
