"""The stages of a request, in the order in which a route calls them.

parse (`receive`) -> render (`plan_chat` or another function of the route) -> admit (`admit`) -> route (`route`) ->
stream and format (`respond`). Each stage takes plain values and returns a plain value. Replies that can be resumed with
an Idempotency-Key use `receive_durable` and `route_durable`.
"""

import time
import uuid
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from typing import Any

import orjson
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from appliance.observability.log import Subject
from appliance.observability.spans import input_messages
from appliance.server.chat.parsed import Plan, Served
from appliance.server.http.choices import ChoiceStream
from appliance.server.http.disconnect import until_disconnect
from appliance.server.http.durable import Routed, find_entry, generate_apart, subscribe
from appliance.server.http.generate import complete, records
from appliance.server.http.headers import load_header, placement, served
from appliance.server.http.idempotency import IdempotencyOptions, read_idempotency_options
from appliance.server.http.reply import Reply
from appliance.server.http.service import Service
from appliance.server.http.sse import EventStream
from appliance.server.reply_store.records import Identity
from appliance.server.reply_store.store import ReplyStore
from appliance.server.schema.common import Streamed
from engine.api.messages import Submit

OPERATIONS = {
    **dict.fromkeys(("chat", "messages", "responses"), "chat"),
    **dict.fromkeys(("completions", "generate"), "text_completion"),
    **dict.fromkeys(("embeddings", "embed", "pooling"), "embeddings"),
}
"""Operation names of the conventions for generative AI by the name of a route in logs; other routes keep theirs."""


@dataclass(frozen=True)
class Call:
    """A parsed request, before its prompt is rendered."""

    service: Service
    request: Request
    kind: str
    """Name of the route in logs and in the scope of idempotency keys."""
    identity: Identity
    context: Served
    store: ReplyStore | None = None
    """Store of resumable replies. Set together with `options`."""
    options: IdempotencyOptions | None = None
    joins: bool = False
    """A generation for its idempotency key existed when it arrived."""

    @property
    def subject(self) -> Subject:
        subject: Subject = self.request.state.subject
        return subject


def new_identity(request: Request) -> Identity:
    return Identity(request.state.request_id, int(time.time()), uuid.uuid4().hex)


def new_call(service: Service, request: Request, model: str | None, kind: str, identity: Identity) -> Call:
    """Parse the headers of a request for this model that has been given an identity."""
    return Call(service, request, kind, identity, served(service, request, identity.request_id, model))


def receive(service: Service, request: Request, model: str | None, kind: str) -> Call:
    """Parse the headers of a request. Raise NotFound for another model."""
    service.model_name(model)
    trace_call(service, request, model, kind)
    return new_call(service, request, model, kind, new_identity(request))


def trace_call(service: Service, request: Request, model: str | None, kind: str) -> None:
    """Record the operation and the model in the request's span."""
    span = request.state.subject.span
    if span is not None:
        span.update(
            {
                "gen_ai.operation.name": OPERATIONS.get(kind, kind),
                "gen_ai.provider.name": "slipway",
                "gen_ai.request.model": model or service.config.names[0],
            }
        )


def receive_durable(service: Service, request: Request, body: Streamed, model: str | None, kind: str) -> Call:
    """Parse the headers of a request whose reply can be resumed with an Idempotency-Key."""
    service.model_name(model)
    trace_call(service, request, model, kind)
    store = service.reply_store
    options = None if store is None else read_idempotency_options(request, body, kind)
    if store is None or options is None:
        return new_call(service, request, model, kind, new_identity(request))
    entry = find_entry(store, options)
    identity = new_identity(request) if entry is None else entry.opened.identity
    call = new_call(service, request, model, kind, identity)
    return replace(call, store=store, options=options, joins=entry is not None)


async def admit(call: Call, plan: Plan) -> None:
    """Compile the grammar of a new request. Raise RequestError for a grammar that exceeds the limits."""
    if plan.grammar is not None and not call.joins:
        await until_disconnect(call.request, call.service.check_grammar(plan.grammar, plan.bound_by))


def route(call: Call, submits: tuple[Submit, ...]) -> ChoiceStream:
    """Send the sequences to engines. Raise the router's admission errors: Unavailable, Overloaded, Quarantined."""
    return ChoiceStream(call.service.router.generate_all(submits, placement(call.request)))


async def route_durable(call: Call, submits: tuple[Submit, ...]) -> Routed:
    """Send the sequences to engines, or subscribe to the generation of the request's idempotency key."""
    if call.store is None or call.options is None:
        return Routed(route(call, submits), call.identity)
    return await subscribe(call.service, call.store, call.options, call.identity, submits, placement(call.request))


def log_request(call: Call, body: BaseModel, hidden: Set[str]) -> None:
    """Log the fields that a request sets, if requests are logged, without those that contain texts. Record the texts in
    the request's span, if content is recorded."""
    span = call.subject.span
    if span is not None and span.has_content:
        texts = body.model_dump(include=set(hidden), exclude_unset=True, mode="json")
        span.update({"gen_ai.input.messages": input_messages(texts)})
    if call.service.config.observability.log_requests:
        shown = body.model_dump(exclude=set(hidden), exclude_unset=True, mode="json")
        call.service.log.request(call.subject, call.kind, shown)


async def respond(
    call: Call, body: Streamed, routed: Routed, reply: Reply[Any], headers: Mapping[str, str] | None = None
) -> Response:
    """Return the reply as a stream or as one JSON object."""
    service, headers = call.service, {**routed.headers, **(headers or {})}
    if routed.writer is not None and call.store is not None:
        await generate_apart(call.store, routed.writer, reply.fresh())
    if body.stream:
        pause_s = service.config.endpoints.stream_keep_alive
        events = records(routed.source, reply)
        return EventStream(events, routed.source, headers, pause_s=pause_s, sign=reply.keep_alive)
    whole = await until_disconnect(call.request, complete(routed.source, reply))
    return as_json(call, whole, headers)


def as_json(call: Call, value: Any, headers: Mapping[str, str] | None = None) -> Response:
    """Return a JSON reply with the load report that the client asked for."""
    headers = {**(headers or {}), **load_header(call.service, call.request)}
    return Response(orjson.dumps(value), headers=headers, media_type="application/json")
