"""Routes of Anthropic's API: POST /v1/messages and POST /v1/messages/count_tokens (docs/http.md, Messages)."""

import asyncio
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import orjson
from fastapi import APIRouter, Request
from msgspec.structs import replace
from starlette.responses import Response

from appliance.media.part import LoadedMedia
from appliance.observability.log import Subject
from appliance.server.anthropic.blocks import Blocks, Thoughts
from appliance.server.anthropic.content import message_media, refuse_images
from appliance.server.anthropic.request import chat_request, conversation, own_name, renamed
from appliance.server.chat.chat_prompt import plan_chat
from appliance.server.chat.conversation import render, tokenize
from appliance.server.chat.parsed import ChatPlan, Served
from appliance.server.chat.stream import ChatChoice, Piece
from appliance.server.chat.window import check_text
from appliance.server.errors.anthropic import REQUEST_ID, message_error
from appliance.server.errors.api import Unavailable, is_unexpected
from appliance.server.http.body import json_body, read_body
from appliance.server.http.media import load_media, with_media
from appliance.server.http.pipeline import admit, log_request, receive_durable, respond, route_durable
from appliance.server.http.reply import Reply
from appliance.server.http.service import Service, service_of
from appliance.server.http.sse import record
from appliance.server.reply_store.records import Identity
from appliance.server.schema.messages import CountRequest, MessagesRequest, ThinkingAdaptive, ThinkingEnabled
from engine.api.errors import RequestError
from engine.api.messages import Delta

router = APIRouter(tags=["messages"])

RETRY_AFTER_S = 2


def event(fields: dict[str, Any], event_id: str = "") -> bytes:
    """Return one SSE record. Anthropic's clients drop records without an event name."""
    return b"event: " + str(fields["type"]).encode() + b"\n" + record(fields, event_id)


PING = event({"type": "ping"})


def _thoughts(body: MessagesRequest) -> Thoughts:
    match body.thinking:
        case None:
            return "shown"
        case ThinkingEnabled(display="omitted") | ThinkingAdaptive(display="omitted"):
            return "omitted"
        case other:
            return "dropped" if other.type == "disabled" else "shown"


