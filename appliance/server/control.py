"""The control socket of a running gateway: a Unix socket in the run directory, one JSON line each way.

`Take` applies what can be changed in place. `Ping` comes from the restart monitor: a gateway that does not answer it
hangs. `Hamper` makes the disk of the journal slow, for `slipway chaos`, if the manifest allows that. `Swap` announces
that an engine is stopped on purpose: its requests are held as long as that takes, and no request is blamed for its end.
`Swapped` is answered when the next engine serves.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from appliance.config.gateway import GatewayConfig
from appliance.server.http.service import Service
from appliance.server.live import take
from engine.api.errors import EngineError

log = logging.getLogger(__name__)

MOST_BYTES = 2**20
POLL_S = 0.02


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


@asynccontextmanager
async def controlled(service: Service) -> AsyncIterator[None]:
    """The service answers on its control socket, if it is given one."""
    path = service.config.control
    if not path:
        yield
        return

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, ValueError, msgspec.DecodeError):
            message = msgspec.json.decode(await reader.readline(), type=Message)
            writer.write(msgspec.json.encode(await handle(service, message)) + b"\n")
            await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(answer, path, limit=MOST_BYTES)
    try:
        yield
    finally:
        server.close()


async def handle(service: Service, message: Message) -> Answer:
    router, keys = service.router, len(service.keys)
    match message:
        case Take(config=wanted):
            try:
                keys = await take(service, wanted)
            except EngineError as error:
                return Answer(error=str(error))
            log.info("reloaded: manifest %s", wanted.manifest_sha256[:12])
        case Swap(engine=index):
            router.expect_end(index)
        case Hamper(pause_s=pause_s, for_s=for_s):
            if not service.config.chaos:
                return Answer(error="lifecycle.chaos of the manifest refuses it")
            for ledger in (service.ledger, service.shelved):
                if ledger is not None:
                    ledger.hamper(pause_s, for_s)
            log.warning("chaos: each write of the journal takes %g s longer for %g s", pause_s, for_s)
        case Swapped(engine=index):
            while not router.has_swapped(index):
                await asyncio.sleep(POLL_S)
    return Answer(keys=keys, start_s=tuple(max(engine.start_s, engine.gap_s) for engine in router.engines))


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
