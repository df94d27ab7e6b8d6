"""POST /v1/completions (docs/http.md)."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from io import StringIO
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from appliance.observability.log import Subject
from appliance.server.chat.completion_prompt import plan_completion
from appliance.server.chat.parsed import Plan, Prompt
from appliance.server.chat.stream import Choice, Piece, ScoredToken, scored_token
from appliance.server.http.body import json_body, read_body
from appliance.server.http.pipeline import admit, log_request, receive_durable, respond, route_durable
from appliance.server.http.reply import finite, prompt_logprobs, routed_experts, token_name
from appliance.server.http.service import Service, service_of
from appliance.server.openai.chunks import ChunkReply, header
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
    top_k: tuple[int, ...] = ()  # experts per token of each layer, for requests that return them
    lists: LogprobLists | None = None
    first: bool = True
    choice: Choice = field(init=False)
    routes: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.choice = Choice(self.tokenizer, self.prompt.before, self.plan.reading)
        if self.body.logprobs is not None:
            count = -1 if self.body.logprob_token_ids else self.body.logprobs
            self.lists = LogprobLists(count, bool(self.body.return_tokens_as_token_ids))

    def take(self, delta: Delta) -> dict[str, Any]:
        piece = self.choice.take(delta)
        if self.prompt.drops_reply:
            self.choice.tokens = 0
            finish, routes = piece.finish and "length", piece.routes
            piece = Piece(finish=finish, prompt_logprobs=piece.prompt_logprobs, routes=routes)
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
        if self.top_k and self.body.return_routed_experts:
            if self.body.stream:
                fields["routed_experts"] = routed_experts(piece.routes, self.top_k)
            self.routes += piece.routes
        return fields

    def whole(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        choice = _joined(self.index, parts)
        if self.top_k and self.body.return_routed_experts:
            choice["routed_experts"] = routed_experts(self.routes, self.top_k)
        return choice

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


class Completion(ChunkReply):
    """Formatter of one reply."""

    def __init__(
        self, service: Service, subject: Subject, body: CompletionRequest, plan: Plan, identity: Identity
    ) -> None:
        self.body = body
        self.plan = plan
        self.identity = identity
        tokenizer = service.text.tokenizer
        prompts = [prompt for prompt in plan.prompts for _ in prompt.submits]
        shared: tuple[Any, ...] = plan, service.config.routed_experts
        self.builders = [ChoiceBuilder(at, body, tokenizer, prompt, *shared) for at, prompt in enumerate(prompts)]
        head = header(service, identity, "cmpl", "text_completion", service.model_name(body.model))
        prompt_tokens = sum(prompt.tokens for prompt in plan.prompts)
        super().__init__(service, subject, body, head, prompt_tokens, [each.choice for each in self.builders])
        self._parts: list[list[dict[str, Any]]] = [[] for _ in self.builders]  # of a reply that is not streamed
        self._texts = [StringIO() for _ in self.builders]  # so far, if outputs are logged
        self._last: dict[str, Any] = {}

    def fresh(self) -> "Completion":
        return Completion(self.service, self.subject, self.body, self.plan, self.identity)

    def take(self, index: int, delta: Delta) -> dict[str, Any]:
        self._last = choice = self.builders[index].take(delta)
        if not self.body.stream:
            self._parts[index].append(choice)
        return choice

    def logged(self, index: int) -> Iterable[tuple[str, str | None]]:
        self._texts[index].write(self._last["text"])
        return ((self._last["text"], self._last["finish_reason"]),)

    def logged_whole(self, index: int) -> str:
        return self._texts[index].getvalue()

    def final_usage(self) -> dict[str, Any]:
        # One choice per prompt, so that (cached) prompt tokens are counted once for n choices.
        timings = [choice.timing for choice in self.choices[:: self.body.n or 1]]
        usage = self.count_tokens()
        usage.cached = sum(timing.cached_tokens for timing in timings if timing)
        usage.written = sum(timing.written_tokens for timing in timings if timing)
        return usage.final()

    def record(self, piece: dict[str, Any], event_id: str) -> bytes:
        return self.chunk(piece, {}, event_id)

    def whole(self) -> dict[str, Any]:
        return {
            **self.head.fields(),
            "choices": [builder.whole(parts) for builder, parts in zip(self.builders, self._parts, strict=True)],
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
    call = receive_durable(service, request, body, body.model, "completions")
    plan = await asyncio.to_thread(plan_completion, body, call.context)
    await admit(call, plan)
    routed = await route_durable(call, plan.submits)
    log_request(call, body, {"prompt"})
    return await respond(call, body, routed, Completion(service, call.subject, body, plan, routed.identity))


@router.post("/v1/completions", openapi_extra=json_body(CompletionRequest), summary="Text completion")
async def completions(request: Request) -> Response:
    return await create_completion(service_of(request), request, await read_body(request, CompletionRequest))
