"""Readiness requests to a gateway, from the launcher during a start and from `slipway healthcheck`."""

import asyncio
import contextlib
import math
import ssl

import msgspec

DOWNLOADING = "downloading"  # the phase before the engine itself starts


class EngineState(msgspec.Struct, frozen=True):
    name: str = "engine"
    phase: str = ""
    progress: float | None = None
    detail: str = ""


class Readiness(msgspec.Struct, frozen=True):
    """Body of a /ready reply. `progress` is between 0 and 1."""

    phase: str = ""
    progress: float | None = None
    engines: tuple[EngineState, ...] = ()

    def text(self) -> str:
        """Return one line about what is still missing."""
        states = self.engines or (EngineState(phase=self.phase, progress=self.progress),)
        return ", ".join(_state(state) for state in states if state.phase != "ready" or len(states) == 1)

    @property
    def downloads(self) -> bool:
        return any(state.phase == DOWNLOADING for state in self.engines)

    def rounded(self) -> "Readiness":
        """Return a copy with progress rounded down to tenths."""
        engines = tuple(
            msgspec.structs.replace(state, progress=_tenths(state.progress), detail="") for state in self.engines
        )
        return msgspec.structs.replace(self, progress=_tenths(self.progress), engines=engines)


def _tenths(progress: float | None) -> float | None:
    return None if progress is None else math.floor(progress * 10) / 10


def _state(state: EngineState) -> str:
    percent = "" if state.progress is None else f" {state.progress:.0%}".replace("%", " %")
    detail = f", {state.detail}" if state.detail else ""
    return f"{state.name} {state.phase or 'starting'}{percent}{detail}"


def _unverified() -> ssl.SSLContext:
    """Return a TLS context without verification. A probe sends no secrets, and must also work with an expired
    certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


async def get(host: str, port: int, path: str, timeout_s: float, *, tls: bool = False) -> tuple[int, bytes] | None:
    """Return status and body of a GET, or None if there is no reply in time. It uses HTTP/1.0, so that the reply ends
    with the stream."""
    writer = None
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port, ssl=_unverified() if tls else None)
            writer.write(f"GET {path} HTTP/1.0\r\nHost: {host}:{port}\r\n\r\n".encode())
            reply = await reader.read()
    except (OSError, TimeoutError):
        return None
    finally:
        if writer is not None:
            writer.close()
    head, _, body = reply.partition(b"\r\n\r\n")
    with contextlib.suppress(IndexError, ValueError):
        return int(head.split(None, 2)[1]), body
    return None


def readiness(body: bytes) -> Readiness:
    """Parse the body of a /ready reply. Return an empty value if the body has another format."""
    try:
        return msgspec.json.decode(body, type=Readiness)
    except msgspec.DecodeError:
        return Readiness()