class MessageReply(Reply[list[dict[str, Any]]]):
    """Formatter of one reply. A piece is the stream events of a delta."""

    keep_alive: ClassVar[bytes] = PING

    def __init__(
        self, service: Service, subject: Subject, body: MessagesRequest, plan: ChatPlan, identity: Identity
    ) -> None:
        self.body = body
        self.plan = plan
        self.identity = identity
        self.blocks = Blocks(identity.salt, _thoughts(body))
        self.state = ChatChoice(service.text.tokenizer, plan)
        self.last: Piece | None = None
        self._is_aborted = False
        super().__init__(service, subject, body, len(plan.prompts[0].ids), [self.state.choice])

    def fresh(self) -> "MessageReply":
        return MessageReply(self.service, self.subject, self.body, self.plan, self.identity)

    def take(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        self._is_aborted = delta.finish == "abort"
        taken = self.state.take(replace(delta, finish=None) if self._is_aborted else delta)
        self.last = taken.piece
        events = self.blocks.take(taken.events)
        if taken.piece.finish is not None:
            events += self.blocks.end()
        return events

    def check(self) -> None:
        if self._is_aborted:  # this API has no stop_reason for an aborted reply
            raise Unavailable(
                "The service is shutting down and ended this reply early. Repeat the request.", RETRY_AFTER_S
            )

    def logged(self, index: int) -> Iterable[tuple[str, str | None]]:
        assert self.last is not None, "it took a delta"
        return ((self.last.text, self.last.finish),)

    def logged_whole(self, index: int) -> str:
        return orjson.dumps(self.blocks.whole()).decode()

    def calls_found(self) -> Sequence[bool]:
        return () if self.plan.tools.calls is None else (self.blocks.has_calls(streamed=False),)

    def _ending(self, *, streamed: bool) -> dict[str, Any]:
        """Return stop_reason and stop_sequence.

        In a stream, malformed calls count too: the client has already seen them.
        """
        assert self.last is not None, "a finished reply had a last delta"
        met = self.last.stop_reason if self.state.choice.stopped else None
        if self.last.finish == "length":
            reason = "max_tokens"
        elif met is not None:
            reason = "stop_sequence"
        else:
            reason = "tool_use" if self.blocks.has_calls(streamed=streamed) else "end_turn"
        return {"stop_reason": reason, "stop_sequence": met}

    def _usage(self) -> dict[str, Any]:
        """Return the usage. With the vllm profile it has only input_tokens and output_tokens.

        Otherwise input_tokens, cache reads and cache writes add up to the prompt.
        """
        choice, prompt = self.state.choice, len(self.plan.prompts[0].ids)
        if self.service.config.endpoints.compat != "openai":
            return {"input_tokens": prompt, "output_tokens": choice.tokens}
        timing = choice.timing
        cached, written = (timing.cached_tokens, timing.written_tokens) if timing else (0, 0)
        usage: dict[str, Any] = {
            "input_tokens": prompt - cached - written,
            "cache_creation_input_tokens": written,
            "cache_read_input_tokens": cached,
            "output_tokens": choice.tokens,
        }
        if self.plan.output_format.reasoning is not None:
            usage["output_tokens_details"] = {"thinking_tokens": self.state.reasoning_tokens}
        return usage

    def _message(self, content: list[dict[str, Any]], ending: dict[str, Any], usage: dict[str, Any]) -> dict[str, Any]:
        name = f"msg_{self.identity.request_id}"
        head = {"id": name, "type": "message", "role": "assistant", "model": self.service.reply_name(self.body.model)}
        return {**head, "content": content, **ending, "usage": usage | {"service_tier": "standard"}}

    def opening(self, event_id: str) -> Iterable[bytes]:
        usage = {"input_tokens": len(self.plan.prompts[0].ids), "output_tokens": 0}
        message = self._message([], {"stop_reason": None, "stop_sequence": None}, usage)
        yield event({"type": "message_start", "message": message}, event_id) + PING

    def record(self, piece: list[dict[str, Any]], event_id: str) -> bytes:
        """Return the events of one delta in one piece.

        The last one has the ID, so that a client that resumes after an event gets everything that follows it.
        """
        return b"".join(map(event, piece[:-1])) + event(piece[-1], event_id) if piece else b""

    def closing(self, event_id: str) -> Iterable[bytes]:
        delta = {"type": "message_delta", "delta": self._ending(streamed=True), "usage": self._usage()}
        yield event(delta) + event({"type": "message_stop"}, event_id)

    def failure(self, error: Exception) -> bytes:
        if is_unexpected(error):
            self.service.log.unexpected(self.subject, error)
        return b"".join(map(event, [*self.blocks.close(), message_error(error, self.subject.request_id)]))

    def whole(self) -> dict[str, Any]:
        return self._message(self.blocks.whole(), self._ending(streamed=False), self._usage())


def plan_message(body: MessagesRequest, served: Served) -> ChatPlan:
    """Return the parsed request. Raise RequestError with the field names of the Messages API."""
    if served.text.media is None:
        refuse_images(body.messages)
    chat = chat_request(body)
    try:
        planned = plan_chat(chat, served)
    except RequestError as error:
        raise renamed(error) from error
    return dataclasses.replace(planned, bound_by=own_name(planned.bound_by))


async def create_message(service: Service, request: Request, body: MessagesRequest) -> Response:
    call = receive_durable(service, request, body, body.model, "messages")
    call = await with_media(call, message_media(body.messages))
    plan = await asyncio.to_thread(plan_message, body, call.context)
    await admit(call, plan)
    routed = await route_durable(call, plan.submits)
    log_request(call, body, {"messages", "system", "tools"})
    reply = MessageReply(service, call.subject, body, plan, routed.identity)
    return await respond(call, body, routed, reply, {REQUEST_ID: call.subject.request_id})


def _counted(service: Service, body: CountRequest, media: LoadedMedia) -> int:
    """Return the number of prompt tokens that the same conversation would have."""
    text = service.text
    if text.media is None:
        refuse_images(body.messages)
    chat = conversation(body)
    try:
        rendered = render(chat, text, service.config, {})
        check_text(rendered.text, text.tokenizer, service.config)
        return len(tokenize(chat, rendered, text, media).ids)
    except RequestError as error:
        raise renamed(error) from error


@router.post("/v1/messages", openapi_extra=json_body(MessagesRequest), summary="Message")
async def messages(request: Request) -> Response:
    """Return the model's reply to a conversation, in Anthropic's format."""
    return await create_message(service_of(request), request, await read_body(request, MessagesRequest))


@router.post("/v1/messages/count_tokens", openapi_extra=json_body(CountRequest), summary="Tokens of a message")
async def count_tokens(request: Request) -> Response:
    """Return the number of tokens in the prompt of a message."""
    service = service_of(request)
    body = await read_body(request, CountRequest)
    service.model_name(body.model)
    media = await load_media(request, message_media(body.messages))
    count = await asyncio.to_thread(_counted, service, body, media)
    headers = {REQUEST_ID: request.state.request_id}
    return Response(orjson.dumps({"input_tokens": count}), headers=headers, media_type="application/json")
