"""Starts the servers of source_servers.py."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from source_servers import Files, serving


@pytest.fixture
def server() -> Iterator[Callable[[], Files]]:
    """Starts servers; each is stopped at the end."""
    with ExitStack() as started:
        yield lambda: started.enter_context(serving())


@pytest.fixture
def checkpoint_files() -> dict[str, bytes]:
    """The demo checkpoint, file by file."""
    folder = Path(__file__).resolve().parents[3] / "manifests" / "demo"
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}
