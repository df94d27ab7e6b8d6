"""The server side of the control socket of a running gateway (appliance/runtime/gateway_control.py)."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from appliance.config.gateway import decode
from appliance.runtime.gateway_control import (
    MAX_MESSAGE_BYTES,
    Answer,
    ApplyConfig,
    AwaitReplacement,
    BeginReplacement,
    Message,
    ThrottleJournal,
)
from appliance.server.http.service import Service
from appliance.server.live import apply
from engine.api.errors import EngineError

log = logging.getLogger(__name__)

POLL_S = 0.02


@asynccontextmanager
async def controlled(service: Service) -> AsyncIterator[None]:
    """Answer requests on the service's control socket, if one is configured."""
    path = service.config.control
    if not path:
        yield
        return

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, ValueError, msgspec.DecodeError):
            message: Message = decode(await reader.readline(), Message)
            writer.write(msgspec.json.encode(await handle(service, message)) + b"\n")
            await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(answer, path, limit=MAX_MESSAGE_BYTES)
    try:
        yield
    finally:
        server.close()


async def handle(service: Service, message: Message) -> Answer:
    router, keys = service.router, len(service.keys)
    match message:
        case ApplyConfig(config=new):
            try:
                keys = await apply(service, new)
            except EngineError as error:
                return Answer(error=str(error))
            log.info("reloaded: manifest %s", new.manifest_sha256[:12])
        case BeginReplacement(engine=index):
            router.expect_end(index)
        case ThrottleJournal(pause_s=pause_s, for_s=for_s):
            if service.config.lifecycle.chaos != "allowed":
                return Answer(error="fault injection is disabled; lifecycle.chaos in the manifest enables it")
            for reply_store in (service.reply_store, service.shelved):
                if reply_store is not None:
                    reply_store.throttle(pause_s, for_s)
            log.warning("chaos: each write of the journal takes %g s longer for %g s", pause_s, for_s)
        case AwaitReplacement(engine=index):
            while not router.has_swapped(index):
                await asyncio.sleep(POLL_S)
    return Answer(keys=keys, start_s=tuple(max(engine.start_s, engine.gap_s) for engine in router.engines))
