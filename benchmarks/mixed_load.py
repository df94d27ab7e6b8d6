"""Load of good and bad clients for `benchmarks.soak`."""

import asyncio
import contextlib
import itertools
import random
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from appliance.chaos.client import Reply, send
from benchmarks.fault_injection import chat, completion, mix

TOKENS = 100
LONG = 400
SLOW_READERS = 4
SLOW_BYTES = 64  # per read
SLOW_S = 0.5  # between two reads
BREAKERS = 2
FEW = 5
Request = tuple[str, bytes, dict[str, str]]


@dataclass
class Tally:
    """Counts of requests.

    answers: replies to malformed requests by status. failed, differing, misjudged (malformed requests without a 4xx
    status): request and reply of each.
    """

    requests: int = 0
    aborts: int = 0
    slow_streams: int = 0
    malformed: int = 0
    broken_connections: int = 0
    answers: dict[str, int] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    misjudged: list[str] = field(default_factory=list)

    def wrong(self, aborts: int) -> list[str]:
        """Return descriptions of all failures."""
        found = [f"{len(self.failed)} requests failed: {self.failed[:FEW]}"] if self.failed else []
        if self.differing:
            found.append(f"{len(self.differing)} replies differ: {self.differing[:FEW]}")
        if self.misjudged:
            found.append(f"{len(self.misjudged)} malformed requests got a wrong status: {self.misjudged[:FEW]}")
        if self.aborts < aborts:
            found.append(f"only {self.aborts} of {aborts} requests were aborted")
        return found


def malformed(max_body: int) -> list[Request]:
    """Return requests that must get a 4xx status: path, body, headers."""
    text = {"Content-Type": "application/json"}
    chat_path, path = "/v1/chat/completions", "/v1/completions"
    bodies = [
        b"", b"{", b"[]", b"null", b'"text"', b"{}", b"\xff\xfe\x00", b"{'prompt': 'x'}", b'{"prompt": NaN}',
        b'{"prompt": 7}', b'{"prompt": "x", "max_tokens": -1}', b'{"prompt": "x", "max_tokens": 1e99}',
        b'{"prompt": "x", "temperature": "hot"}', b'{"prompt": "x", "n": 100000}', b'{"prompt": "x", "top_p": 9}',
        b'{"prompt": "x", "logprobs": 4000}', b'{"prompt": [[-1]]}', b'{"prompt": [99999999]}',
        b'{"prompt": "x", "stop": [1, 2]}', b'{"prompt": "x", "model": "nobody"}',
        b'{"prompt": "' + b"x y " * 30_000 + b'"}',
        b'{"prompt": ' + b"[" * 5_000 + b"]" * 5_000 + b"}",
    ]  # fmt: skip
    chats = [
        b'{"messages": []}', b'{"messages": "hello"}', b'{"messages": [{"role": 7, "content": "x"}]}',
        b'{"messages": [{"role": "user"}], "response_format": {"type": "json_schema", "json_schema": {"schema": 7}}}',
        b'{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]}',
    ]  # fmt: skip
    found: list[Request] = [(path, body, text) for body in bodies] + [(chat_path, body, text) for body in chats]
    found.append((path, b'{"prompt": "' + b"x" * (2 * max_body) + b'"}', text))
    found.append((path, b'{"prompt": "x"}', {**text, "X-data-parallel-rank": "77"}))
    found.append((path, b'{"prompt": "x"}', {**text, "Last-Event-ID": "3"}))
    found.append(("/v1/nowhere", b"{}", text))
    return found


