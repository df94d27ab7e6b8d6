"""Routes of /v1/responses: create, retrieve, cancel, delete, input items and input token count (docs/http.md)."""

import asyncio
import re
import time
import uuid
from dataclasses import dataclass, replace
from typing import Any

import orjson
from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from appliance.server.chat.parsed import ChatPlan
from appliance.server.errors.api import BadRequest, NotFound, Unavailable, Unprocessable
from appliance.server.http.body import json_body, read_body
from appliance.server.http.choices import ChoiceStream
from appliance.server.http.disconnect import until_disconnect
from appliance.server.http.durable import RETRY_AFTER_S
from appliance.server.http.headers import load_header, placement
from appliance.server.http.idempotency import KEY, LAST, REPLAYED, content_digest, digest, read_key
from appliance.server.http.media import with_media
from appliance.server.http.pipeline import Call, admit, log_request, new_call, trace_call
from appliance.server.http.service import Service, service_of
from appliance.server.http.sse import EventStream
from appliance.server.openai.responses.items import NO_STORE, context, own_items
from appliance.server.openai.responses.reply import PREFIX, ParsedResponse, ResponseReply
from appliance.server.openai.responses.request import plan_response
from appliance.server.openai.responses.request_items import item_media
from appliance.server.openai.responses.store import InvalidRequest, ResponseStore, Stored
from appliance.server.openai.responses.stream import DirectResponse, ResponseOutput, closed, listed, records, whole
from appliance.server.reply_store.records import Identity
from appliance.server.reply_store.store import JournalFull
from appliance.server.routing.placement import Placement
from appliance.server.schema.responses import InputTokensRequest, ResponsesRequest
from engine.api.errors import RequestError

router = APIRouter(tags=["responses"])

_ID = re.compile(r"[A-Za-z0-9_.\-]{1,128}")
_OF_THIS_API = ("input", "background", "previous_response_id", "response_id")
_HIDDEN = {"input", "instructions", "tools", "text", "metadata", "chat_template"}


@dataclass(frozen=True)
class IdempotencyOptions:
    """Idempotency options of a request."""

    request_id: str
    body: bytes  # digest of the request
    after: int  # number of the last event that the client has


def _read_idempotency_options(
    request: Request, body: ResponsesRequest, store: ResponseStore | None
) -> IdempotencyOptions | None:
    """Return the idempotency options, or None without an Idempotency-Key.

    The response's ID is derived from the key and its owner.
    """
    if store is None:
        return None
    key, after = read_key(request)
    if key is None:
        return None
    if after and not (after.isascii() and after.isdigit() and len(after) < 10 and body.stream):
        raise BadRequest(f"{LAST} must be the sequence_number of an event, with stream=true.", LAST)
    request_id = digest("responses key", request.state.owner, key).hex()
    return IdempotencyOptions(request_id, content_digest(body), int(after) if after else -1)


def _identity(
    request: Request, body: ResponsesRequest, store: ResponseStore | None, options: IdempotencyOptions | None
) -> Identity:
    """Return the response's identity. A client's ID is used if it is valid in a URL path and not taken."""
    given = (body.request_id or request.state.request_id).removeprefix(PREFIX)
    name = given if _ID.fullmatch(given) else uuid.uuid4().hex
    if options is not None:
        name = options.request_id
    elif store is not None and store.find_any(request.state.owner, name) is not None:
        if body.request_id is not None:
            raise InvalidRequest(
                f"request_id: a response with the ID {body.request_id[:200]!r} already exists.", "request_id"
            )
        name = uuid.uuid4().hex
    return Identity(name, int(time.time()), uuid.uuid4().hex)


# Creating


async def _planned(call: Call, parsed: ParsedResponse) -> ChatPlan:
    try:
        call = await with_media(call, item_media(parsed.items))
        plan = await asyncio.to_thread(plan_response, parsed.body, parsed.items, call.context)
        await admit(call, plan)
        return plan
    except RequestError as error:
        raise (InvalidRequest(str(error), error.param) if error.param in _OF_THIS_API else error) from error


def _check_json(body: ResponsesRequest) -> None:
    """Raise InvalidRequest for a body that cannot be serialized to JSON again."""
    try:
        orjson.dumps(body.model_dump(mode="json", by_alias=True, exclude_unset=True))
    except TypeError as error:
        raise InvalidRequest(f"The body has a value that cannot be stored: {error}.") from None


def _check_background(body: ResponsesRequest, store: ResponseStore | None) -> None:
    if body.background and store is None:
        raise InvalidRequest(f"background requires stored responses. {NO_STORE}.", "background")
    if body.background and body.store is False:
        raise InvalidRequest("background requires store=true, because the response is retrieved later.", "background")


