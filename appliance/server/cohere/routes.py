"""POST /v2/embed of Cohere's API (docs/pooling.md)."""

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from appliance.server.cohere.request import embed_media, plan_embed, typed
from appliance.server.http.body import json_body, read_body
from appliance.server.http.media import with_media
from appliance.server.http.pipeline import as_json
from appliance.server.http.service import Service, service_of
from appliance.server.pooling.pooled import pool, receive_pooling
from appliance.server.schema.cohere import EmbeddingType, EmbedRequest

router = APIRouter()


async def create_embed(service: Service, request: Request, body: EmbedRequest) -> Response:
    call = receive_pooling(service, request, body, "embed")
    call = await with_media(call, embed_media(body, call.context))
    plan = await asyncio.to_thread(plan_embed, body, call.context)
    outcome = await pool(call, body, plan)
    tokens = outcome.plan.tokens
    kinds: list[EmbeddingType] = body.embedding_types or ["float"]
    reply: dict[str, Any] = {
        "id": f"embd-{outcome.request_id}",
        "embeddings": {kind: typed(outcome.results, kind) for kind in kinds},
        "texts": body.texts,
        "meta": {"api_version": {"version": "2"}, "billed_units": {"input_tokens": tokens}},
        "response_type": "embeddings_by_type",
    }
    return as_json(call, reply)


@router.post("/v2/embed", openapi_extra=json_body(EmbedRequest), summary="Embed texts (Cohere API)")
async def embed(request: Request) -> Response:
    return await create_embed(service_of(request), request, await read_body(request, EmbedRequest))
