"""Routes of Anthropic's API: POST /v1/messages and POST /v1/messages/count_tokens (docs/http.md, Messages)."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import orjson
from fastapi import APIRouter, Request
from msgspec.structs import replace
from starlette.responses import Response

from appliance.observability.log import Subject
from appliance.server.anthropic.blocks import Blocks, Thoughts
from appliance.server.anthropic.request import chat_request, conversation, own_name, renamed
from appliance.server.chat.conversation import conversation_ids, render
from appliance.server.chat.prompt import ChatPlan, plan_chat
from appliance.server.chat.stream import ChatChoice, Piece
from appliance.server.chat.window import check_text
from appliance.server.errors.anthropic import REQUEST_ID, message_error
from appliance.server.errors.api import Unavailable, is_unexpected
from appliance.server.http.body import json_body, read_body
from appliance.server.http.disconnect import until_disconnect
from appliance.server.http.durable import start
from appliance.server.http.reply import CompletionLog, Source, load_header, served
from appliance.server.http.service import Service, service_of
from appliance.server.http.sse import EventStream, record
from appliance.server.reply_store.records import Identity
from appliance.server.schema.messages import CountRequest, MessagesRequest, ThinkingAdaptive, ThinkingEnabled
from engine.api.errors import RequestError

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


class MessageReply:
    """One running request: its content blocks and the usage so far."""

    def __init__(
        self,
        service: Service,
        subject: Subject,
        body: MessagesRequest,
        plan: ChatPlan,
        identity: Identity,
        source: Source,
    ) -> None:
        self.service = service
        self.subject = subject
        self.body = body
        self.plan = plan
        self.id = f"msg_{identity.request_id}"
        self.blocks = Blocks(identity.salt, _thoughts(body))
        self.state = ChatChoice(service.text.tokenizer, plan)
        self.source = source
        self.last: Piece | None = None
        self._completion_log = CompletionLog(service, subject, len(plan.prompts[0].ids))

    async def pieces(self) -> AsyncIterator[list[dict[str, Any]]]:
        """Yield the stream events of each delta and add them to the complete content."""
        try:
            async for _, delta in self.source.deltas():
                self._completion_log.take(delta)
                cut = delta.finish == "abort"
                taken = self.state.take(replace(delta, finish=None) if cut else delta)
                self.last = taken.piece
                events = self.blocks.take(taken.events)
                if taken.piece.finish is not None:
                    events += self.blocks.end()
                if self.state.choice.stopped:
                    self.source.stop(0)
                self._log()
                yield events
                if cut:  # this API has no stop_reason for an aborted reply
                    raise Unavailable(
                        "The service is shutting down and ended this reply early. Repeat the request.", RETRY_AFTER_S
                    )
        finally:
            if self.source.counts:
                self._count()

    def _log(self) -> None:
        if self.service.config.log_outputs == "off" or self.last is None or not self.source.counts:
            return
        self.service.log.delta(self.subject, 0, self.last.text)
        if self.last.finish is not None:
            whole = orjson.dumps(self.blocks.whole()).decode()
            self.service.log.final(self.subject, 0, whole, self.last.finish)

    def _count(self) -> None:
        self.service.metrics.request_done(1, self.state.choice.tokens)
        self._completion_log.log([self.state.choice])
        if self.plan.tools.calls is not None:
            self.service.metrics.tool_calls(bool(self.body.stream), self.blocks.has_calls(streamed=False))

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
        if self.service.config.compat != "openai":
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
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self.service.config.names[0]}
        return {**head, "content": content, **ending, "usage": usage | {"service_tier": "standard"}}

    async def records(self) -> AsyncIterator[bytes]:
        """Yield the stream records.

        The events of one delta are sent in one piece and the last one has the ID, so that a client that resumes after
        an event gets everything that follows it.
        """
        if not self.source.skips_opening:
            usage = {"input_tokens": len(self.plan.prompts[0].ids), "output_tokens": 0}
            message = self._message([], {"stop_reason": None, "stop_sequence": None}, usage)
            yield event({"type": "message_start", "message": message}, self.source.event_id()) + PING
        try:
            async for events in self.pieces():
                if not self.source.seen and events:
                    yield b"".join(map(event, events[:-1])) + event(events[-1], self.source.event_id())
        except Exception as error:  # outermost handler of the stream: report any failure and end the stream
            if is_unexpected(error):
                self.service.log.unexpected(self.subject, error)
            failure = message_error(error, self.subject.request_id)
            yield b"".join(map(event, [*self.blocks.close(), failure]))
            return
        if not self.source.skips_usage:
            delta = {"type": "message_delta", "delta": self._ending(streamed=True), "usage": self._usage()}
            yield event(delta) + event({"type": "message_stop"}, self.source.event_id(usage=True))

    async def whole(self) -> dict[str, Any]:
        async with self.source:
            async for _ in self.pieces():
                pass
        return self._message(self.blocks.whole(), self._ending(streamed=False), self._usage())


async def create_message(service: Service, request: Request, body: MessagesRequest) -> Response:
    service.model_name(body.model)
    subject = request.state.subject

    def plan(request_id: str) -> ChatPlan:
        chat = chat_request(body)
        try:
            planned = plan_chat(chat, served(service, request, request_id))
        except RequestError as error:
            raise renamed(error) from error
        return dataclasses.replace(planned, bound_by=own_name(planned.bound_by))

    def build(planned: ChatPlan, identity: Identity, source: Source) -> MessageReply:
        return MessageReply(service, subject, body, planned, identity, source)

    reply, headers = await start(service, request, body, "messages", plan, build)
    headers = {**headers, REQUEST_ID: subject.request_id}
    if service.config.log_requests:
        hidden = {"messages", "system", "tools"}
        service.log.request(subject, "messages", body.model_dump(exclude=hidden, exclude_unset=True, mode="json"))
    if body.stream:
        pause_s = service.config.stream_keep_alive_s
        return EventStream(reply.records(), reply.source, headers, pause_s=pause_s, sign=PING)
    whole = await until_disconnect(request, reply.whole())
    headers = {**headers, **load_header(service, request)}
    return Response(orjson.dumps(whole), headers=headers, media_type="application/json")


def _counted(service: Service, body: CountRequest) -> int:
    """Return the number of prompt tokens that the same conversation would have."""
    chat, text = conversation(body), service.text
    try:
        rendered = render(chat, text, service.config, {})
        check_text(rendered.text, text.tokenizer, service.config)
        return len(conversation_ids(chat, rendered, text))
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
    count = await asyncio.to_thread(_counted, service, body)
    headers = {REQUEST_ID: request.state.request_id}
    return Response(orjson.dumps({"input_tokens": count}), headers=headers, media_type="application/json")