def _where(request: Request, body: ResponsesRequest) -> Placement:
    """Return the placement of a request.

    Requests of one session or prompt_cache_key run on the same engine and share its prefix cache.
    """
    target = placement(request)
    session = target.session or body.session_id or body.prompt_cache_key or ""
    return replace(target, session=session)


async def create_response(service: Service, request: Request, body: ResponsesRequest) -> Response:
    service.model_name(body.model)
    await asyncio.to_thread(_check_json, body)
    store, owner = _store_if_any(request), request.state.owner
    _check_background(body, store)
    options = _read_idempotency_options(request, body, store)
    joined = None if options is None or store is None else _joined(store, owner, options)
    if joined is not None:
        assert store is not None and options is not None, "what is joined is kept"
        return await _reply_of_key(service, request, body, joined, options)
    if options is not None and options.after >= 0:
        raise NotFound(f"No reply is stored for this {KEY}. Repeat the request without {LAST}.", LAST)
    identity = _identity(request, body, store, options)
    before = context(store, owner, body.previous_response_id)
    items = (*before, *own_items(store, owner, body, identity.salt, before))
    stored = store is not None and body.store is not False
    parsed = ParsedResponse(body, identity, items, len(before), owner, stored)
    trace_call(service, request, body.model, "responses")
    call = new_call(service, request, body.model, "responses", identity)
    plan = await _planned(call, parsed)
    if options is not None and store is not None and (joined := _joined(store, owner, options)) is not None:
        # another request with this key arrived in the meantime
        return await _reply_of_key(service, request, body, joined, options)
    if store is not None and options is None and store.find_any(owner, identity.request_id) is not None:
        # another request with its ID arrived in the meantime
        identity = Identity(uuid.uuid4().hex, identity.created, identity.salt)
        parsed = replace(parsed, identity=identity)
    log_request(call, body, _HIDDEN)
    if store is None or not (stored or options is not None):
        return await _direct(call, parsed, plan)
    try:
        content = b"" if options is None else options.body
        safe = parsed.background or options is not None
        opened = await store.open(parsed, content, plan, request.state.subject, _where(request, body), safe=safe)
    except JournalFull:
        if safe:
            message = "The response store is full of responses in progress. Repeat the request later."
            raise Unavailable(message, RETRY_AFTER_S) from None
        return await _direct(call, replace(parsed, stored=False), plan)
    return await _reply(service, request, body, opened, named=options is not None)


def _joined(store: ResponseStore, owner: str, options: IdempotencyOptions) -> Stored | None:
    """Return the existing response for an idempotency key, unless it failed. Raise Unprocessable."""
    found = store.find_any(owner, options.request_id)
    if found is None:
        return None
    if found.entry.opened.body != options.body:
        raise Unprocessable(f"{KEY}: this key was already used for a different request. Use a new key.", KEY)
    if (found.document() or {}).get("status") == "failed" or not store.reply_store.is_resumable(found.entry):
        store.reply_store.drop(found.entry)
        return None
    return found


async def _reply_of_key(
    service: Service, request: Request, body: ResponsesRequest, stored: Stored, options: IdempotencyOptions
) -> Response:
    store = _store_if_any(request)
    assert store is not None, "it is kept there"
    service.metrics.add("requests_joined", 1)
    await store.resume(stored)
    return await _reply(service, request, body, stored, named=True, after=options.after, headers=REPLAYED)


async def _reply(
    service: Service,
    request: Request,
    body: ResponsesRequest,
    stored: Stored,
    *,
    named: bool,
    after: int = -1,
    headers: dict[str, str] | None = None,
) -> Response:
    """Return the HTTP response for a stored response.

    A streaming request gets the events, a background request gets the current object, and all others wait for the end.
    """
    store, headers = _store_if_any(request), headers or {}
    assert store is not None, "it is kept there"
    if stored.parsed.background:
        linger_s = None
    else:
        linger_s = service.config.lifecycle.journal.linger if named else 0.0
    output = await store.subscribe(stored, linger_s)
    if stored.parsed.background and not body.stream:
        return JSONResponse(await store.snapshot(stored) if headers else output.reply.document(), headers=headers)
    if body.stream:
        return _stream(service, request, output, after, headers, with_ids=named)
    return await _wait(service, request, output, headers)


async def _direct(call: Call, parsed: ParsedResponse, plan: ChatPlan) -> Response:
    service, request = call.service, call.request
    stream = ChoiceStream(service.router.generate_all(plan.submits, _where(request, parsed.body)))
    output = DirectResponse(ResponseReply(service, call.subject, parsed, plan), stream)
    if parsed.body.stream:
        return _stream(service, request, output, -1, {})
    return await _wait(service, request, output, {})


def _stream(
    service: Service,
    request: Request,
    output: ResponseOutput,
    after: int,
    headers: dict[str, str],
    *,
    with_ids: bool = False,
) -> EventStream:
    events = closed(records(output, after, with_ids=with_ids), service, request.state.subject)
    return EventStream(events, output.source, headers, pause_s=service.config.endpoints.stream_keep_alive)


