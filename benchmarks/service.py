"""Start `slipway serve` for a measurement, and stop it when the measuring process ends."""

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
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Service:
    """`launcher` is the process of `slipway serve`, `directory` its run directory."""

    url: str
    launcher: int
    directory: Path


@contextmanager
def running_service(
    *settings: str, manifest: Path = DEMO, log: Path | None = None, cache: Path | None = None
) -> Iterator[Service]:
    """Start `slipway serve` with these KEY=VALUE settings on a free local port, yield it when ready, then stop it.

    It is also stopped if this process gets a SIGTERM. `log` receives its output, `cache` is the folder of its caches.
    Raise RuntimeError if it exits early.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "appliance", "serve", str(manifest), "--host", "127.0.0.1", "--port", str(port)]
    for setting in settings:
        command += ["--set", setting]
    environ = os.environ if cache is None else {**os.environ, "XDG_CACHE_HOME": str(cache)}
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with contextlib.ExitStack() as opened:
        opened.callback(signal.signal, signal.SIGTERM, before)
        out = opened.enter_context(open(log or os.devnull, "wb"))
        appliance = opened.enter_context(subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out, env=environ))
        opened.callback(appliance.terminate)
        url = f"http://127.0.0.1:{port}"
        wait_ready(url, appliance)
        yield Service(url, appliance.pid, run_directory(appliance.pid))


def run_directory(launcher: int) -> Path:
    """Raises LookupError."""
    for directory, address in rundir.directories(os.environ):
        if address.pid == launcher:
            return directory
    raise LookupError(f"process {launcher} has no run directory")


def wait_ready(url: str, appliance: "subprocess.Popen[bytes]") -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline_s:
        if appliance.poll() is not None:
            raise RuntimeError(f"{url}: `slipway serve` exited with code {appliance.returncode}")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/ready").status_code == 200:
                return
        time.sleep(0.1)
    raise TimeoutError(f"{url}/ready: not 200 within {TIMEOUT_S:.0f} s")
