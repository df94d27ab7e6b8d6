"""POST /generative_scoring: probabilities of labels as the next token of each of several items."""

import asyncio
import time
from typing import Any

import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response

from appliance.server.chat.label_scores import plan_label_scores, probabilities
from appliance.server.chat.prompt import Plan
from appliance.server.errors.api import Unavailable
from appliance.server.http.body import json_body, read_body
from appliance.server.http.disconnect import until_disconnect
from appliance.server.http.reply import ChoiceStream, Usage, count_when_done, load_header, placement, served
from appliance.server.http.service import DRAIN_RETRY_AFTER_S, Service, service_of
from appliance.server.schema.label_scores import LabelScoresRequest
from engine.api.messages import Timing

router = APIRouter()


async def _read(service: Service, request: Request, plan: Plan) -> tuple[list[tuple[float, ...]], list[Timing]]:
    """Return the log probabilities of the labels for each prompt, and the timings."""
    submits = tuple(submit for prompt in plan.prompts for submit in prompt.submits)
    found: dict[int, tuple[float, ...]] = {}
    timings: list[Timing] = []
    async with ChoiceStream(service.router.generate_all(submits, placement(request))) as stream:
        with count_when_done(stream, lambda: service.metrics.request_done(len(submits), 1)):
            async for index, delta in stream.deltas():
                for scored in delta.logprobs:
                    found[index] = scored.top_logprobs
                timings += [] if delta.timing is None else [delta.timing]
    if len(found) != len(submits):  # ended without a token: the service is stopping
        raise Unavailable("The service is shutting down; repeat the request.", DRAIN_RETRY_AFTER_S)
    return [found[index] for index in range(len(submits))], timings


async def create_label_scores(service: Service, request: Request, body: LabelScoresRequest) -> Response:
    model = service.model_name(body.model)
    request_id = request.state.request_id
    if service.config.log_requests:
        shown = body.model_dump(exclude={"query", "items"}, exclude_unset=True, mode="json")
        service.log.request(request.state.subject, "generative_scoring", shown)
    plan = await asyncio.to_thread(plan_label_scores, body, served(service, request, request_id))
    logprobs, timings = await until_disconnect(request, _read(service, request, plan))
    usage = Usage(sum(prompt.tokens for prompt in plan.prompts), service.config.compat == "openai")
    usage.completion = len(plan.prompts)
    usage.cached = sum(timing.cached_tokens for timing in timings)
    usage.written = sum(timing.written_tokens for timing in timings)
    data: list[dict[str, Any]] = []
    for index, values in enumerate(logprobs):
        shares = probabilities(values, among_labels=body.apply_softmax)
        data.append({"index": index, "object": "score", "score": shares[0], "label_scores": shares})
    reply = {
        "id": f"generative-scoring-{request_id}",
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": data,
        "usage": usage.final(),
    }
    return Response(orjson.dumps(reply), headers=load_header(service, request), media_type="application/json")


@router.post(
    "/generative_scoring",
    openapi_extra=json_body(LabelScoresRequest),
    summary="Score labels by their probability as the next token",
)
async def generative_scoring(request: Request) -> Response:
    return await create_label_scores(service_of(request), request, await read_body(request, LabelScoresRequest))
