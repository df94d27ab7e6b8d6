"""A running response: its object, its events in order, and its end (docs/http.md, Responses)."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec
import orjson

from appliance.observability.log import Subject
from appliance.output_formats.events import Content
from appliance.server.chat.parsed import ChatPlan
from appliance.server.chat.stream import ChatChoice, ScoredToken
from appliance.server.errors.api import Unavailable, api_error
from appliance.server.http.reply import Formatter, finite
from appliance.server.http.service import DRAIN_RETRY_AFTER_S, Service
from appliance.server.openai.responses.events import Fields, Output
from appliance.server.openai.responses.request import custom_tools
from appliance.server.reply_store.records import Identity
from appliance.server.schema.responses import LOGPROBS, ResponsesRequest
from engine.api.messages import Delta

PREFIX = "resp_"
State = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
TERMINAL: dict[str, str] = {
    "completed": "response.completed",
    "incomplete": "response.incomplete",
    "failed": "response.failed",
    "cancelled": "response.incomplete",  # the API has no event for cancellation; the status field shows it
}
_CODES = {422: "invalid_prompt", 400: "invalid_prompt"}


@dataclass(frozen=True)
class ParsedResponse:
    """The request behind one response."""

    body: ResponsesRequest
    identity: Identity
    items: tuple[Fields, ...]  # all items before the reply
    own: int  # index of the first item that came with this request
    owner: str  # name for the API key
    stored: bool  # the response can be retrieved later

    @property
    def id(self) -> str:
        return PREFIX + self.identity.request_id

    @property
    def background(self) -> bool:
        return bool(self.body.background)


def tokens_of(delta: Delta) -> Iterator[Delta]:
    """Split a delta into single tokens. The last one carries the finish reason."""
    if len(delta.ids) < 2:
        yield delta
        return
    last = len(delta.ids) - 1
    for at in range(len(delta.ids)):
        yield msgspec.structs.replace(
            delta,
            ids=delta.ids[at : at + 1],
            logprobs=delta.logprobs[at : at + 1],
            prompt_logprobs=None,
            finish=delta.finish if at == last else None,
            stop_reason=delta.stop_reason if at == last else None,
        )


def _logprob(token: ScoredToken, count: int) -> Fields:
    def fields(text: str, value: float) -> Fields:
        return {"token": text, "logprob": finite(value), "bytes": list(text.encode())}

    top = token.top if count < 0 else token.top[:count]
    return {**fields(token.text, token.logprob), "top_logprobs": [fields(text, value) for _, text, value in top]}


class ResponseReply(Formatter[list[Fields]]):
    """Formatter of one response. A piece is the events of a delta, up to the end of the last item."""

    def __init__(self, service: Service, subject: Subject, parsed: ParsedResponse, plan: ChatPlan) -> None:
        self.parsed = parsed
        self.state: State = "queued" if parsed.background else "in_progress"
        self.failure: Exception | None = None
        self._plan = plan
        self._choice = ChatChoice(service.text.tokenizer, plan)
        body = parsed.body
        self._output = Output(parsed.identity.salt, custom_tools(body.tools), shows_reasoning=body.include_reasoning)
        hidden = not body.include_reasoning and plan.output_format.reasoning is not None
        self._scored = LOGPROBS in (body.include or ()) and not hidden
        self._finish: str | None = None
        self._texts: list[str] = []  # of the tokens of the last delta
        self._completed_at: int | None = None
        super().__init__(service, subject, body, len(plan.prompts[0].ids), [self._choice.choice])

    def take(self, index: int, delta: Delta) -> list[Fields]:
        """Return the events of each token, so that the same tokens give the same events however they are grouped."""
        events: list[Fields] = []
        self._texts = []
        for token in tokens_of(delta):
            if token.ids or token.finish is not None:
                events += self._take(token)
            if self._choice.choice.stopped:
                break
        return events

    def _take(self, token: Delta) -> Iterator[Fields]:
        if self.state == "queued":
            self.state = "in_progress"
            yield {"type": "response.in_progress", "response": self.document()}
        thought = self._choice.is_reasoning
        taken = self._choice.take(token)
        count = self.parsed.body.top_logprobs or 0
        shows_logprobs = self._scored and (not thought or any(isinstance(each, Content) for each in taken.events))
        logprobs = [_logprob(each, count) for each in taken.piece.logprobs] if shows_logprobs else []
        yield from self._output.take(taken.events, logprobs)
        self._finish = taken.piece.finish
        self._texts.append(taken.piece.text)
        if self._finish in ("stop", "length"):
            self.state = "completed" if self._finish == "stop" else "incomplete"
            yield from self._output.end(self.state)

    def logged(self, index: int) -> Iterator[tuple[str, str | None]]:
        """Yield the text of each token, so that log lines do not depend on how tokens are grouped."""
        for text in self._texts[:-1]:
            yield text, None
        if self._texts:
            yield self._texts[-1], self._finish

    def logged_whole(self, index: int) -> str:
        return orjson.dumps(self._output.items()).decode()

    def calls_found(self) -> Sequence[bool]:
        return () if self._plan.tools.calls is None else (self._output.calls > self._output.broken_calls,)

    # The final object

    def end(self) -> Fields:
        """Return the object of a reply whose deltas have ended. An aborted reply is reported as failed."""
        if self._finish not in ("stop", "length"):
            return self.fail(Unavailable("The service is shutting down; repeat the request.", DRAIN_RETRY_AFTER_S))
        self._completed_at = int(time.time()) if self.state == "completed" else None
        return self.document()

    def closings(self) -> list[Fields]:
        """Return the events that close an item that was still open when the reply ended."""
        return list(self._output.close())

    def fail(self, error: Exception) -> Fields:
        self.closings()
        self.state, self.failure = "failed", error
        return self.document()

    def cancel(self) -> Fields:
        self.closings()
        self.state = "cancelled"
        return self.document()

    def document(self) -> Fields:
        """Return the current response object."""
        body, defaults = self.parsed.body, self.service.config.sampling
        over = self.state in TERMINAL

        def chosen(value: float | None, default: float) -> float:
            return default if value is None else value

        fields: Fields = {
            "id": self.parsed.id,
            "object": "response",
            "created_at": self.parsed.identity.created,
            "completed_at": self._completed_at,
            "status": self.state,
            "background": self.parsed.background,
            "error": None if self.failure is None else _error_fields(self.failure),
            "incomplete_details": {"reason": "max_output_tokens"} if self.state == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "model": self.service.reply_name(body.model),
            "output": self._output.items(),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "prompt": None,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": _reasoning(body),
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",  # the only tier
            "store": self.parsed.stored,
            "temperature": chosen(body.temperature, defaults.temperature),
            "text": _text(body),
            "tool_choice": _tool_choice(body),
            "tools": [_tool(tool) for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": chosen(body.top_p, defaults.top_p),
            "presence_penalty": chosen(body.presence_penalty, defaults.presence_penalty),
            "frequency_penalty": chosen(body.frequency_penalty, defaults.frequency_penalty),
            "truncation": body.truncation or "disabled",
            "usage": self._usage() if over else None,
            "user": body.user,
            "metadata": body.metadata or {},
        }
        return fields | ({"kv_transfer_params": None} if self.service.config.endpoints.compat == "vllm" else {})

    def _usage(self) -> Fields:
        timing = self._choice.choice.timing
        cached, written = (timing.cached_tokens, timing.written_tokens) if timing else (0, 0)
        prompt, shown = len(self._plan.prompts[0].ids), self._choice.choice.tokens
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": written},
            "output_tokens": shown,
            "output_tokens_details": {"reasoning_tokens": self._choice.reasoning_tokens},
            "total_tokens": prompt + shown,
        }

    def openings(self) -> list[Fields]:
        """Return the events before the first token."""
        kinds = ["response.created", "response.queued" if self.parsed.background else "response.in_progress"]
        return [{"type": kind, "response": self.document()} for kind in kinds]


def with_prompt(plan: ChatPlan, ids: tuple[int, ...]) -> ChatPlan:
    """Return the parsed request with the original prompt, since a chat template may render the current time."""
    return replace(plan, prompts=(replace(plan.prompts[0], ids=ids),))


def _error_fields(error: Exception) -> Fields:
    shown = api_error(error)
    return {"code": _CODES.get(shown.status, "server_error"), "message": shown.message}


def _reasoning(body: ResponsesRequest) -> Fields:
    given = body.reasoning.model_dump(exclude_unset=True) if body.reasoning else {}
    return {"effort": None, "summary": None, **given}


def _text(body: ResponsesRequest) -> Fields:
    form = body.text.format if body.text else None
    fields: Fields = {"format": {"type": "text"}}
    if form is not None and form.type == "json_schema":
        named = {"name": form.name, "description": form.description, "schema": form.schema_, "strict": form.strict}
        fields = {"format": {"type": form.type, **named}}
    elif form is not None:
        fields = {"format": {"type": form.type}}
    verbosity = body.text.verbosity if body.text else None
    return fields | ({"verbosity": verbosity} if verbosity else {})


def _tool_choice(body: ResponsesRequest) -> Any:
    if body.tool_choice is None:
        return "auto"
    return body.tool_choice


def _tool(tool: Fields) -> Fields:
    if tool.get("type") != "function":
        return tool
    return {"type": "function", "name": None, "description": None, "parameters": None, "strict": None, **tool}
