"""Control socket of the launcher: `slipway reload` connects to a Unix socket in the run directory. SIGHUP also triggers
a reload, without the socket."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from appliance.supervisor.console import Console

if TYPE_CHECKING:
    from appliance.supervisor.reload import Reloader

SOCKET = "launcher.sock"


class ReloadRequest(msgspec.Struct, frozen=True):
    """Request of `slipway reload`, one JSON line."""

    restart: bool = False


class ReloadOutput(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the reply to `slipway reload`. The last line has the exit code."""

    text: str = ""
    exit: int | None = None


@asynccontextmanager
async def serve_reloads(reloader: "Reloader", directory: Path, console: Console) -> AsyncIterator[Callable[[], None]]:
    """Serve reload requests; yield the handler for SIGHUP. The console shows the output of both."""
    tasks: set[asyncio.Task[int]] = set()

    def print_lines(text: str) -> None:
        for line in text.splitlines():
            console.message("reload", line)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def report(text: str) -> None:
            print_lines(text)
            writer.write(msgspec.json.encode(ReloadOutput(text)) + b"\n")

        with contextlib.suppress(OSError, ValueError, msgspec.DecodeError):
            request = msgspec.json.decode(await reader.readline(), type=ReloadRequest)
            code = await reloader.reload(restart=request.restart, report=report)
            writer.write(msgspec.json.encode(ReloadOutput(exit=code)) + b"\n")
            await writer.drain()
        writer.close()

    def on_sighup() -> None:
        task = asyncio.get_running_loop().create_task(reloader.reload(restart=False, report=print_lines))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_unix_server(answer, directory / SOCKET)
    try:
        yield on_sighup
    finally:
        server.close()
        for task in tasks:
            task.cancel()