async def _wait(service: Service, request: Request, output: ResponseOutput, headers: dict[str, str]) -> Response:
    document = await until_disconnect(request, whole(output))
    return JSONResponse(document, headers={**headers, **load_header(service, request)})


# Routes


def _store_if_any(request: Request) -> ResponseStore | None:
    store: ResponseStore | None = request.app.state.responses
    return store


def _store(request: Request) -> ResponseStore:
    store = _store_if_any(request)
    if store is None:
        raise NotFound(f"{NO_STORE}.", "response_id")
    return store


def _number(request: Request, name: str, default: int, low: int, high: int) -> int:
    given = request.query_params.get(name)
    if given is None:
        return default
    if not re.fullmatch(r"[0-9]{1,9}", given) or not low <= int(given) <= high:
        raise InvalidRequest(f"{name} must be an integer from {low} to {high}, got {given[:100]!r}.", name)
    return int(given)


@router.post("/v1/responses", openapi_extra=json_body(ResponsesRequest), summary="Create a response")
async def responses(request: Request) -> Response:
    return await create_response(service_of(request), request, await read_body(request, ResponsesRequest))


@router.post(
    "/v1/responses/input_tokens",
    openapi_extra=json_body(InputTokensRequest),
    summary="Count the input tokens of a response",
)
async def input_tokens(request: Request) -> dict[str, Any]:
    service, body = service_of(request), await read_body(request, InputTokensRequest)
    service.model_name(body.model)
    identity = Identity(request.state.request_id, 0, "")
    before = context(_store_if_any(request), request.state.owner, body.previous_response_id)
    items = (*before, *own_items(_store_if_any(request), request.state.owner, body, "", before))
    fields = body.model_dump(by_alias=True, exclude_unset=True) | {"input": []}
    parsed = ParsedResponse(ResponsesRequest.model_validate(fields), identity, items, 0, request.state.owner, False)
    plan = await _planned(new_call(service, request, body.model, "responses", identity), parsed)
    return {"object": "response.input_tokens", "input_tokens": len(plan.prompts[0].ids)}


@router.get("/v1/responses/{response_id}", summary="Retrieve a response or its events")
async def retrieve(request: Request, response_id: str) -> Response:
    """Return a response. `stream=true` returns its events, after number `starting_after`.

    Retrieving a response that lost its client or its gateway resumes it.
    """
    service, store = service_of(request), _store(request)
    stored = store.get(request.state.owner, response_id)
    after = _number(request, "starting_after", -1, 0, 10**9)
    streams = request.query_params.get("stream", "").lower() in ("true", "1")
    if streams and not store.reply_store.is_resumable(stored.entry):
        message = "The events of this response are no longer available, because the model's configuration has changed."
        raise InvalidRequest(f"{message} Retrieve it without stream.", "stream")
    if after >= 0 and not streams:
        raise InvalidRequest("starting_after resumes a stream and requires stream=true.", "starting_after")
    await store.resume(stored)
    background = stored.parsed.background
    if streams:
        output = await store.subscribe(stored, None if background else 0.0)
        return _stream(service, request, output, after, {})
    if not background and stored.entry.state == "running":
        async with (await store.subscribe(stored, service.config.lifecycle.journal.linger)).source:
            pass  # keep it running for a while, because this client waits for its end
    return JSONResponse(await store.snapshot(stored))


@router.delete("/v1/responses/{response_id}", summary="Delete a response")
async def delete(request: Request, response_id: str) -> JSONResponse:
    store = _store(request)
    await store.delete(store.get(request.state.owner, response_id))
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


@router.post("/v1/responses/{response_id}/cancel", summary="Cancel a background response")
async def cancel(request: Request, response_id: str) -> JSONResponse:
    store = _store(request)
    stored = store.get(request.state.owner, response_id)
    if not stored.parsed.background:
        raise InvalidRequest("Cannot cancel a synchronous response.", "response_id")
    return JSONResponse(await store.cancel(stored))


@router.get("/v1/responses/{response_id}/input_items", summary="List the input items of a response")
async def input_items(request: Request, response_id: str) -> JSONResponse:
    """Return the input items of a response, including those of previous responses.

    `order` is desc (the newest first) or asc.
    """
    stored = _store(request).get(request.state.owner, response_id)
    order, after = request.query_params.get("order", "desc"), request.query_params.get("after")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order must be asc or desc, got {order[:100]!r}.", "order")
    limit = _number(request, "limit", 20, 1, 100)
    try:
        page = listed(stored.parsed.items, after=after, limit=limit, newest_first=order == "desc")
    except KeyError:
        raise InvalidRequest(f"after: this response has no item {str(after)[:200]!r}.", "after") from None
    return JSONResponse(page)
