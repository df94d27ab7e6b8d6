"""POST /generative_scoring: probabilities of labels as the next token of each of several items."""

import asyncio
import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from appliance.server.chat.label_scores import plan_label_scores, probabilities
from appliance.server.errors.api import Unavailable
from appliance.server.http.body import json_body, read_body
from appliance.server.http.choices import Source
from appliance.server.http.disconnect import until_disconnect
from appliance.server.http.pipeline import as_json, log_request, receive, route
from appliance.server.http.reply import Usage
from appliance.server.http.service import DRAIN_RETRY_AFTER_S, Service, service_of
from appliance.server.schema.label_scores import LabelScoresRequest
from engine.api.messages import Timing

router = APIRouter()


async def _read(service: Service, stream: Source, count: int) -> tuple[list[tuple[float, ...]], list[Timing]]:
    """Return the log probabilities of the labels for each prompt, and the timings."""
    found: dict[int, tuple[float, ...]] = {}
    timings: list[Timing] = []
    async with stream:
        try:
            async for index, delta in stream.deltas():
                for scored in delta.logprobs:
                    found[index] = scored.top_logprobs
                timings += [] if delta.timing is None else [delta.timing]
        finally:
            service.metrics.request_done(count, 1)
    if len(found) != count:  # ended without a token: the service is stopping
        raise Unavailable("The service is shutting down; repeat the request.", DRAIN_RETRY_AFTER_S)
    return [found[index] for index in range(count)], timings


async def create_label_scores(service: Service, request: Request, body: LabelScoresRequest) -> Response:
    call = receive(service, request, body.model, "generative_scoring")
    log_request(call, body, {"query", "items"})
    plan = await asyncio.to_thread(plan_label_scores, body, call.context)
    stream = route(call, plan.submits)
    logprobs, timings = await until_disconnect(request, _read(service, stream, len(plan.submits)))
    usage = Usage(sum(prompt.tokens for prompt in plan.prompts), service.config.endpoints.compat == "openai")
    usage.completion = len(plan.prompts)
    usage.cached = sum(timing.cached_tokens for timing in timings)
    usage.written = sum(timing.written_tokens for timing in timings)
    data: list[dict[str, Any]] = []
    for index, values in enumerate(logprobs):
        shares = probabilities(values, among_labels=body.apply_softmax)
        data.append({"index": index, "object": "score", "score": shares[0], "label_scores": shares})
    reply = {
        "id": f"generative-scoring-{call.identity.request_id}",
        "object": "list",
        "created": int(time.time()),
        "model": service.model_name(body.model),
        "data": data,
        "usage": usage.final(),
    }
    return as_json(call, reply)


@router.post(
    "/generative_scoring",
    openapi_extra=json_body(LabelScoresRequest),
    summary="Score labels by their probability as the next token",
)
async def generative_scoring(request: Request) -> Response:
    return await create_label_scores(service_of(request), request, await read_body(request, LabelScoresRequest))
