"""Formatters of generating routes, with their shared parts: usage, logprobs, and the log line."""

import sys
from abc import ABC, abstractmethod
from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import orjson

from appliance.observability.log import Outcome, Subject
from appliance.observability.metrics import now
from appliance.observability.spans import RequestSpan, output_messages
from appliance.server.chat.stream import Choice
from appliance.server.errors.api import DeadlineExceeded, api_error, error_object, is_unexpected
from appliance.server.http.service import Service
from appliance.server.http.sse import KEEP_ALIVE, record
from appliance.server.schema.common import Streamed
from engine.api.messages import Delta, Logprob
from engine.text import TokenText

LEAST_LOGPROB = -9999.0  # JSON cannot represent -inf


class CompletionLog:
    """Writes the log line at the end of a generation."""

    def __init__(self, service: Service, subject: Subject, prompt_tokens: int, model: str | None) -> None:
        """model: as the request names it."""
        self._service, self._subject, self._prompt_tokens, self._model = service, subject, prompt_tokens, model
        self._began_s = subject.arrived_s or now()
        self._first_s: float | None = None

    def take(self, delta: Delta) -> None:
        """Record the time of the first token."""
        if self._first_s is None and delta.ids:
            self._first_s = now()

    def log(self, choices: Sequence[Choice]) -> None:
        """Log the end of a generation. Also called while an exception is being handled."""
        error = sys.exc_info()[1]
        unfinished = "cancelled"
        if isinstance(error, Exception):
            unfinished = "deadline" if isinstance(error, DeadlineExceeded) else "error"
        first_s = self._first_s
        outcome = Outcome(
            model=self._service.reply_name(self._model),
            prompt_tokens=self._prompt_tokens,
            completion_tokens=sum(choice.tokens for choice in choices),
            finish_reason=",".join(choice.finish or unfinished for choice in choices),
            ttft_s=None if first_s is None else round(first_s - self._began_s, 4),
            seconds=round(now() - self._began_s, 4),
        )
        self._service.log.completed(self._subject, outcome)
        if self._subject.span is not None:
            self._subject.span.update(
                {
                    "gen_ai.response.model": outcome.model,
                    "gen_ai.usage.input_tokens": outcome.prompt_tokens,
                    "gen_ai.usage.output_tokens": outcome.completion_tokens,
                    "gen_ai.response.finish_reasons": [choice.finish or unfinished for choice in choices],
                    "gen_ai.response.time_to_first_chunk": outcome.ttft_s,
                }
            )


Piece = TypeVar("Piece")


class Formatter(ABC, Generic[Piece]):
    """Formatter of one reply: takes deltas and returns pieces in the format of its route.

    It reads no source and writes only log lines and metrics. Streams, complete replies and generations without a client
    (durable.py) therefore use the same formatter.
    """

    def __init__(
        self, service: Service, subject: Subject, body: Streamed, prompt_tokens: int, choices: Sequence[Choice]
    ) -> None:
        self.service = service
        self.subject = subject
        self.choices = choices
        self.completion_log = CompletionLog(service, subject, prompt_tokens, body.model)
        self._streamed = bool(body.stream)

    @abstractmethod
    def take(self, index: int, delta: Delta) -> Piece:
        """Add a delta of choice `index` to the complete reply, and return its piece of a stream."""

    def check(self) -> None:
        """Raise an error if the reply ended in a way that the API cannot represent. Called after the last delta."""

    # Metrics and logs

    def calls_found(self) -> Sequence[bool]:
        """Return for each choice if it calls a tool. Empty if the request offers none."""
        return ()

    @abstractmethod
    def logged(self, index: int) -> Iterable[tuple[str, str | None]]:
        """Return the log lines of the last delta of a choice: text, and the finish reason or None."""

    @abstractmethod
    def logged_whole(self, index: int) -> str:
        """Return the text of the log line for the complete output of a choice."""

    def message_parts(self, index: int) -> list[dict[str, Any]]:
        """Return the complete output of a choice as the parts of a message in a span."""
        return [{"type": "text", "content": self.logged_whole(index)}]

    def log_output(self, index: int) -> None:
        """Log the last delta of a choice, and at its end the complete output, if outputs are logged."""
        span = self.subject.span
        is_traced = span is not None and span.has_content  # some formatters collect the text as it is logged
        if self.service.config.observability.log_outputs == "off" and not is_traced:
            return
        for text, finish in self.logged(index):
            self.service.log.delta(self.subject, index, text)
            if finish:
                self.service.log.final(self.subject, index, self.logged_whole(index), finish)

    def count(self) -> None:
        """Count the request in metrics and log its end. Also called while an exception is being handled."""
        metrics = self.service.metrics
        metrics.request_done(len(self.choices), max(choice.tokens for choice in self.choices))
        self.completion_log.log(self.choices)
        span = self.subject.span
        if span is not None and span.has_content:
            finished = [(self.message_parts(index), choice.finish) for index, choice in enumerate(self.choices)]
            span.update({"gen_ai.output.messages": output_messages(finished)})
        for found in self.calls_found():
            metrics.tool_calls(self._streamed, found)


