"""POST /v1/embeddings, /pooling and /classify (docs/pooling.md)."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response

from appliance.config.gateway import GatewayConfig
from appliance.server.chat.parsed import Served
from appliance.server.http.body import json_body, read_body
from appliance.server.http.media import with_media
from appliance.server.http.pipeline import Call, as_json
from appliance.server.http.service import Service, service_of
from appliance.server.pooling.chunks import averaged
from appliance.server.pooling.plan import PoolPlan, cut_dimensions, facts, input_media, naming, plan_prompts
from appliance.server.pooling.pooled import Outcome, numbered, pool, receive_pooling
from appliance.server.pooling.vectors import base64_text, encoded, floats, nested
from appliance.server.schema.pooling import ClassifyRequest, EmbeddingRequest, Encoded, PoolingRequest
from engine.api.errors import RequestError
from engine.api.messages import Pooled, Pooling, PoolingTask

embeddings = APIRouter()
pooling = APIRouter()
classification = APIRouter()

POOLING_TASKS: tuple[PoolingTask, ...] = ("embed", "classify", "token_embed", "token_classify")


def _written(pooled: Pooled, body: Encoded) -> Any:
    if body.encoding_format == "base64":
        return base64_text(pooled, body.embed_dtype, body.endianness)
    return nested(pooled)


def encoded_reply(call: Call, outcome: Outcome[PoolPlan], body: Encoded, names: tuple[str, str, str]) -> Response:
    """Return the HTTP response for pooled vectors.

    `names` are the prefix of the ID, the kind of an entry and its field of numbers. Binary formats concatenate all
    inputs, and a header gives the range of each.
    """
    prefix, kind, field = names
    head, usage = outcome.head(prefix, call.service), outcome.usage_fields()
    if body.encoding_format in ("float", "base64"):
        data = numbered(kind, field, [_written(each, body) for each in outcome.results])
        return as_json(call, {**head, "data": data, "usage": usage})
    parts = [encoded(each, body.embed_dtype, body.endianness) for each in outcome.results]
    headers = {}
    if body.encoding_format == "bytes":
        del head["object"]
        metadata = {**head, "data": _places(outcome, parts, body), "usage": usage}
        headers["metadata"] = orjson.dumps(metadata).decode()
    return Response(b"".join(parts), headers=headers, media_type="application/octet-stream")


def _places(outcome: Outcome[PoolPlan], parts: list[bytes], body: Encoded) -> list[dict[str, Any]]:
    """Return the byte range of each input's numbers, from `start` to before `end`."""
    places: list[dict[str, Any]] = []
    start = 0
    for index, (pooled, part) in enumerate(zip(outcome.results, parts, strict=True)):
        kind = {"embed_dtype": body.embed_dtype, "endianness": body.endianness}
        end = start + len(part)
        places.append({"index": index, **kind, "start": start, "end": end, "shape": list(pooled.shape)})
        start = end
    return places


def plan_embeddings(body: EmbeddingRequest, served: Served) -> PoolPlan:
    config = served.config
    chunks = body.late_chunking_params is not None
    if chunks and "token_embed" not in config.tasks:
        raise RequestError(
            "late_chunking_params requires a model that returns token vectors. This model serves "
            f"{', '.join(config.tasks)}.",
            "late_chunking_params",
        )
    task: PoolingTask = "embed" if "embed" in config.tasks and not chunks else "token_embed"
    dimensions = cut_dimensions(body.dimensions, config)
    # Means are computed from plain vectors and normalised afterwards.
    activate = False if chunks else body.use_activation
    return plan_prompts(body, Pooling(task, dimensions, activate), served)


async def create_embeddings(service: Service, request: Request, body: EmbeddingRequest) -> Response:
    call = receive_pooling(service, request, body, "embeddings")
    call = await with_media(call, input_media(body, call.context))
    plan = await asyncio.to_thread(plan_embeddings, body, call.context)
    outcome = await pool(call, body, plan)
    if body.late_chunking_params is not None:
        unit = body.use_activation is not False and facts(service.config).activation == "normalize"
        outcome = outcome.mapped(partial(averaged, size=body.late_chunking_params.chunk_size, unit=unit))
    return encoded_reply(call, outcome, body, ("embd", "embedding", "embedding"))


@embeddings.post("/v1/embeddings", openapi_extra=json_body(EmbeddingRequest), summary="Embed texts")
async def create(request: Request) -> Response:
    return await create_embeddings(service_of(request), request, await read_body(request, EmbeddingRequest))


def _task(body: PoolingRequest, config: GatewayConfig) -> PoolingTask:
    possible = [task for task in POOLING_TASKS if task in config.tasks]
    if body.task is None:
        return possible[0]
    found = next((task for task in possible if task == body.task), None)
    if found is None:
        raise RequestError(f"task={body.task!r} is not supported. This model serves {', '.join(possible)}.", "task")
    return found


def _plan_pooling(body: PoolingRequest, served: Served) -> PoolPlan:
    if body.dimensions is not None:
        raise RequestError("dimensions is not supported on this route. Use /v1/embeddings.", "dimensions")
    task = _task(body, served.config)
    return plan_prompts(body, Pooling(task, activate=body.use_activation), served)


async def create_pooling(service: Service, request: Request, body: PoolingRequest) -> Response:
    call = receive_pooling(service, request, body, "pooling")
    call = await with_media(call, input_media(body, call.context))
    plan = await asyncio.to_thread(_plan_pooling, body, call.context)
    outcome = await pool(call, body, plan)
    return encoded_reply(call, outcome, body, ("pooling", "pooling", "data"))


@pooling.post("/pooling", openapi_extra=json_body(PoolingRequest), summary="Pool the hidden states of prompts")
async def pool_prompts(request: Request) -> Response:
    return await create_pooling(service_of(request), request, await read_body(request, PoolingRequest))


def plan_classes(body: ClassifyRequest, served: Served) -> PoolPlan:
    """Return the parsed request.

    Raise RequestError for an empty text: its label would come from special tokens only.
    """
    texts = body.input if isinstance(body.input, list) else [body.input]
    for index, text in enumerate(texts):
        with naming("input", index, len(texts)):
            if text == "":
                raise RequestError("input must not be an empty text.", "input")
    return plan_prompts(body, Pooling("classify", activate=body.use_activation), served)


def _label_of(labels: tuple[str, ...]) -> Callable[[list[float]], str | None]:
    def label(values: list[float]) -> str | None:
        best = max(range(len(values)), key=values.__getitem__)
        return labels[best] if best < len(labels) else None

    return label


async def create_classes(service: Service, request: Request, body: ClassifyRequest) -> Response:
    call = receive_pooling(service, request, body, "classify")
    call = await with_media(call, input_media(body, call.context))
    plan = await asyncio.to_thread(plan_classes, body, call.context)
    outcome = await pool(call, body, plan)
    label = _label_of(facts(service.config).labels)
    data = [
        {"index": index, "label": label(values), "probs": values, "num_classes": len(values)}
        for index, values in enumerate(map(floats, outcome.results))
    ]
    return as_json(call, {**outcome.head("classify", service), "data": data, "usage": outcome.usage_fields()})


@classification.post("/classify", openapi_extra=json_body(ClassifyRequest), summary="Classify texts")
async def classify(request: Request) -> Response:
    return await create_classes(service_of(request), request, await read_body(request, ClassifyRequest))
