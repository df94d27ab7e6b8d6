"""`python -m benchmarks.stub_engine SOCKET RATE VOCAB`: an engine without a model, to measure the gateway alone.

Each open request gets RATE tokens per second in steps, as from a real engine, with ids from 300 to VOCAB.
"""

import argparse
import asyncio
import time
from contextlib import suppress
from pathlib import Path

from engine.api.frames import FrameReader, encode, to_engine
from engine.api.messages import Abort, Delta, Output, Ready, Stats, Submit, Timing, ToEngine

CONTEXT = 1 << 20


class StubEngine:
    """Serve one gateway at a time. Token n of a reply depends on n alone."""

    def __init__(self, rate: float, vocab: int) -> None:
        self._rate = rate
        self._vocab = vocab
        self._open: dict[str, tuple[Submit, int]] = {}
        self._step = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ready = Ready(
            max_context=CONTEXT, kv_blocks=1 << 16, block_tokens=16, kv_tokens=1 << 20, weight_bytes=0, kv_bytes=0,
            seconds={}, pid=0,
        )  # fmt: skip
        writer.write(encode([ready, Stats(kv_blocks_total=1 << 16)]))
        stepping = asyncio.create_task(self._run(writer))
        frames = FrameReader()
        with suppress(ConnectionError):  # a gateway that is killed
            while data := await reader.read(1 << 18):
                for body in frames.feed(data):
                    self._hear(to_engine(body))
        stepping.cancel()
        self._open.clear()

    def _hear(self, messages: list[ToEngine]) -> None:
        for message in messages:
            if isinstance(message, Submit):
                self._open[message.id] = (message, 0)
            elif isinstance(message, Abort):
                for name in message.ids:
                    self._open.pop(name, None)

    async def _run(self, writer: asyncio.StreamWriter) -> None:
        next_s = time.monotonic()
        while True:
            next_s += 1 / self._rate
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))
            if self._open:
                self._step += 1
                writer.write(encode([self._output(), self._stats()]))

    def _output(self) -> Output:
        deltas = []
        for name, (submit, given) in list(self._open.items()):
            token = 300 + (given * 7919 + len(name)) % (self._vocab - 300)
            ended = given + 1 >= submit.max_tokens
            timing = Timing(1.0, 1.0, 1.0, 1.0) if given == 0 or ended else None
            deltas.append(Delta(name, (token,), finish="length" if ended else None, timing=timing))
            if ended:
                del self._open[name]
            else:
                self._open[name] = (submit, given + 1)
        return Output(self._step, tuple(deltas))

    def _stats(self) -> Stats:
        running = len(self._open)
        return Stats(step=self._step, running=running, kv_blocks_total=1 << 16, step_tokens=(running,))


async def main(socket: Path, rate: float, vocab: int) -> None:
    engine = StubEngine(rate, vocab)
    server = await asyncio.start_unix_server(engine.serve, str(socket))
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stub_engine", description=__doc__)
    parser.add_argument("socket", type=Path, help="Unix socket to listen on")
    parser.add_argument("rate", type=float, help="tokens per second of each request")
    parser.add_argument("vocab", type=int, help="token ids are below this number")
    options = parser.parse_args()
    asyncio.run(main(options.socket, options.rate, options.vocab))
