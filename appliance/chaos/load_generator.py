"""Load generator: too many clients, or clients that are too slow."""

import asyncio
import contextlib
import socket
from collections import Counter

import httpx

from appliance.chaos.fault_injector import FaultInjector, FaultNotInjected

TOKENS = 2000
BUFFER_BYTES = 2048
READ_S = 1.0


async def fill_queue(injector: FaultInjector) -> None:
    """Send requests with the maximum number of choices until the queue is full.

    They are cancelled when the fault ends.
    """
    limits = injector.target.gateway.limits
    most = limits.max_waiting + sum(engine.scheduling.max_running for engine in injector.target.engines)
    body = {"prompt": "Fill", "n": limits.max_choices, "max_tokens": TOKENS, "stream": True, "ignore_eos": True}
    body["max_tokens"] = max(1, min(TOKENS, injector.target.gateway.max_context // 2))
    statuses: Counter[int] = Counter()
    refused: list[httpx.Headers] = []

    async def one() -> None:
        with contextlib.suppress(httpx.HTTPError):
            async with injector.client.stream("POST", "/v1/completions", json=body) as answer:
                statuses[answer.status_code] += 1
                if answer.status_code == 503:
                    refused.append(answer.headers)
                else:
                    async for _ in answer.aiter_raw():
                        pass

    tasks = []
    for _ in range(2 + most // limits.max_choices):
        tasks.append(asyncio.create_task(one()))
        await asyncio.sleep(0.02)
    injector.exit_stack.push_async_callback(_cancel, tasks)
    for _ in range(round(injector.duration_s / 0.1)):
        if refused:
            break
        await asyncio.sleep(0.1)
        tasks.append(asyncio.create_task(one()))
    if not refused:
        raise FaultNotInjected(
            f"{len(tasks)} requests of {limits.max_choices} choices did not fill the queue; statuses: {dict(statuses)}"
        )
    waits = all(headers.get("Retry-After", "").isdigit() for headers in refused)
    injector.observations["refusal"] = "503 with Retry-After" if waits else "503 without Retry-After"


async def read_slowly(injector: FaultInjector, clients: int = 16) -> None:
    """Open streams whose readers read one byte per second through the smallest buffer."""
    address = injector.target.address
    tokens = max(1, min(TOKENS, injector.target.gateway.max_context // 2))
    body = f'{{"prompt": "Slow", "max_tokens": {tokens}, "stream": true, "ignore_eos": true}}'
    key = f"Authorization: Bearer {injector.target.key}\r\n" if injector.target.key else ""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.host}\r\nContent-Type: application/json\r\n{key}"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()
    loop = asyncio.get_running_loop()

    async def one() -> None:
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        with socket.socket(family) as line:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
            line.setblocking(False)
            with contextlib.suppress(OSError):
                await loop.sock_connect(line, (address.host, address.port))
                await loop.sock_sendall(line, request)
                while await loop.sock_recv(line, 1):
                    await asyncio.sleep(READ_S)

    injector.exit_stack.push_async_callback(_cancel, [asyncio.create_task(one()) for _ in range(clients)])


async def _cancel(tasks: "list[asyncio.Task[None]]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
