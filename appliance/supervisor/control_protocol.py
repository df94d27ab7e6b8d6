"""Control socket of the launcher: `slipway reload` connects to a Unix socket in the run directory. SIGHUP also triggers
a reload, without the socket."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from appliance.supervisor.console import Console
from appliance.supervisor.reload import Reloader

SOCKET = "launcher.sock"


class Order(msgspec.Struct, frozen=True):
    """Request of `slipway reload`, one JSON line."""

    restart: bool = False


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the reply to `slipway reload`. The last line has the exit code."""

    text: str = ""
    exit: int | None = None


@asynccontextmanager
async def reloadable(reloader: Reloader, directory: Path, console: Console) -> AsyncIterator[Callable[[], None]]:
    """Serve reload requests; yield the handler for SIGHUP. The console shows the output of both."""
    tasks: set[asyncio.Task[int]] = set()

    def tell(text: str) -> None:
        for line in text.splitlines():
            console.say("reload", line)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def say(text: str) -> None:
            tell(text)
            writer.write(msgspec.json.encode(Line(text)) + b"\n")

        with contextlib.suppress(OSError, ValueError, msgspec.DecodeError):
            order = msgspec.json.decode(await reader.readline(), type=Order)
            code = await reloader.reload(restart=order.restart, say=say)
            writer.write(msgspec.json.encode(Line(exit=code)) + b"\n")
            await writer.drain()
        writer.close()

    def hung_up() -> None:
        task = asyncio.get_running_loop().create_task(reloader.reload(restart=False, say=tell))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_unix_server(answer, directory / SOCKET)
    try:
        yield hung_up
    finally:
        server.close()
        for task in tasks:
            task.cancel()
