"""One service for all worker processes of a test run."""

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest

from tests.e2e.conftest import Appliance

Description = dict[str, Any]
"""Facts about a running service, as JSON values."""


SHARED = pytest.StashKey[ExitStack]()
"""The services that this worker uses."""


def use_shared(
    config: pytest.Config,
    name: str,
    start: Callable[[], AbstractContextManager[Description]],
    folders: pytest.TempPathFactory,
) -> Description:
    """Return the description of a service that all workers share, until `leave_shared`."""
    return config.stash.setdefault(SHARED, ExitStack()).enter_context(shared(name, start, folders))


def leave_shared(config: pytest.Config) -> None:
    """Leave the shared services after the last test of this worker. The teardown of a test could not wait for the other
    workers, because its time is limited."""
    if SHARED in config.stash:
        config.stash[SHARED].close()


@contextmanager
def shared(
    name: str, start: Callable[[], AbstractContextManager[Description]], folders: pytest.TempPathFactory
) -> Iterator[Description]:
    """Yield the description of a service that is ready. The worker that needs it first starts it, and stops it once no
    other worker uses it. The kernel releases the locks of a worker that crashes, and its service ends with it
    (`launcher`), so the next worker starts another one."""
    folder = folders.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # of all workers
    described = folder / f"{name}.json"
    with (
        (folder / f"{name}.used").open("a") as used,
        (folder / f"{name}.owned").open("a") as owner,
        ExitStack() as stack,
    ):
        with (folder / f"{name}.starting").open("a") as starting:
            fcntl.flock(starting, fcntl.LOCK_EX)
            fcntl.flock(used, fcntl.LOCK_SH)
            if owned := _is_free(owner):
                described.write_text(json.dumps(stack.enter_context(start())))
        yield json.loads(described.read_text())
        if owned:
            fcntl.flock(used, fcntl.LOCK_EX)  # waits for the others; a later worker starts another service


def _is_free(lock: IO[str]) -> bool:
    """Take a lock until the file is closed, unless it is taken."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@dataclass(frozen=True)
class OtherProcess:
    """A process that another worker may have started."""

    pid: int

    def poll(self) -> int | None:
        """Return None while it runs, else -1: only its parent can read its exit code."""
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return -1
        return -1 if state == "Z" else None  # a worker in a test has not read the exit code yet


def describe(appliance: Appliance) -> Description:
    log = str(appliance.log)
    return {"pid": appliance.process.pid, "url": appliance.url, "log": log, "marker": appliance.marker}


def described_appliance(found: Description) -> Appliance:
    return Appliance(OtherProcess(found["pid"]), found["url"], Path(found["log"]), found["marker"])  # type: ignore[arg-type]
