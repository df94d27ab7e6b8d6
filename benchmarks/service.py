"""A service of our own to measure, started as an operator starts it, and ended with whoever started it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from appliance.supervisor import rundir

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "manifests" / "demo.yaml"
PATIENCE_S = 300.0


@dataclass(frozen=True)
class Running:
    """`launcher` is the process of `slipway serve`, `directory` its run directory."""

    url: str
    launcher: int
    directory: Path


@contextmanager
def serving(*settings: str, manifest: Path = DEMO, log: Path | None = None) -> Iterator[Running]:
    """`slipway serve` with these KEY=VALUE on a free port of this host, ready; ended afterwards, also by a SIGTERM to
    this process. `log` gets what it prints. Raises RuntimeError where it ends by itself."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "appliance", "serve", str(manifest), "--host", "127.0.0.1", "--port", str(port)]
    for setting in settings:
        command += ["--set", setting]
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with contextlib.ExitStack() as opened:
        opened.callback(signal.signal, signal.SIGTERM, before)
        out = opened.enter_context(open(log or os.devnull, "wb"))
        appliance = opened.enter_context(subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out))
        opened.callback(appliance.terminate)
        url = f"http://127.0.0.1:{port}"
        wait_ready(url, appliance)
        yield Running(url, appliance.pid, run_directory(appliance.pid))


def run_directory(launcher: int) -> Path:
    """Raises LookupError."""
    for directory, address in rundir.directories(os.environ):
        if address.pid == launcher:
            return directory
    raise LookupError(f"process {launcher} has no run directory")


def wait_ready(url: str, appliance: "subprocess.Popen[bytes]") -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        if appliance.poll() is not None:
            raise RuntimeError(f"{url}: `slipway serve` ended with code {appliance.returncode}")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/ready").status_code == 200:
                return
        time.sleep(0.1)
    raise TimeoutError(f"{url}/ready: not 200 within {PATIENCE_S:.0f} s")
