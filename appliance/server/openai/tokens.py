"""POST /tokenize and POST /detokenize (docs/http.md)."""

import asyncio
import json
from typing import Any

from fastapi import APIRouter, Request

from appliance.media.part import LoadedMedia
from appliance.server.chat.conversation import render
from appliance.server.chat.conversation import tokenize as tokenize_conversation
from appliance.server.chat.media import chat_media
from appliance.server.chat.window import check_ids, check_text
from appliance.server.http.body import apart, json_body, parse_body, read_json
from appliance.server.http.media import load_media
from appliance.server.http.service import Service, service_of
from appliance.server.schema.tokens import DetokenizeRequest, TokenizeChat, TokenizeText
from engine.api.errors import RequestError

router = APIRouter()


def _is_chat(body: bytes) -> bool:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and "messages" in value


def _tokenized(service: Service, body: TokenizeText | TokenizeChat, media: LoadedMedia) -> dict[str, Any]:
    text, config = service.text, service.config
    if isinstance(body, TokenizeChat):
        rendered = render(body, text, config, {})
        check_text(rendered.text, text.tokenizer, config)
        ids = tokenize_conversation(body, rendered, text, media).ids
    else:
        check_text(body.prompt, text.tokenizer, config)
        ids = text.tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens)
    strings = [text.tokenizer.token_string(token) for token in ids] if body.return_token_strs else None
    return {"count": len(ids), "max_model_len": config.max_context, "tokens": ids, "token_strs": strings}


@router.post("/tokenize", openapi_extra=json_body(TokenizeText), summary="Tokenize a text or a conversation")
async def tokenize(request: Request) -> dict[str, Any]:
    raw = await read_json(request)
    service = service_of(request)
    body: TokenizeText | TokenizeChat = (
        await parse_body(raw, TokenizeChat, service)
        if await apart(len(raw), _is_chat, raw)
        else await parse_body(raw, TokenizeText, service)
    )
    service.model_name(body.model)
    media: LoadedMedia = {}
    if isinstance(body, TokenizeChat):
        known = service.text.known_media
        media = await load_media(
            request, chat_media(body.messages, known, body.mm_processor_kwargs, io=body.media_io_kwargs)
        )
    return await asyncio.to_thread(_tokenized, service, body, media)


def _detokenized(service: Service, tokens: list[int]) -> str:
    config = service.config
    if len(tokens) > config.max_context:
        raise RequestError(
            f"tokens has {len(tokens):,} ids; the limit is max_model_len={config.max_context}.", "tokens"
        )
    check_ids(tokens, config, param="tokens")
    return service.tokenizer.decode(tokens, skip_special_tokens=False)


@router.post("/detokenize", openapi_extra=json_body(DetokenizeRequest), summary="Convert token IDs to text")
async def detokenize(request: Request) -> dict[str, str]:
    service = service_of(request)
    body = await parse_body(await read_json(request), DetokenizeRequest, service)
    service.model_name(body.model)
    return {"prompt": await asyncio.to_thread(_detokenized, service, body.tokens)}
