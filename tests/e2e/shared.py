"""One demo service for all worker processes of a test run."""

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.conftest import Appliance


@dataclass(frozen=True)
class OtherProcess:
    """A process that another worker has started."""

    pid: int

    def poll(self) -> int | None:
        """Return None while it runs, else -1: only its parent can read its exit code."""
        return None if os.path.exists(f"/proc/{self.pid}") else -1


@contextmanager
def shared(folder: Path, started: Callable[[], AbstractContextManager[Appliance]]) -> Iterator[Appliance]:
    """Yield a ready service. The worker that needs it first starts it, and stops it once no other worker uses it.

    folder: the same one for all workers of a run. The kernel releases the locks of a worker that crashes.
    """
    described = folder / "service.json"
    with (folder / "service.used").open("a") as used, ExitStack() as stack:
        with (folder / "service.starting").open("a") as starting:
            fcntl.flock(starting, fcntl.LOCK_EX)
            fcntl.flock(used, fcntl.LOCK_SH)
            if owned := not described.exists():
                appliance = stack.enter_context(started())
                described.write_text(json.dumps(describe(appliance)))
            else:
                appliance = restored(json.loads(described.read_text()))
                stack.callback(appliance.client.close)
        yield appliance
        if owned:
            fcntl.flock(used, fcntl.LOCK_EX)  # waits for the others; the next one that needs a service starts it
            described.unlink()
            stack.close()


def describe(appliance: Appliance) -> dict[str, int | str]:
    log = str(appliance.log)
    return {"pid": appliance.process.pid, "url": appliance.url, "log": log, "marker": appliance.marker}


def restored(found: dict) -> Appliance:
    return Appliance(OtherProcess(found["pid"]), found["url"], Path(found["log"]), found["marker"])  # type: ignore[arg-type]
