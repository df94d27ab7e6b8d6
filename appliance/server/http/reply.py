"""Shared parts of chat and text completions: merged choice streams, usage, logprobs and reply headers."""

import asyncio
import re
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import orjson
from msgspec.structs import replace
from starlette.requests import Request

from appliance.observability.log import Outcome, Subject
from appliance.observability.metrics import now
from appliance.server.chat.deadlines import Deadlines
from appliance.server.chat.prompt import Served
from appliance.server.chat.stream import Choice
from appliance.server.errors.api import BadRequest, DeadlineExceeded, EngineFailed, error_object, is_unexpected
from appliance.server.http.body import MAX_INPUT
from appliance.server.http.service import Service
from appliance.server.http.sse import ChunkEncoder
from appliance.server.reply_store.records import Identity
from appliance.server.routing.router import Placement
from appliance.server.schema.common import GenerationRequest
from engine.api.errors import RequestError
from engine.api.messages import Delta, Logprob
from engine.text import TokenText

CUT = ("error", "deadline")  # finish reasons of a choice that fail its request
LEAST_LOGPROB = -9999.0  # JSON cannot represent -inf
_ONE_MODEL = "this server does not load LoRA adapters."
_SAGEMAKER = {
    "X-Amzn-SageMaker-Session-Id": "this server does not store sessions; send the whole conversation in each request.",
    "X-Amzn-SageMaker-Adapter-Identifier": _ONE_MODEL,
    "X-Amzn-SageMaker-Adapter-Alias": _ONE_MODEL,
}
_INTEGER = re.compile(r"-?[0-9]{1,100}")


class Running(Protocol):
    """Interface of a running sequence, implemented by the router's Generation."""

    async def __aenter__(self) -> Any: ...
    async def __aexit__(self, *error: Any) -> None: ...
    def __aiter__(self) -> AsyncIterator[Delta]: ...
    def stop(self) -> None: ...
    def suspend(self) -> None: ...


class Source(Protocol):
    """Source of a reply's deltas, as (choice, delta) in order of arrival.

    `event_id` names the position after the last delta; it is empty if streams cannot resume.
    """

    seen: bool  # the client already has the output of the last delta
    counts: bool  # this reader counts as a request of its own in metrics and logs
    skips_opening: bool
    skips_usage: bool

    async def __aenter__(self) -> Any: ...
    async def __aexit__(self, *error: Any) -> None: ...
    def deltas(self) -> AsyncIterator[tuple[int, Delta]]: ...
    def stop(self, index: int) -> None: ...
    def event_id(self, *, usage: bool = False) -> str: ...


class ChoiceStream:
    """Merged stream of the deltas of all choices, in order of arrival. Exiting it ends the choices that still run.

    `indexes` are the choices of the generations; the default is to count from 0. An exception of one choice fails the
    request, and `failed` is the index of that choice.
    """

    seen = skips_opening = skips_usage = False
    counts = True
    failed: int | None = None

    def __init__(self, generations: Sequence[Running], indexes: Sequence[int] | None = None) -> None:
        self._generations = dict(zip(range(len(generations)) if indexes is None else indexes, generations, strict=True))
        self._queue: asyncio.Queue[tuple[int, Delta | None | Exception]] = asyncio.Queue()
        self._pumps: dict[int, asyncio.Task[None]] = {}
        self._open = set(self._generations)

    async def __aenter__(self) -> "ChoiceStream":
        if len(self._generations) > 1:
            self._pumps = {at: asyncio.create_task(self._pump(at, each)) for at, each in self._generations.items()}
        return self

    async def __aexit__(self, *error: Any) -> None:
        for pump in self._pumps.values():
            pump.cancel()
        await asyncio.gather(*self._pumps.values(), return_exceptions=True)
        for generation in self._generations.values():
            await generation.__aexit__(*error)

    def event_id(self, *, usage: bool = False) -> str:
        return ""

    def suspend(self) -> None:
        """Mark the remaining choices as ones that will be resumed, so that their end is not counted now."""
        for generation in self._generations.values():
            generation.suspend()

    async def _pump(self, index: int, generation: Running) -> None:
        try:
            async for delta in generation:
                self._queue.put_nowait((index, delta))
        except Exception as error:  # handed to the reader, who raises it
            self._queue.put_nowait((index, error))
        else:
            self._queue.put_nowait((index, None))

    def stop(self, index: int) -> None:
        """End a choice that met a stop string, so that the engine can release it."""
        self._generations[index].stop()
        if index in self._pumps:
            self._pumps[index].cancel()
        self._open.discard(index)

    def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        return self._one() if len(self._generations) == 1 else self._many()

    def _cut(self, index: int, delta: Delta) -> Iterator[tuple[int, Delta]]:
        """Yield the remaining tokens of a choice that was cut off, then raise the reason."""
        if delta.finish == "error":
            self.failed = index
            raise EngineFailed
        if delta.ids:  # tokens that arrived together with the end, because the reader was slow
            yield index, replace(delta, finish=None)
        raise DeadlineExceeded

    async def _one(self) -> AsyncIterator[tuple[int, Delta]]:
        """Yield the deltas of a single choice, without a queue."""
        ((index, generation),) = self._generations.items()
        async for delta in generation:
            if delta.finish in CUT:
                for part in self._cut(index, delta):
                    yield part
            yield index, delta
            if index not in self._open:
                return

    async def _many(self) -> AsyncIterator[tuple[int, Delta]]:
        while self._open:
            index, delta = await self._queue.get()
            if index not in self._open:
                continue  # it follows a stop string
            if delta is None:
                self._open.discard(index)
            elif isinstance(delta, Exception):
                self.failed = index
                raise delta
            else:
                if delta.finish in CUT:
                    for part in self._cut(index, delta):
                        yield part
                yield index, delta


