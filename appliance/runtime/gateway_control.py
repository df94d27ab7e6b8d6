"""The control socket of a running gateway: a Unix socket in the run directory, one JSON line each way.

`Take` applies what can be changed in place. `Ping` comes from the restart monitor: a gateway that does not answer it
hangs. `Hamper` makes the disk of the journal slow, for `slipway chaos`, if the manifest allows that. `Swap` announces
that an engine is stopped on purpose: its requests are held as long as that takes, and no request is blamed for its end.
`Swapped` is answered when the next engine serves.
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
    """Each write of the journal takes `pause_s` longer, for so many seconds: it passes, whoever asked for it."""

    pause_s: float
    for_s: float


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Changes nothing; is answered as long as the event loop runs."""


class Answer(msgspec.Struct, frozen=True):
    """`error`: why nothing was changed; empty if it was. `keys`: API keys that are let in. `start_s`: what each
    engine's last start took, in seconds."""

    error: str = ""
    keys: int = 0
    start_s: tuple[float, ...] = ()


Message = Take | Swap | Swapped | Hamper | Ping


async def ask(path: str, message: Message, timeout_s: float) -> Answer:
    """Sends one message to a gateway. Raises OSError, also for a gateway that ends before it answers, TimeoutError."""
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
