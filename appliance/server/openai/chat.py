"""POST /v1/chat/completions (docs/http.md)."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from io import StringIO
from typing import Any

import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response

from appliance.observability.log import Subject
from appliance.output_formats.events import CallArguments, CallBroken, CallStart, Content, Event, ReasoningText
from appliance.server.chat.prompt import ChatPlan, plan_chat
from appliance.server.chat.stream import ChatChoice, ChatPiece, ScoredToken
from appliance.server.chat.tools import ToolUse
from appliance.server.http.body import json_body, read_body
from appliance.server.http.disconnect import until_disconnect
from appliance.server.http.durable import start
from appliance.server.http.reply import (
    CompletionLog,
    Source,
    Usage,
    UsageOptions,
    count_when_done,
    describe_error,
    finite,
    header,
    load_header,
    prompt_logprobs,
    served,
    token_name,
    usage_options,
)
from appliance.server.http.service import Service, service_of
from appliance.server.http.sse import EventStream, guarded, record
from appliance.server.openai.call_shapes import CustomCall, FunctionCall, joined
from appliance.server.reply_store.records import Identity
from appliance.server.schema.chat import ChatRequest
from engine.api.messages import Delta
from engine.text import Tokenizer

router = APIRouter()


def _token_fields(token: int, text: str, value: float, as_id: bool) -> dict[str, Any]:
    name = token_name(token, text, as_id)
    return {"token": name, "logprob": finite(value), "bytes": list(name.encode())}


def _logprobs(tokens: Sequence[ScoredToken], count: int, as_ids: bool) -> dict[str, Any]:
    """Return logprobs in the chat format.

    Each token has the `count` most likely tokens, whether or not it is one of them.
    """
    content = []
    for token in tokens:
        top = token.top if count < 0 else token.top[:count]
        fields = _token_fields(token.token, token.text, token.logprob, as_ids)
        content.append({**fields, "top_logprobs": [_token_fields(*one, as_ids) for one in top]})
    return {"content": content}


@dataclass
class Message:
    """Message of one choice, built from parser events. `delta` returns the part that each step adds."""

    include_reasoning: bool
    name: str = ""  # prefix from which call IDs are derived
    content: StringIO = field(default_factory=StringIO)  # a str would be copied for each token
    reasoning: StringIO = field(default_factory=StringIO)
    calls: dict[int, FunctionCall | CustomCall] = field(default_factory=dict)
    broken: set[int] = field(default_factory=set)
    tools: ToolUse = ToolUse("none")
    twice: bool = False  # also send reasoning as `reasoning_content`, the only field that some clients read

    def delta(self, events: list[Event]) -> dict[str, Any]:
        """Return the events as a streamed delta. Nothing more is sent of a call that turns out to be malformed."""
        delta: dict[str, Any] = {}
        calls: dict[int, dict[str, Any]] = {}
        for event in events:
            if isinstance(event, Content):
                self.content.write(event.text)
                delta["content"] = delta.get("content", "") + event.text
            elif isinstance(event, ReasoningText):
                self.reasoning.write(event.text)
                if self.include_reasoning:
                    delta["reasoning"] = delta.get("reasoning", "") + event.text
            elif isinstance(event, CallStart):
                calls[event.index] = self._start(event)
            elif isinstance(event, CallArguments):
                piece = self.calls[event.index].piece(event.index, event.text)
                before = calls.get(event.index)
                calls[event.index] = joined(before, piece) if before else piece
            elif isinstance(event, CallBroken):
                self.broken.add(event.index)
                self.content.write(event.text)
        if shown := [call for call in calls.values() if call]:
            delta |= {"function_call": shown[0]["function"]} if self.tools.legacy else {"tool_calls": shown}
        if self.twice and "reasoning" in delta:
            delta["reasoning_content"] = delta["reasoning"]
        return delta

    def _start(self, event: CallStart) -> dict[str, Any]:
        kind = CustomCall if event.name in self.tools.custom else FunctionCall
        call = self.calls[event.index] = kind(self.tools.call_id(event, self.name), event.name)
        return call.start(event.index)

    def whole(self, role: str, mode: str) -> dict[str, Any]:
        calls = [call for index, call in self.calls.items() if index not in self.broken]
        content, reasoning = self.content.getvalue(), self.reasoning.getvalue()
        only_other = (calls and mode != "named") or reasoning
        message: dict[str, Any] = {
            "role": role,
            "content": content or (None if only_other else ""),
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": (reasoning or None) if self.include_reasoning else None,
        }
        if self.twice:
            message["reasoning_content"] = message["reasoning"]
        if calls and self.tools.legacy:
            first = calls[0]
            return message | ({"function_call": first.function()} if isinstance(first, FunctionCall) else {})
        return message | ({"tool_calls": [call.whole() for call in calls]} if calls else {})


class ChoiceBuilder:
    """Builds the output of one choice."""

    def __init__(
        self, index: int, body: ChatRequest, tokenizer: Tokenizer, plan: ChatPlan, name: str, *, twice: bool
    ) -> None:
        self.index = index
        self.body = body
        self.plan = plan
        self.state = ChatChoice(tokenizer, plan)
        self.message = Message(body.include_reasoning, name, tools=plan.tools, twice=twice)
        self.message.content.write(plan.echo)
        self._is_text = plan.output_format.markers() == ()
        # Hidden reasoning text must not be readable from logprobs and token IDs.
        shows_tokens = body.include_reasoning or plan.output_format.reasoning is None
        self._scores = bool(body.logprobs) and shows_tokens
        self._tells_ids = bool(body.return_token_ids) and shows_tokens
        self.logprobs: list[Any] = []
        self.ids: list[int] = []
        self.last: ChatPiece | None = None

    @property
    def tokens(self) -> int:
        return self.state.choice.tokens

    def take(self, delta: Delta) -> dict[str, Any]:
        """Return the streamed choice for a delta and add it to the complete message."""
        taken = self.last = self.state.take(delta)
        piece = taken.piece
        added = self.message.delta(taken.events)
        if not added and piece.finish is None and self._is_text:
            added = {"content": ""}  # clients count tokens by such chunks
        fields: dict[str, Any] = {"index": self.index, "delta": added, "logprobs": None}
        if self._scores:
            as_ids = bool(self.body.return_tokens_as_token_ids)
            count = -1 if self.body.logprob_token_ids else self.body.top_logprobs or 0
            fields["logprobs"] = _logprobs(piece.logprobs, count, as_ids)
            self.logprobs += fields["logprobs"]["content"]
        fields["finish_reason"] = None
        if piece.finish is not None:
            fields |= {"finish_reason": self.finish_reason(), "stop_reason": piece.stop_reason}
        if self._tells_ids:
            fields["token_ids"] = list(piece.ids)
            self.ids += piece.ids
        return fields

    def finish_reason(self, *, streamed: bool = True) -> str | None:
        """Return the finish reason.

        In a stream, malformed calls count too, because the client has already seen them.
        """
        finish = self.last.piece.finish if self.last else None
        calls = self.message.calls.keys() if streamed else self.message.calls.keys() - self.message.broken
        if finish != "stop" or not calls or self.plan.tools.mode == "named":
            return finish
        return "function_call" if self.plan.tools.legacy else "tool_calls"

    def whole(self) -> dict[str, Any]:
        assert self.last is not None, "a finished choice had a last delta"
        choice: dict[str, Any] = {
            "index": self.index,
            "message": self.message.whole(self.plan.role, self.plan.tools.mode),
            "logprobs": {"content": self.logprobs} if self._scores else None,
            "finish_reason": self.finish_reason(streamed=False),
            "stop_reason": self.last.piece.stop_reason,
        }
        if self._tells_ids:
            choice["token_ids"] = self.ids
        return choice


class ChatReply:
    """One running request: its choices, their merged stream and the usage so far."""

    def __init__(
        self,
        service: Service,
        subject: Subject,
        body: ChatRequest,
        plan: ChatPlan,
        identity: Identity,
        source: Source,
    ) -> None:
        self.service = service
        self.body = body
        self.plan = plan
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        self.head = header(service, identity, "chatcmpl", kind, service.model_name(body.model))
        self.subject = subject
        self.prompt = plan.prompts[0]
        names = [f"{identity.salt}/{index}" for index in range(len(self.prompt.submits))]
        openai, tokenizer = service.config.compat == "openai", service.text.tokenizer
        self.builders = [ChoiceBuilder(at, body, tokenizer, plan, name, twice=openai) for at, name in enumerate(names)]
        self.source = source
        self.usage = Usage(len(self.prompt.ids), openai)
        self.prompt_logprobs: list[dict[str, Any] | None] | None = None
        self._completion_log = CompletionLog(service, subject, self.usage.prompt)
        self._chunk_encoder = self.head.chunk_encoder()

    def _take(self, index: int, delta: Delta) -> dict[str, Any]:
        """Return a delta as a streamed choice."""
        builder = self.builders[index]
        self._completion_log.take(delta)
        choice = builder.take(delta)
        if builder.state.choice.stopped:
            self.source.stop(index)
        if delta.prompt_logprobs is not None and index == 0 and self.body.prompt_logprobs is not None:
            self.prompt_logprobs = prompt_logprobs(
                delta.prompt_logprobs, self.body.prompt_logprobs, self.service.text.tokenizer, self.prompt.ids
            )
        if self.service.config.log_outputs != "off" and self.source.counts:
            self._log(builder)
        return choice

    async def pieces(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the streamed choice for each delta, in order of arrival."""
        with count_when_done(self.source, self._count):
            async for index, delta in self.source.deltas():
                yield self._take(index, delta)

    def _log(self, builder: ChoiceBuilder) -> None:
        assert builder.last is not None, "it took a delta"
        self.service.log.delta(self.subject, builder.index, builder.last.piece.text)
        if finish := builder.finish_reason():
            whole = orjson.dumps(builder.message.whole(self.plan.role, self.plan.tools.mode)).decode()
            self.service.log.final(self.subject, builder.index, whole, finish)

    def _count(self) -> None:
        metrics = self.service.metrics
        metrics.request_done(len(self.builders), max(builder.tokens for builder in self.builders))
        self._completion_log.log([builder.state.choice for builder in self.builders])
        if self.plan.tools.calls is not None:
            for builder in self.builders:
                found = bool(builder.message.calls.keys() - builder.message.broken)
                metrics.tool_calls(bool(self.body.stream), found)

    def usage_so_far(self) -> dict[str, Any]:
        self.usage.completion = sum(builder.tokens for builder in self.builders)
        return self.usage.plain()

    def final_usage(self) -> dict[str, Any]:
        self.usage.completion = sum(builder.tokens for builder in self.builders)
        timing = self.builders[0].state.choice.timing
        self.usage.cached, self.usage.written = (timing.cached_tokens, timing.written_tokens) if timing else (0, 0)
        if self.plan.output_format.reasoning is not None:
            self.usage.reasoning = sum(builder.state.reasoning_tokens for builder in self.builders)
        return self.usage.final()

    async def records(self, options: UsageOptions) -> AsyncIterator[bytes]:
        openings = [] if self.source.skips_opening else self._openings()
        for opening in openings:
            yield self._record(opening, options, self.source.event_id() if opening is openings[-1] else "")
        with count_when_done(self.source, self._count):
            async for index, delta in self.source.deltas():
                choice = self._take(index, delta)
                if not self.source.seen:
                    yield self._record(choice, options, self.source.event_id())
        if options.final and not self.source.skips_usage:
            fingerprint = {"system_fingerprint": self.head.fingerprint}
            fields = {**self.head.fields(), "choices": [], "usage": self.final_usage(), **fingerprint}
            yield record(fields, self.source.event_id(usage=True))

    def _openings(self) -> list[dict[str, Any]]:
        """Return the role chunks of all choices in order, followed by the echoed text.

        Clients store choices in a list in order of arrival.
        """
        closed = {"logprobs": None, "finish_reason": None}
        roles = [
            {"index": index, "delta": {"role": self.plan.role, "content": ""}, **closed}
            for index in range(len(self.builders))
        ]
        if not self.plan.echo:
            return roles
        return [*roles, *({**role, "delta": {"content": self.plan.echo}} for role in roles)]

    def _record(self, choice: dict[str, Any], options: UsageOptions, event_id: str) -> bytes:
        more: dict[str, Any] = {}
        if self.body.return_token_ids and "role" in choice["delta"]:
            more["prompt_token_ids"] = list(self.prompt.ids)
        if choice["finish_reason"] is not None and not options.final:
            more["system_fingerprint"] = self.head.fingerprint
        if options.every or options.nulls:
            more["usage"] = self.usage_so_far() if options.every else None
        return self._chunk_encoder.record(choice, more, event_id)

    async def whole(self) -> dict[str, Any]:
        async with self.source:
            async for _ in self.pieces():
                pass
        return {
            **self.head.fields(),
            "choices": [builder.whole() for builder in self.builders],
            "service_tier": None,
            "system_fingerprint": self.head.fingerprint,
            "usage": self.final_usage(),
            "prompt_logprobs": self.prompt_logprobs,
            "prompt_token_ids": list(self.prompt.ids) if self.body.return_token_ids else None,
            "kv_transfer_params": None,
        }


