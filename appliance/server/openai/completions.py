"""POST /v1/completions (docs/http.md)."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from io import StringIO
from typing import Any

import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response

from appliance.observability.log import Subject
from appliance.server.chat.prompt import Plan, Prompt, plan_completion
from appliance.server.chat.stream import Choice, Piece, ScoredToken, scored_token
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
from appliance.server.reply_store.records import Identity
from appliance.server.schema.completions import CompletionRequest
from engine.api.messages import Delta, Logprob
from engine.text import IncrementalDecoder, Tokenizer, TokenText, decode_all

router = APIRouter()


@dataclass
class LogprobLists:
    """The four parallel logprob lists of the completions API. `offset` continues across chunks."""

    count: int
    as_ids: bool
    offset: int = 0

    def of(self, tokens: Sequence[ScoredToken | str]) -> dict[str, Any]:
        """Return the lists for these tokens.

        A bare string is a token without a logprob, such as the first prompt token.
        """
        lists: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for token in tokens:
            name = token if isinstance(token, str) else token_name(token.token, token.text, self.as_ids)
            lists["text_offset"].append(self.offset)
            lists["tokens"].append(name)
            lists["token_logprobs"].append(None if isinstance(token, str) else finite(token.logprob))
            lists["top_logprobs"].append(None if isinstance(token, str) else self._top(token))
            self.offset += len(name)
        return lists

    def _top(self, token: ScoredToken) -> dict[str, float]:
        """Return the token and the most likely ones.

        Tokens with equal text (partial characters) are distinguished by ID.
        """
        kept = token.top if self.count < 0 else token.top[: self.count]
        top: dict[str, float] = {}
        for each, text, value in [
            (token.token, token.text, token.logprob),
            *(one for one in kept if one[0] != token.token),
        ]:
            name = token_name(each, text, self.as_ids)
            top[f"token_id:{each}" if name in top else name] = finite(value)
        return top


@dataclass
class ChoiceBuilder:
    """Builds the output of one choice. `take` returns a delta as a choice of the reply."""

    index: int
    body: CompletionRequest
    tokenizer: Tokenizer
    prompt: Prompt
    plan: Plan
    lists: LogprobLists | None = None
    first: bool = True
    choice: Choice = field(init=False)

    def __post_init__(self) -> None:
        self.choice = Choice(self.tokenizer, self.prompt.before, self.plan.reading)
        if self.body.logprobs is not None:
            count = -1 if self.body.logprob_token_ids else self.body.logprobs
            self.lists = LogprobLists(count, bool(self.body.return_tokens_as_token_ids))

    def take(self, delta: Delta) -> dict[str, Any]:
        piece = self.choice.take(delta)
        if self.prompt.drops_reply:
            self.choice.tokens = 0
            piece = Piece(finish=piece.finish and "length", prompt_logprobs=piece.prompt_logprobs)
        text, tokens = piece.text, list[ScoredToken | str](piece.logprobs)
        fields: dict[str, Any] = {"index": self.index}
        if self.first:
            self.first = False
            if self.body.echo:
                text = self._prompt_text() + text
                tokens = [*self._prompt_tokens(piece.prompt_logprobs), *tokens] if self.lists else tokens
            fields |= self._once(piece)
        fields["text"] = text
        fields["logprobs"] = self.lists.of(tokens) if self.lists else None
        fields["finish_reason"] = piece.finish
        if piece.finish is not None:
            fields["stop_reason"] = piece.stop_reason
        if self.body.return_token_ids:
            fields["token_ids"] = list(piece.ids)
        return fields

    def _once(self, piece: Piece) -> dict[str, Any]:
        """Return the fields that only the first chunk carries."""
        fields: dict[str, Any] = {}
        if self.body.return_token_ids:
            fields["prompt_token_ids"] = list(self.prompt.ids)
        if self.body.prompt_logprobs is not None and not self.body.stream:
            fields["prompt_logprobs"] = prompt_logprobs(
                piece.prompt_logprobs, self.body.prompt_logprobs, self.tokenizer, self.prompt.ids
            )
        return fields

    def _prompt_text(self) -> str:
        return decode_all(
            IncrementalDecoder(self.tokenizer, skip_special_tokens=self.body.skip_special_tokens), self.prompt.ids
        )

    def _prompt_tokens(self, entries: Sequence[Logprob | None] | None) -> list[ScoredToken | str]:
        strings = TokenText(self.tokenizer)
        as_ids = bool(self.body.return_tokens_as_token_ids)
        return [
            token_name(token, strings.push(token), as_ids) if entry is None else scored_token(entry, strings)
            for token, entry in zip(self.prompt.ids, entries or [None] * len(self.prompt.ids), strict=True)
        ]


class Completion:
    """One running request: its choices, their merged stream and the usage so far."""

    def __init__(
        self,
        service: Service,
        subject: Subject,
        body: CompletionRequest,
        plan: Plan,
        identity: Identity,
        source: Source,
    ) -> None:
        self.service = service
        self.body = body
        self.head = header(service, identity, "cmpl", "text_completion", service.model_name(body.model))
        self.subject = subject
        tokenizer = service.text.tokenizer
        prompts = [prompt for prompt in plan.prompts for _ in prompt.submits]
        self.builders = [ChoiceBuilder(index, body, tokenizer, prompt, plan) for index, prompt in enumerate(prompts)]
        self.source = source
        prompt_tokens = sum(prompt.tokens for prompt in plan.prompts)
        self.usage = Usage(prompt_tokens, service.config.compat == "openai")
        self._texts = [StringIO() for _ in self.builders]
        self._completion_log = CompletionLog(service, subject, prompt_tokens)
        self._chunk_encoder = self.head.chunk_encoder()

    def _take(self, index: int, delta: Delta) -> dict[str, Any]:
        """Return a delta as a streamed choice."""
        builder = self.builders[index]
        self._completion_log.take(delta)
        choice = builder.take(delta)
        if builder.choice.stopped:
            self.source.stop(index)
        if self.service.config.log_outputs != "off" and self.source.counts:
            self._log(choice)
        return choice

    def _count(self) -> None:
        self.service.metrics.request_done(len(self.builders), max(each.choice.tokens for each in self.builders))
        self._completion_log.log([each.choice for each in self.builders])

    async def pieces(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the streamed choice for each delta, in order of arrival."""
        with count_when_done(self.source, self._count):
            async for index, delta in self.source.deltas():
                yield self._take(index, delta)

    def _log(self, choice: dict[str, Any]) -> None:
        index, text = choice["index"], choice["text"]
        self._texts[index].write(text)
        self.service.log.delta(self.subject, index, text)
        if choice["finish_reason"]:
            self.service.log.final(self.subject, index, self._texts[index].getvalue(), choice["finish_reason"])

    def usage_so_far(self) -> dict[str, Any]:
        self.usage.completion = sum(builder.choice.tokens for builder in self.builders)
        return self.usage.plain()

    def final_usage(self) -> dict[str, Any]:
        self.usage.completion = sum(builder.choice.tokens for builder in self.builders)
        timings = [builder.choice.timing for builder in self._first_of_prompts()]
        self.usage.cached = sum(timing.cached_tokens for timing in timings if timing)
        self.usage.written = sum(timing.written_tokens for timing in timings if timing)
        return self.usage.final()

    def _first_of_prompts(self) -> list[ChoiceBuilder]:
        """Return one choice per prompt, so that (cached) prompt tokens are counted once for n choices."""
        return self.builders[:: self.body.n or 1]

    async def records(self, options: UsageOptions) -> AsyncIterator[bytes]:
        with count_when_done(self.source, self._count):
            async for index, delta in self.source.deltas():
                choice = self._take(index, delta)
                if not self.source.seen:
                    more = (
                        {"usage": self.usage_so_far() if options.every else None}
                        if options.every or options.nulls
                        else {}
                    )
                    yield self._chunk_encoder.record(choice, more, self.source.event_id())
        if options.final and not self.source.skips_usage:
            fingerprint = {"system_fingerprint": self.head.fingerprint}
            chunk = {**self.head.fields(), "choices": [], "usage": self.final_usage(), **fingerprint}
            yield record(chunk, self.source.event_id(usage=True))

    async def whole(self) -> dict[str, Any]:
        async with self.source:
            parts: list[list[dict[str, Any]]] = [[] for _ in self.builders]
            async for choice in self.pieces():
                parts[choice["index"]].append(choice)
        return {
            **self.head.fields(),
            "choices": [_joined(index, fields) for index, fields in enumerate(parts)],
            "service_tier": None,
            "system_fingerprint": self.head.fingerprint,
            "usage": self.final_usage(),
            "kv_transfer_params": None,
        }