class Reply(Formatter[Piece]):
    """Formatter that also renders a stream of records and the complete object."""

    keep_alive: ClassVar[bytes] = KEEP_ALIVE
    terminator: ClassVar[bytes] = b""
    """Last record of every stream, also after an error."""

    @abstractmethod
    def fresh(self) -> "Reply[Piece]":
        """Return a formatter of the same reply that has taken no delta."""

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """Return the complete reply."""

    def logged_whole(self, index: int) -> str:
        return orjson.dumps(self.whole()).decode()

    # Records of a stream. The event ID is empty if the stream cannot be resumed.

    def opening(self, event_id: str) -> Iterable[bytes]:
        """Return the records before the first delta. The last one has the event ID."""
        return ()

    @abstractmethod
    def record(self, piece: Piece, event_id: str) -> bytes:
        """Return the record of a piece, or b"" if it has none."""

    def closing(self, event_id: str) -> Iterable[bytes]:
        """Return the records after the last delta."""
        return ()

    def failure(self, error: Exception) -> bytes:
        """Return the record that reports an error, and log an unexpected error."""
        return record(error_fields(self.service, self.subject, error))


@dataclass
class Usage:
    """Token counts of a request so far."""

    prompt: int
    details: bool  # include details; depends on the compat profile
    completion: int = 0
    cached: int = 0  # prompt tokens that were read from the prefix cache
    written: int = 0  # prompt tokens that were written to the prefix cache
    reasoning: int | None = None  # None: the model's reasoning is not parsed
    drafts: tuple[int, int] | None = None  # accepted and rejected draft tokens; None without speculative decoding

    def plain(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "total_tokens": self.prompt + self.completion,
            "completion_tokens": self.completion,
        }

    def final(self) -> dict[str, Any]:
        fields = self.plain()
        if self.details:
            fields["prompt_tokens_details"] = {"cached_tokens": self.cached, "cache_write_tokens": self.written}
            details: dict[str, int] = {}
            if self.reasoning is not None:
                details["reasoning_tokens"] = self.reasoning
            if self.drafts is not None:
                details["accepted_prediction_tokens"], details["rejected_prediction_tokens"] = self.drafts
            if details:
                fields["completion_tokens_details"] = details
        return fields


def finite(logprob: float) -> float:
    """Clamp a logprob to a value that JSON can represent."""
    return max(LEAST_LOGPROB, logprob)


def token_name(token: int, text: str, as_id: bool) -> str:
    return f"token_id:{token}" if as_id else text


def routed_experts(routes: Iterable[bytes], top_k: Sequence[int]) -> dict[str, Any]:
    """Return the experts of tokens as an object: `data` is base64 of little-endian uint16 [tokens, Σ top_k]."""
    joined = b"".join(routes)
    return {"tokens": len(joined) // (2 * sum(top_k)), "top_k": list(top_k), "data": b64encode(joined).decode()}


def prompt_logprobs(
    entries: Sequence[Logprob | None] | None, count: int, tokenizer: Any, ids: Sequence[int]
) -> list[dict[str, Any] | None] | None:
    """Return `{id: {logprob, rank, decoded_token}}` per position, the actual token first.

    The first position is null.
    """
    if entries is None:
        return None
    strings = TokenText(tokenizer)
    result: list[dict[str, Any] | None] = []
    for token, entry in zip(ids, entries, strict=True):
        if entry is not None:
            ranked = zip(entry.top_ids, entry.top_logprobs, strict=True)
            top = [(each, value, rank) for rank, (each, value) in enumerate(ranked, 1)]
            kept = top if count < 0 else top[:count]
            own = (entry.token, entry.logprob, entry.rank)
            result.append(
                {
                    str(each): {"logprob": finite(value), "rank": rank, "decoded_token": strings.string(each)}
                    for each, value, rank in [own, *(other for other in kept if other[0] != entry.token)]
                }
            )
        else:
            result.append(None)
        strings.push(token)
    return result


def record_failure(span: RequestSpan | None, error: Exception) -> None:
    """Record in a request's span that it failed, by the type of the error: messages may quote the prompt."""
    if span is not None:
        failure = api_error(error)
        span.fail(type(failure).__name__, is_client_error=failure.status < 500)


def error_fields(service: Service, subject: Subject, error: Exception) -> dict[str, Any]:
    """Return the error record of a stream, and log an unexpected error with its traceback."""
    record_failure(subject.span, error)
    if is_unexpected(error):
        service.log.unexpected(subject, error)
    return error_object(error, subject.request_id)