async def create_chat(service: Service, request: Request, body: ChatRequest) -> Response:
    service.model_name(body.model)
    subject = request.state.subject

    def plan(request_id: str) -> ChatPlan:
        return plan_chat(body, served(service, request, request_id))

    def build(planned: ChatPlan, identity: Identity, source: Source) -> ChatReply:
        return ChatReply(service, subject, body, planned, identity, source)

    reply, headers = await start(service, request, body, "chat", plan, build)
    if service.config.log_requests:
        hidden = {"messages", "tools", "documents", "chat_template"}
        shown = body.model_dump(exclude=hidden, exclude_unset=True, mode="json")
        service.log.request(subject, "chat", shown)
    if body.stream:
        records = guarded(reply.records(usage_options(body, service.config.compat)), describe_error(service, request))
        return EventStream(records, reply.source, headers, pause_s=service.config.stream_keep_alive_s)
    whole = await until_disconnect(request, reply.whole())
    headers = {**headers, **load_header(service, request)}
    return Response(orjson.dumps(whole), headers=headers, media_type="application/json")


@router.post("/v1/chat/completions", openapi_extra=json_body(ChatRequest), summary="Chat completion")
async def chat_completions(request: Request) -> Response:
    return await create_chat(service_of(request), request, await read_body(request, ChatRequest))