class CompletionLog:
    """Writes the log line at the end of a generation."""

    def __init__(self, service: Service, subject: Subject, prompt_tokens: int) -> None:
        self._service, self._subject, self._prompt_tokens = service, subject, prompt_tokens
        self._began_s = subject.arrived_s or now()
        self._first_s: float | None = None

    def take(self, delta: Delta) -> None:
        """Record the time of the first token."""
        if self._first_s is None and delta.ids:
            self._first_s = now()

    def log(self, choices: Sequence[Choice]) -> None:
        """Log the end of a generation. Also called while an exception is being handled."""
        error = sys.exc_info()[1]
        unfinished = "cancelled"
        if isinstance(error, Exception):
            unfinished = "deadline" if isinstance(error, DeadlineExceeded) else "error"
        first_s = self._first_s
        outcome = Outcome(
            model=self._service.config.names[0],
            prompt_tokens=self._prompt_tokens,
            completion_tokens=sum(choice.tokens for choice in choices),
            finish_reason=",".join(choice.finish or unfinished for choice in choices),
            ttft_s=None if first_s is None else round(first_s - self._began_s, 4),
            seconds=round(now() - self._began_s, 4),
        )
        self._service.log.completed(self._subject, outcome)


@contextmanager
def count_when_done(source: Source, count: Callable[[], None]) -> Iterator[None]:
    """Count a reply when its reader ends for any reason, if it is a request of its own."""
    try:
        yield
    finally:
        if source.counts:
            count()


@dataclass(frozen=True)
class Header:
    """Fields that are equal in all chunks of a reply."""

    id: str
    object: str
    created: int
    model: str
    fingerprint: str

    def fields(self) -> dict[str, Any]:
        return {"id": self.id, "object": self.object, "created": self.created, "model": self.model}

    def chunk_encoder(self) -> ChunkEncoder:
        """Return an envelope for chunks with one choice each."""
        return ChunkEncoder(self.fields(), "choices")


def header(service: Service, identity: Identity, prefix: str, kind: str, model: str) -> Header:
    fingerprint = service.config.system_fingerprint
    return Header(f"{prefix}-{identity.request_id}", kind, identity.created, model, fingerprint)


def served(service: Service, request: Request, request_id: str) -> Served:
    """Return the context in which a request is parsed.

    Headers can set options for gateways that cannot change bodies.
    """
    _refuse_sagemaker(request)
    priority = _integer(request, "X-Vllm-Priority", "priority")
    return Served(
        service.text,
        service.config,
        request_id,
        request.headers.get("x-cache-salt"),
        None if priority is None else max(-(2**63), min(2**63 - 1, priority)),
        request.state.owner,
        1.0 if request.state.key is None else request.state.key.share,
        Deadlines(
            _integer(request, "X-TTFT-Deadline-Ms", "ttft_deadline_ms"),
            _integer(request, "X-Deadline-Ms", "deadline_ms"),
        ),
        now(),
        request.state.key is None or request.state.key.priority,
    )


def _refuse_sagemaker(request: Request) -> None:
    """Raise BadRequest for a SageMaker header that requests an unsupported feature."""
    for name, reason in _SAGEMAKER.items():
        if request.headers.get(name):
            raise BadRequest(f"{name} is not supported: {reason}", name)


