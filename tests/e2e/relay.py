"""`python relay.py PORT … --port OWN`: forward TCP connections from OWN to PORT of this machine until SIGTERM.

It replaces a service in tests that need a port, an exit at SIGTERM and the replies of a real service.
"""

import asyncio
import contextlib
import signal
import sys


async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await source.read(65536):
            target.write(data)
            await target.drain()
    target.close()


async def main(port: int, own: int) -> None:
    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, ours = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(copy(reader, ours), copy(theirs, writer))

    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    server = await asyncio.start_server(forward, "127.0.0.1", own)
    await ended.wait()
    server.close()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[-1])))
