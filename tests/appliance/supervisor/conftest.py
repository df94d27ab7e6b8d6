"""Launch fakes under the real Supervisor, in separate processes, and find leftover processes and files."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

DEADLINE_S = 120.0


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def marked(mark: str) -> dict[int, str]:
    """Processes with `mark` in their environment, and their command lines; zombies have neither."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if mark.encode() in (entry / "environ").read_bytes():
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


class Appliance:
    """A launcher in a separate process. `directory` collects the traces of the fakes."""

    def __init__(
        self,
        directory: Path,
        environment: dict[str, str] | None = None,
        preexec: Callable[[], None] | None = None,
        **given: object,
    ) -> None:
        directory.mkdir(exist_ok=True)
        self.directory = directory
        self.port = given.setdefault("port", free_port())
        self.mark = f"slipway-test-{uuid.uuid4()}"
        # pytest's own folder has a path that is too long for Unix sockets.
        self.runs = Path(tempfile.mkdtemp(prefix="slipway-runs-"))
        with (directory / "out").open("wb") as out, (directory / "err").open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("driver.py")), str(directory), json.dumps(given)],
                stdout=out,
                stderr=err,
                env={**os.environ, "LC_MARK": self.mark, "XDG_RUNTIME_DIR": str(self.runs), **(environment or {})},
                preexec_fn=preexec,
            )

    def until(self, condition: Callable[[], object]) -> None:
        """Poll; the deadline only ends tests that would otherwise hang."""
        end = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < end, self.output()
            time.sleep(0.05)

    def pids(self, program: str) -> list[int]:
        path = self.directory / f"{program}.pids"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def started(self, program: str, times: int = 1) -> int:
        """Wait until a program was started `times` times. Return its process id."""
        self.until(lambda: len(self.pids(program)) >= times or self.process.poll() is not None)
        assert self.process.poll() is None, self.output()
        return self.pids(program)[times - 1]

    def pings(self) -> int:
        """Requests of the restart monitor that the gateway has answered."""
        path = self.directory / "pings"
        return path.stat().st_size if path.exists() else 0

    def ready(self) -> None:
        (self.directory / "ready").touch()
        self.until(lambda: b"curl" in self.out() or self.process.poll() is not None)

    def out(self) -> bytes:
        return (self.directory / "out").read_bytes()

    def err(self) -> str:
        return (self.directory / "err").read_text()

    def output(self) -> str:
        return self.out().decode() + self.err()

    def reason(self) -> dict[str, object]:
        """The one JSON line on standard error."""
        (line,) = self.err().splitlines()
        return dict(json.loads(line))

    def end(self) -> int:
        return self.process.wait(DEADLINE_S)

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.end()

    def alive(self) -> dict[int, str]:
        return marked(self.mark)


@contextlib.contextmanager
def launching(directory: Path) -> Iterator[Callable[..., Appliance]]:
    """Yield a function that starts appliances of fakes; kill their remaining processes at the end."""
    appliances: list[Appliance] = []

    def start(*, folder: str = "a", environment: dict[str, str] | None = None, **given: object) -> Appliance:
        appliances.append(Appliance(directory / folder, environment, **given))
        return appliances[-1]

    yield start
    for appliance in appliances:
        appliance.process.kill()
        appliance.process.wait()
        shutil.rmtree(appliance.runs)
        for pid in appliance.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Callable[..., Appliance]]:
    """Start an appliance of fakes; kill remaining processes at the end of the test."""
    with launching(tmp_path) as start:
        yield start