def placement(request: Request) -> Placement:
    """Return the engine placement that the request's headers ask for (RT-06)."""
    rank = _integer(request, "X-data-parallel-rank", "X-data-parallel-rank")
    return Placement(rank, request.headers.get("x-session-id", ""))


def _integer(request: Request, name: str, param: str) -> int | None:
    given = request.headers.get(name)
    if given is None:
        return None
    if not _INTEGER.fullmatch(given):
        raise RequestError(f"{name} must be an integer, got {given[:MAX_INPUT]!r}.", param)
    return int(given)


def load_header(service: Service, request: Request) -> dict[str, str]:
    """Return the `endpoint-load-metrics` header for load balancers that send `endpoint-load-metrics-format` (RT-06).

    The value is an Open Request Cost Aggregation report in TEXT or JSON format. Other formats are ignored.
    """
    wanted = request.headers.get("endpoint-load-metrics-format", "").strip().upper()
    if wanted not in ("TEXT", "JSON"):
        return {}
    load = service.router.load()
    metrics = {"kv_cache_usage_perc": round(load.kv_cache_usage, 6), "num_requests_waiting": load.waiting}
    if wanted == "JSON":
        report = orjson.dumps({"named_metrics": metrics}).decode()
    else:
        report = ", ".join(f"named_metrics.{name}={value}" for name, value in metrics.items())
    return {"endpoint-load-metrics": f"{wanted} {report}"}


@dataclass
class Usage:
    """Token counts of a request so far."""

    prompt: int
    details: bool  # include details; depends on the compat profile
    completion: int = 0
    cached: int = 0  # prompt tokens that were read from the prefix cache
    written: int = 0  # prompt tokens that were written to the prefix cache
    reasoning: int | None = None  # None: the model's reasoning is not parsed

    def plain(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "total_tokens": self.prompt + self.completion,
            "completion_tokens": self.completion,
        }

    def final(self) -> dict[str, Any]:
        fields = self.plain()
        if self.details:
            fields["prompt_tokens_details"] = {"cached_tokens": self.cached, "cache_write_tokens": self.written}
            if self.reasoning is not None:
                fields["completion_tokens_details"] = {"reasoning_tokens": self.reasoning}
        return fields


@dataclass(frozen=True)
class UsageOptions:
    """Selects the chunks of a stream that carry usage."""

    final: bool
    every: bool
    nulls: bool = False
    """Chunks before the final one have `usage: null`, as in the OpenAI service."""


def usage_options(body: GenerationRequest, compat: str) -> UsageOptions:
    options = body.stream_options
    final = bool(options and options.include_usage)
    every = final and bool(options and options.continuous_usage_stats)
    return UsageOptions(final, every, nulls=final and not every and compat == "openai")


def finite(logprob: float) -> float:
    """Clamp a logprob to a value that JSON can represent."""
    return max(LEAST_LOGPROB, logprob)


def token_name(token: int, text: str, as_id: bool) -> str:
    return f"token_id:{token}" if as_id else text


def prompt_logprobs(
    entries: Sequence[Logprob | None] | None, count: int, tokenizer: Any, ids: Sequence[int]
) -> list[dict[str, Any] | None] | None:
    """Return `{id: {logprob, rank, decoded_token}}` per position, the actual token first.

    The first position is null.
    """
    if entries is None:
        return None
    strings = TokenText(tokenizer)
    result: list[dict[str, Any] | None] = []
    for token, entry in zip(ids, entries, strict=True):
        if entry is not None:
            ranked = zip(entry.top_ids, entry.top_logprobs, strict=True)
            top = [(each, value, rank) for rank, (each, value) in enumerate(ranked, 1)]
            kept = top if count < 0 else top[:count]
            own = (entry.token, entry.logprob, entry.rank)
            result.append(
                {
                    str(each): {"logprob": finite(value), "rank": rank, "decoded_token": strings.string(each)}
                    for each, value, rank in [own, *(other for other in kept if other[0] != entry.token)]
                }
            )
        else:
            result.append(None)
        strings.push(token)
    return result


def describe_error(service: Service, request: Request) -> Callable[[Exception], dict[str, Any]]:
    """Return a function that builds the error record of a stream and logs unexpected errors with their traceback."""
    subject = request.state.subject

    def describe(error: Exception) -> dict[str, Any]:
        if is_unexpected(error):
            service.log.unexpected(subject, error)
        return error_object(error, subject.request_id)

    return describe
