"""Control socket of a running gateway: a Unix socket in the run directory, with one JSON line in each direction.

`Take` applies the changes that are possible in place. `Ping` comes from the restart monitor: a gateway that does not
answer it is hung. `Hamper` slows down the journal's disk, for `slipway chaos`, if the manifest allows that. `Swap`
announces that an engine is stopped on purpose: its requests wait until the next engine serves, and no request is blamed
for its exit. `Swapped` is answered when the next engine serves.
"""

import asyncio

import msgspec

from appliance.config.gateway import GatewayConfig

MOST_BYTES = 2**20


class Take(msgspec.Struct, frozen=True, tag="take"):
    config: GatewayConfig


class Swap(msgspec.Struct, frozen=True, tag="swap"):
    engine: int


class Swapped(msgspec.Struct, frozen=True, tag="swapped"):
    engine: int


class Hamper(msgspec.Struct, frozen=True, tag="hamper"):
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


Message = Take | Swap | Swapped | Hamper | Ping


async def ask(path: str, message: Message, timeout_s: float) -> Answer:
    """Send one message to a gateway and return its reply. Raise OSError (also if the gateway ends before it replies) or
    TimeoutError."""
    writer = None
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_unix_connection(path, limit=MOST_BYTES)
            writer.write(msgspec.json.encode(message) + b"\n")
            line = await reader.readline()
    finally:
        if writer is not None:
            writer.close()
    try:
        return msgspec.json.decode(line, type=Answer)
    except msgspec.DecodeError as error:
        raise ConnectionResetError(f"{path}: the gateway ended before it answered") from error
