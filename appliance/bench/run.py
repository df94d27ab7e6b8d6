"""Running a workload against one endpoint or several.

Open loop: sessions start at times that do not depend on replies. Closed loop: a fixed number of clients, and each
starts its next session after its last one. With several endpoints every round runs the same workload against each of
them, in alternating order, so that a change of the machine's speed affects all of them.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import httpx

from appliance.bench.arrivals import Arrivals, start_times
from appliance.bench.client import Endpoint, Outcome, send
from appliance.bench.workload import Message, Session, count_requests, words

_SAMPLE_TOKENS = 1000  # length of the text with which the tokens of a word are measured

Item = TypeVar("Item")
Progress = Callable[[str], None]
RunSession = Callable[[Session], Awaitable[None]]


@dataclass(frozen=True)
class Loop:
    """How sessions start: with `arrivals` in an open loop, else by `concurrency` clients in a closed loop."""

    concurrency: int
    """Maximum number of sessions at the same time; 0 is no limit, in an open loop only."""
    arrivals: Arrivals | None = None


@dataclass(frozen=True)
class Measured:
    """Outcomes of one workload on one endpoint, in the order of their ends."""

    outcomes: list[Outcome]
    seconds: float
    """Duration from the start of the first session to the end of the last one."""


class EndpointError(Exception):
    """Raised if an endpoint does not answer before the run. The message names its URL."""


def make_client(url: str, api_key: str | None, timeout_s: float) -> httpx.AsyncClient:
    """Return a client without a limit of connections. `timeout_s` limits each pause of a reply."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=timeout_s, limits=limits)


async def first_model(client: httpx.AsyncClient) -> str:
    """Return the first name that the endpoint lists. Raises EndpointError."""
    try:
        reply = await client.get("/v1/models")
        reply.raise_for_status()
        return str(reply.json()["data"][0]["id"])
    except httpx.HTTPError as error:
        raise EndpointError(f"{client.base_url}: {type(error).__name__}: {error}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise EndpointError(f"{client.base_url}/v1/models is not a list of models; use --model") from error


async def tokens_per_word(client: httpx.AsyncClient, model: str) -> float | None:
    """Return the mean number of tokens of an invented word, by the route /tokenize, or None if the
    endpoint lacks it."""
    sample = words(random.Random(0), _SAMPLE_TOKENS)
    try:
        reply = await client.post("/tokenize", json={"model": model, "prompt": sample})
        counted = reply.json()["count"] if reply.status_code == 200 else 0
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return None
    return counted / len(sample.split()) if isinstance(counted, int) and counted > 0 else None


@dataclass(frozen=True)
class Round:
    """The work of one round: the same for each endpoint."""

    number: int
    sessions: Sequence[Session]
    seed: int
    """Seed of the arrivals."""


async def run_round(
    client: httpx.AsyncClient, endpoint: Endpoint, work: Round, loop: Loop, report: Progress
) -> Measured:
    """Run all sessions and return their outcomes. Failed requests do not end the run."""
    sessions = work.sessions
    outcomes, total, began_s = list[Outcome](), count_requests(sessions), time.perf_counter()

    async def run_session(session: Session) -> None:
        async for outcome in _turns(client, endpoint, work.number, session, began_s):
            outcomes.append(outcome)
            report(f"{endpoint.url}: {len(outcomes)} of {total} requests")

    if loop.arrivals is None:
        await run_closed(run_session, sessions, loop.concurrency)
    else:
        starts = [began_s + time_s for time_s in start_times(len(sessions), loop.arrivals, work.seed)]
        await _open(run_session, sessions, starts, loop.concurrency)
    return Measured(outcomes, time.perf_counter() - began_s)


async def _turns(
    client: httpx.AsyncClient, endpoint: Endpoint, round_number: int, session: Session, began_s: float
) -> AsyncIterator[Outcome]:
    """Run the turns of a session, each with all earlier messages and replies. A failed turn ends the session; the
    turns after it count as failed, too."""
    messages, failed = list[Message](), False
    for number, turn in enumerate(session.turns):
        if failed:
            yield Outcome(
                round_number, session.index, number, time.perf_counter() - began_s, error="an earlier turn failed"
            )
            continue
        await asyncio.sleep(turn.pause_s)
        messages += turn.messages
        outcome = Outcome(round_number, session.index, number, time.perf_counter() - began_s)
        await send(client, endpoint, messages, turn, outcome)
        messages.append({"role": "assistant", "content": outcome.text})
        failed = bool(outcome.error)
        yield outcome


async def run_closed(run: Callable[[Item], Awaitable[None]], work: Sequence[Item], clients: int) -> None:
    """Run each item of the work, in order, with this number of clients. Each starts its next item after its last."""
    pending = iter(work)

    async def one_client() -> None:
        for item in pending:
            await run(item)

    await asyncio.gather(*(one_client() for _ in range(clients)))


async def _open(run_session: RunSession, sessions: Sequence[Session], starts: Sequence[float], limit: int) -> None:
    free = asyncio.Semaphore(limit or len(sessions) or 1)

    async def start(session: Session, at_s: float) -> None:
        await asyncio.sleep(at_s - time.perf_counter())
        async with free:
            await run_session(session)

    await asyncio.gather(*map(start, sessions, starts))
