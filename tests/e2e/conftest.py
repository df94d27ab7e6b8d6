"""A real appliance for the folder: `slipway serve manifests/demo.yaml` on a free port, as an operator starts it."""

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from appliance.cli.main import main
from appliance.runtime.processes import exit_with_parent
from appliance.supervisor.programs import programs

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "manifests" / "demo.yaml"
SLIPWAY = [sys.executable, "-m", "appliance"]
PATIENCE_S = 120.0  # against hangs only; nothing is timed


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(what: str, check: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
    """Polls `check` until it is true. Raises AssertionError naming `what` when patience ends."""
    deadline = time.monotonic() + patience_s
    while not check():
        assert time.monotonic() < deadline, f"waited {patience_s:.0f} s in vain: {what}"
        time.sleep(0.1)  # a shorter pause takes CPU time from the service


@dataclass
class Appliance:
    """A running `slipway serve`: its process, where it listens, and everything it printed."""

    process: subprocess.Popen[str]
    url: str
    log: Path
    marker: str
    client: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        # Without verification: loading the certificates of all authorities takes CPU time, and ours is not among them.
        self.client = httpx.Client(base_url=self.url, timeout=60.0, verify=False)

    def status(self, path: str) -> int:
        try:
            return self.client.get(path).status_code
        except httpx.TransportError:
            return 0

    def wait_ready(self) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, f"the appliance ended with {self.process.returncode}:\n{self.output()}"
            return self.status("/ready") == 200

        until(f"/ready of {self.url}", ready)

    def output(self) -> str:
        return self.log.read_text()

    def pids(self) -> dict[str, int]:
        """Process ids of the tree by program (gateway, engine-0, …)."""
        return {name: pids[0] for name, pids in programs(self.process.pid).items()}

    def processes(self) -> dict[int, str]:
        """Every living process that carries this appliance's marker in its environment, with its command line."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                environ, line = (entry / "environ").read_bytes(), (entry / "cmdline").read_bytes()
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue  # ended meanwhile
            if self.marker.encode() in environ and state != "Z":
                found[int(entry.name)] = line.replace(b"\0", b" ").decode()
        return found

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples of this name whose labels contain the given ones."""
        total = 0.0
        for line in self.client.get("/metrics").text.splitlines():
            match = re.fullmatch(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)", line)
            if (
                match
                and match[1] == name
                and all(f'{key}="{value}"' in (match[2] or "") for key, value in labels.items())
            ):
                total += float(match[3])
        return total

    def stop(self) -> int:
        """SIGTERM, then the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=PATIENCE_S)


def _prepare() -> None:
    """Under nohup, an appliance would inherit that SIGHUP is ignored. It ends with a test process that crashes."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    exit_with_parent()


NUMBERS = itertools.count()


@contextmanager
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Appliance]]:
    """Give a function that starts appliances, and stop those that still run at the end."""
    started: list[Appliance] = []

    def start(
        manifest: Path = DEMO,
        *arguments: str,
        scheme: str = "http",
        threads: str = "1",
        **environment: str,
    ) -> Appliance:
        """threads: of each engine. A second one takes as much CPU time as the first, because it waits actively in the
        short operations of a tiny model. "" leaves their number to the manifest."""
        if threads:
            environment["SLIPWAY__HARDWARE__THREADS"] = threads
        port, marker = free_port(), f"slipway-test-{os.getpid()}-{next(NUMBERS)}"
        log = tmp_path_factory.mktemp("appliance") / "log"
        command = [*SLIPWAY, "serve", str(manifest), "--host", "127.0.0.1", "--port", str(port), *arguments]
        with log.open("w") as out:
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, text=True,
                env={**os.environ, "LC_TEST_MARKER": marker, **environment}, preexec_fn=_prepare,
            )  # fmt: skip
        started.append(Appliance(process, f"{scheme}://127.0.0.1:{port}", log, marker))
        return started[-1]

    try:
        yield start
    finally:
        running = [appliance.process for appliance in started if appliance.process.poll() is None]
        for appliance in started:
            appliance.client.close()
        for process in running:
            process.terminate()
        for process in running:
            try:
                process.wait(timeout=PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Appliance]]:
    """Return a function that starts appliances. They are stopped at the end of the test file, because an idle appliance
    takes about 2 % of a CPU and 350 MB."""
    with launcher(tmp_path_factory) as start:
        yield start


@pytest.fixture(scope="session", autouse=True)
def use_shared_renderers(shared_renderers: None) -> None:
    """Share the processes for templates among commands that run in this process."""


@pytest.fixture
def rejected(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Run `slipway serve` in this process on a manifest (text or file) for which it starts no program; return the exit
    code and the output. A process imports for a second of CPU time."""

    def run(manifest: str | Path, *arguments: str) -> tuple[int, str]:
        path = manifest if isinstance(manifest, Path) else tmp_path / "manifest.yaml"
        if isinstance(manifest, str):
            path.write_text(manifest)
        capfd.readouterr()
        code = main(["serve", str(path), "--host", "127.0.0.1", "--port", str(free_port()), *arguments])
        return code, "".join(capfd.readouterr())

    return run


@pytest.fixture
def refused(tmp_path: Path) -> Callable[[str | Path], tuple[int, str]]:
    """Run `slipway serve` on a manifest (text or file) that it must reject; return the exit code and the output."""

    def run(manifest: str | Path, *arguments: str) -> tuple[int, str]:
        if isinstance(manifest, str):
            path = tmp_path / "manifest.yaml"
            path.write_text(manifest)
        else:
            path = manifest
        command = [*SLIPWAY, "serve", str(path), "--host", "127.0.0.1", "--port", str(free_port()), *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
        return done.returncode, done.stdout + done.stderr

    return run


@pytest.fixture
def records() -> Callable[[str], list[dict]]:
    """The JSON records of an event stream, without its terminator."""

    def read(text: str) -> list[dict]:
        lines = [line for line in text.splitlines() if line.startswith("data: ")]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line[6:]) for line in lines[:-1]]

    return read


@pytest.fixture
def eventually() -> Callable[[str, Callable[[], bool]], None]:
    """Polls a condition until it is true; fails, naming it, when patience ends."""
    return until
