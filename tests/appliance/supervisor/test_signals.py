"""Signals to the launcher as process 1 of a PID namespace, from its start on, and ignored signals."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.appliance.supervisor.conftest import free_port, marked
from tests.tiers import thinned

ROOT = Path(__file__).resolve().parents[3]
DEMO = ROOT / "manifests" / "demo.yaml"
NAMESPACE = ["unshare", "--pid", "--fork", "--mount-proc"]


class Contained:
    """`slipway` as process 1, started as `command`."""

    def __init__(self, folder: Path, command: list[str], path: str = os.environ["PATH"]) -> None:
        namespace = [*NAMESPACE, *([] if os.geteuid() == 0 else ["--map-root-user"])]
        if subprocess.run([*namespace, "true"], capture_output=True, check=False).returncode:
            pytest.skip("a PID namespace is not permitted here")
        self.temporary = Path(tempfile.mkdtemp(prefix="run-", dir="/tmp"))  # short, as it holds sockets
        self.log = folder / "log"
        self.mark = f"LC_TEST_MARK={folder.name}-{os.getpid()}"
        name, value = self.mark.split("=")
        environment = {**os.environ, name: value, "TMPDIR": str(self.temporary), "PATH": path}
        environment.pop("XDG_RUNTIME_DIR", None)
        with self.log.open("wb") as out:
            self.process = subprocess.Popen([*namespace, *command], stdout=out, stderr=out, env=environment, cwd=ROOT)

    def first(self) -> int:
        """Return the host's id of process 1; 0 if there is none yet."""
        found = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(found[0]) if found else 0

    def handles(self) -> bool:
        """Return whether process 1 handles SIGTERM. `unshare` blocks it for a moment around its fork."""
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{self.first()}/status").read_text().splitlines()
            return any(int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1 for line in lines if "SigCgt" in line)
        return False

    def maps(self, word: str) -> bool:
        with contextlib.suppress(OSError):
            return word in Path(f"/proc/{self.first()}/maps").read_text()
        return False

    def said(self, word: str) -> bool:
        return word in self.log.read_text()

    def until(self, condition: Callable[[], object]) -> None:
        for _ in range(60_000):
            if condition():
                return
            assert self.process.poll() is None, self.log.read_text()
            signal.sigtimedwait([], 0.002)
        raise AssertionError(self.log.read_text())


@pytest.fixture
def contained(tmp_path: Path) -> Iterator[Callable[..., Contained]]:
    made: list[Contained] = []

    def start(command: list[str], **more: str) -> Contained:
        made.append(Contained(tmp_path, command, **more))
        return made[-1]

    yield start
    for each in made:
        for pid in marked(each.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        each.process.wait(100)
        shutil.rmtree(each.temporary)


def serve() -> list[str]:
    words = ["-m", "appliance", "serve", str(DEMO), "--host", "127.0.0.1", "--port", str(free_port())]
    return [sys.executable, *words]


# Moments at which SIGTERM arrives; each one is observable from outside of the process.
MOMENTS: dict[str, Callable[[Contained], object]] = {
    "handled": lambda contained: contained.handles(),
    "importing": lambda contained: contained.maps("_pydantic_core"),
    "launching": lambda contained: list(contained.temporary.glob("slipway-*")),
    "supervised": lambda contained: contained.said("starting demo"),
    "up": lambda contained: contained.said("up on"),
}


@pytest.mark.parametrize("moment", thinned(MOMENTS, ["handled", "importing", "supervised"]))
def test_sigterm_ends_process_1_at_any_moment_of_its_start(contained, moment):
    appliance = contained(serve())
    appliance.until(lambda: MOMENTS[moment](appliance))
    os.kill(appliance.first(), signal.SIGTERM)
    assert appliance.process.wait(100) == 0, appliance.log.read_text()
    assert list(appliance.temporary.iterdir()) == []


EXIT_AT_IMPORT = """
import signal, sys
from appliance.cli.entry import main
class Finder:
    def find_spec(self, name, *more):
        if name.partition(".")[0] in ("pydantic", "pydantic_core", "yaml", "torch"):
            sys.exit("default" if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL else "handled")
sys.meta_path.insert(0, Finder())
main()
"""


def test_signals_are_handled_before_anything_heavy_is_imported():
    command = [sys.executable, "-c", EXIT_AT_IMPORT, "serve", str(DEMO)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)
    assert done.stderr == "handled\n"


SHELL_HELD = """#!/bin/sh
case "$*" in *\\ true) touch {reached}; read line < {release} ;; esac
exec {env} "$@"
"""
PYTHON_HELD = """#!{python}
import os, pathlib, sys
pathlib.Path("{reached}").touch()
pathlib.Path("{release}").read_text()
os.execv(sys.executable, [sys.executable, "-m", "appliance", *sys.argv[1:]])
"""


@pytest.mark.parametrize(("tool", "script"), [("env", SHELL_HELD), ("slipway", PYTHON_HELD)])
def test_sigterm_is_not_lost_while_the_entrypoint_starts_python(contained, tmp_path, tool, script):
    """The shell has a handler. The program that replaces it blocks the signal, so the signal waits for Python's
    handlers."""
    if "block-signal" not in subprocess.run(["env", "--help"], capture_output=True, text=True, check=False).stdout:
        pytest.skip("env of this system cannot block signals")
    tools, reached, release = tmp_path / "bin", tmp_path / "reached", tmp_path / "release"
    tools.mkdir()
    os.mkfifo(release)
    (tools / tool).write_text(
        script.format(reached=reached, release=release, env=shutil.which("env"), python=sys.executable)
    )
    (tools / tool).chmod(0o755)
    command = [str(ROOT / "entrypoint.sh"), str(DEMO), "--host", "127.0.0.1", "--port", str(free_port())]
    appliance = contained(command, path=f"{tools}:{os.environ['PATH']}")
    appliance.until(reached.exists)
    os.kill(appliance.first(), signal.SIGTERM)
    release.write_text("go on\n")
    assert appliance.process.wait(100) == 0, appliance.log.read_text()
    assert list(appliance.temporary.iterdir()) == []


def test_sigterm_ends_other_commands_by_default():
    with socket.create_server(("127.0.0.1", 0)) as service:
        url = f"http://127.0.0.1:{service.getsockname()[1]}"
        with subprocess.Popen([sys.executable, "-m", "appliance", "healthcheck", url], cwd=ROOT) as process:
            service.settimeout(100)
            with service.accept()[0]:  # it waits for an answer now
                process.send_signal(signal.SIGTERM)
                assert process.wait(100) == -signal.SIGTERM


STRAY = (
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGALRM,
    signal.SIGVTALRM,
    signal.SIGPROF,
    signal.SIGIO,
    signal.SIGRTMIN,
)


def test_unused_signals_are_ignored(launched):
    appliance = launched()
    appliance.started("engine-0")
    appliance.started("gateway")
    for number in STRAY:
        appliance.process.send_signal(number)
        name = number.name.encode()
        appliance.until(lambda name=name: name + b" is ignored" in appliance.out() or appliance.process.poll())
    assert appliance.process.poll() is None
    assert appliance.terminate() == 0
    assert len(appliance.pids("engine-0")) == len(appliance.pids("gateway")) == 1