def _joined(index: int, parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Join the streamed parts of a choice to the complete choice."""
    whole: dict[str, Any] = {"index": index, "text": "", "logprobs": None, "prompt_logprobs": None, "stop_reason": None}
    for part in parts:
        whole["text"] += part["text"]
        for name in ("finish_reason", "stop_reason", "prompt_logprobs", "prompt_token_ids"):
            if name in part:
                whole[name] = part[name]
        if "token_ids" in part:
            whole["token_ids"] = [*whole.get("token_ids", ()), *part["token_ids"]]
        if part["logprobs"] is not None:
            lists = whole["logprobs"] or {name: [] for name in part["logprobs"]}
            whole["logprobs"] = {name: [*lists[name], *part["logprobs"][name]] for name in lists}
    return whole


async def create_completion(service: Service, request: Request, body: CompletionRequest) -> Response:
    service.model_name(body.model)
    subject = request.state.subject

    def plan(request_id: str) -> Plan:
        return plan_completion(body, served(service, request, request_id))

    def build(planned: Plan, identity: Identity, source: Source) -> Completion:
        return Completion(service, subject, body, planned, identity, source)

    completion, headers = await start(service, request, body, "completions", plan, build)
    if service.config.log_requests:
        shown = body.model_dump(exclude={"prompt"}, exclude_unset=True, mode="json")
        service.log.request(subject, "completions", shown)
    if body.stream:
        records = guarded(
            completion.records(usage_options(body, service.config.compat)), describe_error(service, request)
        )
        return EventStream(records, completion.source, headers, pause_s=service.config.stream_keep_alive_s)
    reply = await until_disconnect(request, completion.whole())
    headers = {**headers, **load_header(service, request)}
    return Response(orjson.dumps(reply), headers=headers, media_type="application/json")


@router.post("/v1/completions", openapi_extra=json_body(CompletionRequest), summary="Text completion")
async def completions(request: Request) -> Response:
    return await create_completion(service_of(request), request, await read_body(request, CompletionRequest))
