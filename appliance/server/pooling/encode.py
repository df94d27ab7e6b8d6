"""POST /v1/media/embeddings: embeddings of images, videos and audio for another service (docs/images.md)."""

import asyncio
import base64
from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from appliance.media.part import LoadedItem, LoadedMedia, MediaPart, embeddings_file
from appliance.server.chat.media import EMBEDS, media_part, options_by_kind, part_modality
from appliance.server.chat.parsed import Served
from appliance.server.http.body import json_body, read_body
from appliance.server.http.media import with_media
from appliance.server.http.pipeline import as_json
from appliance.server.http.service import service_of
from appliance.server.pooling.plan import Pooled as Prompt
from appliance.server.pooling.plan import PoolPlan, check_count, naming, submits, terms, whole
from appliance.server.pooling.pooled import pool, receive_pooling
from appliance.server.pooling.vectors import encoded
from appliance.server.schema.pooling import EncodeRequest
from engine.api.errors import RequestError
from engine.api.media import MediaItem
from engine.api.messages import Pooled, Pooling

router = APIRouter()


def encode_parts(body: EncodeRequest, served: Served) -> Iterator[MediaPart]:
    """Yield the items of a request. Raise RequestError for a part that is not the file of one."""
    known, options = served.text.known_media, options_by_kind(body.mm_processor_kwargs, body.media_io_kwargs)
    for at, part in enumerate(body.input):
        kind = part_modality(part)
        if kind is None or kind not in known or part["type"] == EMBEDS[kind]:
            reads = ", ".join(known)
            where = f"input.{at}"
            raise RequestError(f"{where} must be a content part with a file; this service reads {reads}.", where)
        yield media_part(part, f"input.{at}", options(kind))


def _prompt(item: LoadedItem, where: str, served: Served) -> Prompt:
    """Return the prompt of an item: its tokens. Raise RequestError if they do not fit the window."""
    if item.parts:
        raise RequestError(f"{where} is a video with sound; embed it without use_audio_in_video.", where)
    count = sum(item.runs)
    made = MediaItem(item.modality, item.digest, ((0, count),), item.tensors)
    ids = [served.text.known_media[item.kind].token_id] * count
    return Prompt(whole(ids, where, served).ids, media=(made,))


def plan_encode(body: EncodeRequest, items: list[LoadedItem], served: Served) -> PoolPlan:
    """Return the parsed request. Raise RequestError if it cannot be served."""
    if body.truncate_prompt_tokens is not None:
        raise RequestError("Embeddings of media cannot be truncated.", "truncate_prompt_tokens")
    check_count(len(items), "input", served.config)
    prompts = []
    for at, item in enumerate(items):
        with naming("input", at, len(items)):
            prompts.append(_prompt(item, f"input.{at}", served))
    tokens = sum(len(prompt.ids) for prompt in prompts)
    return PoolPlan(submits(prompts, Pooling("token_embed"), terms(body, served), served), tokens)


def _file(pooled: Pooled, item: LoadedItem, body: EncodeRequest) -> str:
    data = encoded(pooled, body.embed_dtype, "little")
    return base64.b64encode(embeddings_file(data, body.embed_dtype, pooled.shape, item)).decode()


def _entry(index: int, pooled: Pooled, item: LoadedItem, body: EncodeRequest) -> dict[str, Any]:
    name = EMBEDS[item.kind]
    file = _file(pooled, item, body)
    return {"index": index, "object": "media_embeddings", "shape": list(pooled.shape), "type": name, name: file}


@router.post("/v1/media/embeddings", openapi_extra=json_body(EncodeRequest), summary="Embed images, videos and audio")
async def encode(request: Request) -> Response:
    service, body = service_of(request), await read_body(request, EncodeRequest)
    call = receive_pooling(service, request, body, "encode")
    parts = list(encode_parts(body, call.context))
    call = await with_media(call, parts)
    media: LoadedMedia = call.context.media or {}
    items = [media[part] for part in parts]
    outcome = await pool(call, body, await asyncio.to_thread(plan_encode, body, items, call.context))
    pairs = list(zip(outcome.results, items, strict=True))
    data = await asyncio.to_thread(lambda: [_entry(at, *pair, body) for at, pair in enumerate(pairs)])
    return as_json(call, {**outcome.head("embd", service), "data": data, "usage": outcome.usage_fields()})
