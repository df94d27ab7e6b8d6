"""Control socket of a running gateway: a Unix socket in the run directory, with one JSON line in each direction.

`ApplyConfig` applies the changes that are possible in place. `Ping` comes from the restart monitor: a gateway that does
not answer it is hung. `ThrottleJournal` delays the journal's writes, for `slipway chaos`, if the manifest allows that.
`BeginReplacement` announces that an engine is stopped on purpose: its requests wait until the next engine serves, and
its exit is attributed to no request. `AwaitReplacement` is answered when the next engine serves.
"""

import asyncio

import msgspec

from appliance.config.gateway import GatewayConfig, encode

MAX_MESSAGE_BYTES = 2**20


class ApplyConfig(msgspec.Struct, frozen=True, tag="apply_config"):
    config: GatewayConfig


class BeginReplacement(msgspec.Struct, frozen=True, tag="begin_replacement"):
    engine: int


class AwaitReplacement(msgspec.Struct, frozen=True, tag="await_replacement"):
    engine: int


class ThrottleJournal(msgspec.Struct, frozen=True, tag="throttle_journal"):
    """Delay each write of the journal by `pause_s` for the next `for_s` seconds. The delay ends without a further
    message."""

    pause_s: float
    for_s: float


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Check that the event loop runs; changes nothing."""


class Answer(msgspec.Struct, frozen=True):
    """Reply of the gateway."""

    error: str = ""  # why nothing was changed; empty if it was
    keys: int = 0  # number of accepted API keys
    start_s: tuple[float, ...] = ()  # duration of each engine's last start, in seconds


Message = ApplyConfig | BeginReplacement | AwaitReplacement | ThrottleJournal | Ping


async def send_message(path: str, message: Message, timeout_s: float) -> Answer:
    """Send one message to a gateway and return its reply. Raise TimeoutError, or OSError (also if the
    gateway exits before it replies)."""
    writer = None
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_unix_connection(path, limit=MAX_MESSAGE_BYTES)
            writer.write(encode(message) + b"\n")
            line = await reader.readline()
    finally:
        if writer is not None:
            writer.close()
    try:
        return msgspec.json.decode(line, type=Answer)
    except msgspec.DecodeError as error:
        raise ConnectionResetError(f"{path}: the gateway exited before it answered") from error
