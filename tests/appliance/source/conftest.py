"""Starts the servers of source_servers.py."""

import sys
import threading
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from source_servers import Files, handler


@pytest.fixture
def server() -> Iterator[Callable[[], Files]]:
    """Starts servers; each is stopped at the end."""
    started: list[tuple[ThreadingHTTPServer, Files]] = []

    def start() -> Files:
        state = Files()
        http = ThreadingHTTPServer(("127.0.0.1", 0), handler(state))
        http.daemon_threads = True
        state.url = f"http://127.0.0.1:{http.server_address[1]}"
        threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        started.append((http, state))
        return state

    yield start
    for http, state in started:
        state.released.set()
        http.shutdown()
        http.server_close()


@pytest.fixture
def checkpoint_files() -> dict[str, bytes]:
    """The demo checkpoint, file by file."""
    folder = Path(__file__).resolve().parents[3] / "manifests" / "demo"
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}