BREAKS = (
    b"",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{\"prompt\": \"",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a TLS handshake
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 3000,
    b"\x00" * 4000,
)  # fmt: skip


class MixedLoad:
    def __init__(
        self, url: str, client: httpx.AsyncClient, tally: Tally, *, streams: int, seed: int, max_body: int
    ) -> None:
        self._address = (urlsplit(url).hostname or "", urlsplit(url).port or 80)
        self._client = client
        self._tally = tally
        self._streams = streams
        self._rng = random.Random(seed)
        self._asks = mix(TOKENS)
        self._malformed = malformed(max_body)
        self._expected: list[Reply] = []
        self._numbers = itertools.count()

    async def record_expected(self) -> None:
        """Record the replies to good requests, sent one after another."""
        self._expected = [await send(self._client, *each) for each in self._asks]
        assert not any(reply.error for reply in self._expected), "the service does not answer"

    async def run(self, seconds: float, aborts: float) -> None:
        """Run all clients for `seconds`, then wait for their open requests."""
        loop = asyncio.get_running_loop()
        over = loop.time() + seconds
        pause_s = seconds / max(1.0, aborts)

        async def on(one: Callable[[], Coroutine[Any, Any, None]], every_s: float = 0.0) -> None:
            while loop.time() < over:
                began_s = loop.time()
                await one()
                await asyncio.sleep(max(0.0, min(every_s - (loop.time() - began_s), over - loop.time())))

        async def abort_all() -> None:
            """Start aborted requests at a fixed rate, independent of their durations."""
            leaving: set[asyncio.Task[None]] = set()
            began_s = loop.time()
            for number in range(round(aborts)):
                await asyncio.sleep(max(0.0, began_s + number * pause_s - loop.time()))
                leaving.add(asyncio.create_task(self._abort()))
                leaving = {task for task in leaving if not task.done()}
            await asyncio.gather(*leaving)

        await asyncio.gather(
            *(on(self._good) for _ in range(self._streams)),
            *(on(lambda: self._slow(over)) for _ in range(SLOW_READERS)),
            *(on(self._break, 0.5) for _ in range(BREAKERS)),
            on(self._bad, 0.1),
            abort_all(),
        )

    async def _good(self) -> None:
        number = next(self._numbers) % len(self._asks)
        reply = await send(self._client, *self._asks[number])
        self._tally.requests += 1
        if reply.error:
            self._tally.failed.append(f"{self._asks[number]}: {reply.error}"[:500])
        elif reply.choices != self._expected[number].choices:
            self._tally.differing.append(f"{self._asks[number]}: {reply.choices}"[:500])

    async def _abort(self) -> None:
        """Disconnect at a random token, before the first one, or during prefill."""
        long = {"max_tokens": LONG, "stream": True, "n": self._rng.choice((1, 1, 3))}
        make = self._rng.choice((chat, completion))
        path, body = make("word " * self._rng.choice((1, 30, 300)), **long)
        most, leave_s = self._rng.choice((0, 1, self._rng.randrange(100))), self._rng.uniform(0.0, 3.0)
        with contextlib.suppress(httpx.HTTPError, TimeoutError):
            async with asyncio.timeout(leave_s), self._client.stream("POST", path, json=body) as answer:
                if answer.status_code != 200:
                    self._tally.failed.append(f"{path}: {answer.status_code}")
                lines = 0
                async for _ in answer.aiter_lines():
                    lines += 1
                    if lines > 2 * most:
                        break
        self._tally.aborts += 1

    async def _slow(self, over: float) -> None:
        """Read a few bytes at long intervals with the smallest buffer, and disconnect before the end."""
        loop = asyncio.get_running_loop()
        body = f'{{"prompt": "Slow", "max_tokens": {LONG}, "stream": true, "ignore_eos": true}}'
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        request = f"{head}Content-Type: application/json\r\n\r\n{body}".encode()
        until = min(over, loop.time() + self._rng.uniform(2.0, 20.0))
        with socket.socket() as line, contextlib.suppress(OSError):
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            line.setblocking(False)
            await loop.sock_connect(line, self._address)
            await loop.sock_sendall(line, request)
            while loop.time() < until and await loop.sock_recv(line, SLOW_BYTES):
                await asyncio.sleep(SLOW_S)
        self._tally.slow_streams += 1

    async def _bad(self) -> None:
        path, body, headers = self._rng.choice(self._malformed)
        self._tally.malformed += 1
        try:
            status = (await self._client.post(path, content=body, headers=headers)).status_code
        except httpx.TransportError as error:  # a reply to an oversized body may arrive before the body is sent
            name = type(error).__name__
            self._tally.answers[name] = self._tally.answers.get(name, 0) + 1
            return
        self._tally.answers[str(status)] = self._tally.answers.get(str(status), 0) + 1
        if not 400 <= status < 500:
            self._tally.misjudged.append(f"{path} {body[:80]!r} {headers}: {status}")

    async def _break(self) -> None:
        loop = asyncio.get_running_loop()
        with socket.socket() as line, contextlib.suppress(OSError, TimeoutError):
            line.setblocking(False)
            await loop.sock_connect(line, self._address)
            await loop.sock_sendall(line, self._rng.choice(BREAKS))
            if self._rng.random() < 0.5:
                async with asyncio.timeout(0.3):
                    await loop.sock_recv(line, 1000)
        self._tally.broken_connections += 1
