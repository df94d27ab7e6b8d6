"""Tests of services that worker processes share. A lock belongs to an open file, so threads can replace processes."""

import threading
from contextlib import contextmanager
from types import SimpleNamespace

from tests.e2e.shared import shared


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
