"""`slipway serve` for one measurement: started on a free local port, stopped afterwards."""

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from appliance.config.settings import Given

_POLL_S = 0.1
_STOP_S = 60.0
_LOG_LINES = 3


class ServiceError(Exception):
    """Raised if the service exits, or is not ready in time. The message has the last lines of its log."""


@contextmanager
def running(given: Given, more: Sequence[str], *, within_s: float, log: Path) -> Iterator[str]:
    """Start `slipway serve` with the given manifest and further KEY=VALUE settings, without TLS, and yield its URL when
    it is ready. Raises ServiceError."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-P", "-m", "appliance", "serve", str(given.manifest)]
    command += [word for name in given.overlays for word in ("--overlay", name)]
    options = [f"{one.key}={one.text}" for one in given.options]
    address = ("endpoints.host=127.0.0.1", f"endpoints.port={port}")
    without_tls = ("endpoints.tls.certificate=null", "endpoints.tls.key=null")
    for setting in (*options, *more, *address, *without_tls):
        command += ["--set", setting]
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL) as service:
        try:
            _wait(f"http://127.0.0.1:{port}", service, within_s, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            _stop(service)


def _wait(url: str, service: "subprocess.Popen[bytes]", within_s: float, log: Path) -> None:
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        if service.poll() is not None:
            raise ServiceError(f"`slipway serve` exited with code {service.returncode}: {_last_lines(log)}")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/ready", trust_env=False).status_code == 200:
                return
        time.sleep(_POLL_S)
    raise ServiceError(f"the service was not ready within {within_s:.0f} s: {_last_lines(log)}")


def _stop(service: "subprocess.Popen[bytes]") -> None:
    service.terminate()
    try:
        service.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        service.kill()


def _last_lines(log: Path) -> str:
    return " / ".join(log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-_LOG_LINES:])
