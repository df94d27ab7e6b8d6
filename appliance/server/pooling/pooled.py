"""Shared parts of all pooling routes: running the sequences, usage, and the head of the reply."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from pydantic import BaseModel
from starlette.requests import Request

from appliance.server.errors.api import ApiError, EngineFailed, Unavailable
from appliance.server.http.choices import ChoiceStream
from appliance.server.http.disconnect import until_disconnect
from appliance.server.http.pipeline import Call, log_request, receive, route
from appliance.server.http.reply import Usage
from appliance.server.http.service import DRAIN_RETRY_AFTER_S, Service
from appliance.server.pooling.plan import PoolPlan
from engine.api.errors import RequestError
from engine.api.messages import Pooled, Timing

PlanT = TypeVar("PlanT", bound=PoolPlan)
TEXTS = {"input", "messages", "query", "documents", "queries", "items", "data_1", "data_2", "text_1", "text_2"}
TEXTS |= {"texts", "inputs", "images", "documents", "tools"}


@dataclass(frozen=True)
class Outcome(Generic[PlanT]):
    """Result of a pooling request: vectors in the order of its sequences, usage and identification."""

    plan: PlanT
    results: tuple[Pooled, ...]
    usage: Usage
    request_id: str
    created: int
    adapter: str = ""

    def head(self, prefix: str, service: Service, kind: str = "list") -> dict[str, Any]:
        model = service.reply_name(self.adapter)
        return {"id": f"{prefix}-{self.request_id}", "object": kind, "created": self.created, "model": model}

    def mapped(self, change: Callable[[Pooled], Pooled]) -> "Outcome[PlanT]":
        return replace(self, results=tuple(map(change, self.results)))

    def usage_fields(self) -> dict[str, Any]:
        """Return token counts. Details are null in profiles without them."""
        return {"prompt_tokens_details": None, **self.usage.final()}


def receive_pooling(service: Service, request: Request, body: BaseModel, kind: str) -> Call:
    """Parse the headers of a pooling request, and log it without its texts. `kind` names the route in the log."""
    call = receive(service, request, getattr(body, "model", None), kind)
    log_request(call, body, TEXTS)
    return call


async def pool(call: Call, body: BaseModel, plan: PlanT) -> Outcome[PlanT]:
    """Route the sequences of a pooling request and collect their vectors.

    A client that disconnects cancels all of them. Errors of a sequence name the index of its input if there are
    several.
    """
    stream = route(call, plan.submits)
    created = int(time.time())
    name = getattr(body, "request_id", None) or call.identity.request_id
    results, timings = await until_disconnect(call.request, _gathered(stream, len(plan.submits)))
    usage = Usage(
        plan.tokens,
        call.service.config.endpoints.compat == "openai",
        cached=sum(timing.cached_tokens for timing in timings),
        written=sum(timing.written_tokens for timing in timings),
    )
    adapter = call.context.adapter
    if call.subject.span is not None:
        call.subject.span.update(
            {"gen_ai.response.model": call.service.reply_name(adapter), "gen_ai.usage.input_tokens": plan.tokens}
        )
    return Outcome(plan, plan.joined(results), usage, name, created, adapter)


async def _gathered(stream: ChoiceStream, count: int) -> tuple[tuple[Pooled, ...], list[Timing]]:
    """Return the vectors of each sequence in order, and the timings."""
    results: dict[int, Pooled] = {}
    timings: list[Timing] = []
    async with stream:
        try:
            async for index, delta in stream.deltas():
                if delta.finish == "abort":
                    raise Unavailable("The service is shutting down. Repeat the request later.", DRAIN_RETRY_AFTER_S)
                if delta.pooled is not None:
                    results[index] = delta.pooled
                    timings += [delta.timing] if delta.timing else []
        except (RequestError, EngineFailed) as error:
            raise _placed(error, stream.failed, count) from error
    if len(results) < count:
        raise EngineFailed
    return tuple(results[index] for index in range(count)), timings


def _placed(error: RequestError | EngineFailed, index: int | None, count: int) -> Exception:
    """Prefix an error with the index of its input."""
    if index is None or count == 1:
        return error
    if isinstance(error, ApiError):
        return EngineFailed(f"input[{index}]: {error.message}")
    return RequestError(f"input[{index}]: {error}", error.param)


def numbered(kind: str, field: str, values: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the `data` of a reply: one object per input."""
    return [{"index": index, "object": kind, field: value} for index, value in enumerate(values)]
