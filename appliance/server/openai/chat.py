"""POST /v1/chat/completions (docs/http.md)."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from io import StringIO
from typing import Any

import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response

from appliance.observability.log import Subject
from appliance.observability.spans import message_parts
from appliance.output_formats.events import CallArguments, CallBroken, CallStart, Content, Event, ReasoningText
from appliance.server.chat.chat_prompt import plan_chat
from appliance.server.chat.media import chat_media
from appliance.server.chat.parsed import ChatPlan
from appliance.server.chat.stream import ChatChoice, ChatPiece, ScoredToken
from appliance.server.chat.tools import ToolUse
from appliance.server.http.body import json_body, read_body
from appliance.server.http.media import with_media
from appliance.server.http.pipeline import admit, log_request, receive_durable, respond, route_durable
from appliance.server.http.reply import finite, prompt_logprobs, routed_experts, token_name
from appliance.server.http.service import Service, service_of
from appliance.server.openai.call_shapes import CustomCall, FunctionCall, joined
from appliance.server.openai.chunks import ChunkReply, header
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
        self,
        index: int,
        body: ChatRequest,
        tokenizer: Tokenizer,
        plan: ChatPlan,
        name: str,
        *,
        twice: bool,
        top_k: tuple[int, ...] = (),
    ) -> None:
        """top_k: experts per token of each layer, for requests that return them."""
        self.index = index
        self.routes: list[bytes] = []
        self.body = body
        self.plan = plan
        self.state = ChatChoice(tokenizer, plan)
        self.message = Message(body.include_reasoning, name, tools=plan.tools, twice=twice)
        self.message.content.write(plan.echo)
        self._is_text = plan.output_format.markers() == ()
        # Hidden reasoning text must not be readable from logprobs, token IDs and experts.
        shows_tokens = body.include_reasoning or plan.output_format.reasoning is None
        self._scores = bool(body.logprobs) and shows_tokens
        self._tells_ids = bool(body.return_token_ids) and shows_tokens
        self.top_k = top_k if body.return_routed_experts and shows_tokens else ()
        self.logprobs: list[Any] = []
        self.ids: list[int] = []
        self.last: ChatPiece | None = None

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
        if self.top_k:
            fields["routed_experts"] = routed_experts(piece.routes, self.top_k)
            self.routes += piece.routes
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
        if self.top_k:
            choice["routed_experts"] = routed_experts(self.routes, self.top_k)
        return choice


class ChatReply(ChunkReply):
    """Formatter of one reply."""

    def __init__(
        self, service: Service, subject: Subject, body: ChatRequest, plan: ChatPlan, identity: Identity
    ) -> None:
        self.body = body
        self.plan = plan
        self.prompt = plan.prompts[0]
        self.identity = identity
        names = [f"{identity.salt}/{index}" for index in range(len(self.prompt.submits))]
        openai, tokenizer = service.config.endpoints.compat == "openai", service.text.tokenizer
        shared: dict[str, Any] = {"twice": openai, "top_k": service.config.routed_experts}
        self.builders = [ChoiceBuilder(at, body, tokenizer, plan, name, **shared) for at, name in enumerate(names)]
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        head = header(service, identity, "chatcmpl", kind, service.model_name(body.model))
        choices = [builder.state.choice for builder in self.builders]
        super().__init__(service, subject, body, head, len(self.prompt.ids), choices)
        self.prompt_logprobs: list[dict[str, Any] | None] | None = None

    def fresh(self) -> "ChatReply":
        return ChatReply(self.service, self.subject, self.body, self.plan, self.identity)

    def take(self, index: int, delta: Delta) -> dict[str, Any]:
        choice = self.builders[index].take(delta)
        if delta.prompt_logprobs is not None and index == 0 and self.body.prompt_logprobs is not None:
            self.prompt_logprobs = prompt_logprobs(
                delta.prompt_logprobs, self.body.prompt_logprobs, self.service.text.tokenizer, self.prompt.ids
            )
        return choice

    def logged(self, index: int) -> Iterable[tuple[str, str | None]]:
        builder = self.builders[index]
        assert builder.last is not None, "it took a delta"
        return ((builder.last.piece.text, builder.finish_reason()),)

    def logged_whole(self, index: int) -> str:
        return orjson.dumps(self.builders[index].message.whole(self.plan.role, self.plan.tools.mode)).decode()

    def message_parts(self, index: int) -> list[dict[str, Any]]:
        builder = self.builders[index]
        return message_parts(builder.message.whole(self.plan.role, self.plan.tools.mode))

    def calls_found(self) -> Sequence[bool]:
        if self.plan.tools.calls is None:
            return ()
        return [bool(builder.message.calls.keys() - builder.message.broken) for builder in self.builders]

    def final_usage(self) -> dict[str, Any]:
        usage, timing = self.count_tokens(), self.choices[0].timing
        usage.cached, usage.written = (timing.cached_tokens, timing.written_tokens) if timing else (0, 0)
        if self.plan.output_format.reasoning is not None:
            usage.reasoning = sum(builder.state.reasoning_tokens for builder in self.builders)
        return usage.final()

    def opening(self, event_id: str) -> Iterable[bytes]:
        """Return the role chunks of all choices in order, followed by the echoed text.

        Clients store choices in a list in order of arrival.
        """
        closed = {"logprobs": None, "finish_reason": None}
        chunks = [
            {"index": index, "delta": {"role": self.plan.role, "content": ""}, **closed}
            for index in range(len(self.builders))
        ]
        if self.plan.echo:
            chunks += [{**role, "delta": {"content": self.plan.echo}} for role in chunks]
        return [*(self.record(chunk, "") for chunk in chunks[:-1]), self.record(chunks[-1], event_id)]

    def record(self, piece: dict[str, Any], event_id: str) -> bytes:
        more: dict[str, Any] = {}
        if self.body.return_token_ids and "role" in piece["delta"]:
            more["prompt_token_ids"] = list(self.prompt.ids)
        if piece["finish_reason"] is not None and not self.options.final:
            more["system_fingerprint"] = self.head.fingerprint
        return self.chunk(piece, more, event_id)

    def whole(self) -> dict[str, Any]:
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
    call = receive_durable(service, request, body, body.model, "chat")
    known = service.text.known_media
    media = chat_media(body.messages, known, body.mm_processor_kwargs, io=body.media_io_kwargs)
    call = await with_media(call, media)
    plan = await asyncio.to_thread(plan_chat, body, call.context)
    await admit(call, plan)
    routed = await route_durable(call, plan.submits)
    log_request(call, body, {"messages", "tools", "documents", "chat_template"})
    return await respond(call, body, routed, ChatReply(service, call.subject, body, plan, routed.identity))


@router.post("/v1/chat/completions", openapi_extra=json_body(ChatRequest), summary="Chat completion")
async def chat_completions(request: Request) -> Response:
    return await create_chat(service_of(request), request, await read_body(request, ChatRequest))
