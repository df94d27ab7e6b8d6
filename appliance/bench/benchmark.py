"""A complete run of `slipway bench`: the options, and the result as plain values."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import httpx

from appliance.bench.client import Endpoint, Outcome
from appliance.bench.run import (
    Loop,
    Measured,
    Progress,
    Round,
    first_model,
    make_client,
    run_round,
    tokens_per_word,
)
from appliance.bench.summary import compare, pooled, summarize
from appliance.bench.workload import (
    Session,
    WorkloadError,
    WorkloadOptions,
    count_requests,
    digest,
    make_workload,
)


@dataclass(frozen=True)
class Options:
    """Options of a run."""

    urls: tuple[str, ...]
    dataset: str
    workload: WorkloadOptions
    loop: Loop
    models: tuple[str, ...] = ()
    """Name of the model for each endpoint; empty: the first name in the list of the endpoint."""
    api: str = "chat"
    rounds: int = 1
    warmup: int = 0
    """Sessions before each round that are not measured."""
    objectives: Mapping[str, float] = field(default_factory=dict)
    """Limits of latencies in seconds, by name."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Fields that are added to each body."""
    api_key: str | None = field(default=None, repr=False)
    timeout_s: float = 600.0


@dataclass(frozen=True)
class Result:
    values: dict[str, Any]
    """The result as JSON values, without single requests."""
    outcomes: dict[str, list[Outcome]]
    """All requests of each endpoint, by its label."""


async def bench(options: Options, report: Progress) -> Result:
    """Run all rounds. Raises EndpointError and WorkloadError before the first request."""
    async with contextlib.AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(make_client(url, options.api_key, options.timeout_s))
            for url in options.urls
        ]
        endpoints = [await _endpoint(options, place, client) for place, client in enumerate(clients)]
        words = await tokens_per_word(clients[0], endpoints[0].model)
        if words is not None:
            options = replace(options, workload=replace(options.workload, tokens_per_word=words))
        workloads = [_workload(options, number) for number in range(options.rounds)]
        started, measured = datetime.now(UTC), [list[Measured]() for _ in endpoints]
        for number, sessions in enumerate(workloads):
            places = range(len(endpoints)) if number % 2 == 0 else reversed(range(len(endpoints)))
            for place in places:
                await _warm_up(clients[place], endpoints[place], options, number)
                work = Round(number, sessions, options.workload.seed + number)
                measured[place].append(await run_round(clients[place], endpoints[place], work, options.loop, report))
    return _result(options, endpoints, workloads, measured, started)


async def _endpoint(options: Options, place: int, client: httpx.AsyncClient) -> Endpoint:
    model = options.models[place] if options.models else await first_model(client)
    api = "transcriptions" if options.dataset.partition(":")[0] == "audio" else options.api
    return Endpoint(options.urls[place], model, api, dict(options.extra))


def _workload(options: Options, number: int) -> list[Session]:
    """Return the workload of a round. Each has its own seed, so generated prompts differ between rounds;
    a file has the same requests in every round if `sessions` covers it."""
    sessions = make_workload(options.dataset, replace(options.workload, seed=options.workload.seed + number))
    if any(turn.audio is not None for session in sessions for turn in session.turns):
        return sessions
    if options.api == "completions" and any(_needs_chat(session) for session in sessions):
        raise WorkloadError(f"--dataset {options.dataset}: its conversations need --api chat")
    return sessions


def _needs_chat(session: Session) -> bool:
    (first, *others) = session.turns
    return bool(others) or len(first.messages) > 1 or not isinstance(first.messages[0].get("content"), str)


async def _warm_up(client: httpx.AsyncClient, endpoint: Endpoint, options: Options, number: int) -> None:
    if options.warmup:
        seed = -1 - number  # no prompt of a round
        dataset = "audio" if endpoint.api == "transcriptions" else "random"
        sessions = make_workload(dataset, replace(options.workload, sessions=options.warmup, seed=seed))
        await run_round(client, endpoint, Round(number, sessions, seed), Loop(options.warmup), lambda _: None)


def _result(
    options: Options,
    endpoints: Sequence[Endpoint],
    workloads: Sequence[Sequence[Session]],
    measured: Sequence[Sequence[Measured]],
    started: datetime,
) -> Result:
    summaries = [[summarize(one, options.objectives) for one in rounds] for rounds in measured]
    labels = [f"{chr(ord('A') + place)}" if len(endpoints) > 1 else "endpoint" for place in range(len(endpoints))]
    turns = [turn for sessions in workloads for session in sessions for turn in session.turns]
    values: dict[str, Any] = {
        "benchmark": "slipway bench",
        "started": started.isoformat(timespec="seconds"),
        "settings": _settings(options),
        "workload": {
            "sessions": sum(map(len, workloads)),
            "requests": sum(map(count_requests, workloads)),
            "max_tokens": sum(turn.max_tokens for turn in turns),
            "digest": [digest(sessions) for sessions in workloads],
        },
        "endpoints": [
            {
                "label": label,
                "url": endpoint.url,
                "model": endpoint.model,
                "summary": summarize(pooled(rounds), options.objectives),
                "rounds": each,
            }
            for label, endpoint, rounds, each in zip(labels, endpoints, measured, summaries, strict=True)
        ],
    }
    if len(endpoints) > 1:
        pairs = zip(labels[1:], summaries[1:], strict=True)
        values["ratios"] = {f"{label} to {labels[0]}": compare(summaries[0], each) for label, each in pairs}
    outcomes = {label: pooled(rounds).outcomes for label, rounds in zip(labels, measured, strict=True)}
    return Result(values, outcomes)


def _settings(options: Options) -> dict[str, Any]:
    """Return the options without the API key, and without endpoints and models, which the result names separately."""
    settings = asdict(options)
    for name in ("urls", "models", "api_key"):
        del settings[name]
    if settings["workload"]["audio_range_s"][1] == float("inf"):
        settings["workload"]["audio_range_s"] = [options.workload.audio_range_s[0], None]
    if options.loop.arrivals is not None and options.loop.arrivals.burstiness == float("inf"):
        settings["loop"]["arrivals"]["burstiness"] = "inf"  # JSON has no infinity
    return settings
