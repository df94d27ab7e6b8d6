"""Spans of OpenTelemetry: one per request, one for the loading of its media, and three per sequence with its times in
the queue, prefill and decode.

Names and attributes follow the semantic conventions for HTTP servers and generative AI
(https://opentelemetry.io/docs/specs/semconv/gen-ai/); attributes without a convention begin with `slipway.`.
"""

import json
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from appliance.observability.trace import SAMPLED, Trace

Value = bool | int | float | str | Sequence[str]

SERVER, INTERNAL = 2, 1  # SpanKind
OK, ERROR = 0, 2  # Status.code: OK is "unset", as the conventions require for success
HAS_IS_REMOTE, IS_REMOTE = 0x100, 0x200  # SpanFlags of the parent
MAX_SEQUENCES = 64  # of a request with spans of their own; a request for embeddings may have thousands
MAX_TEXT = 65_536  # characters of an attribute
MAX_EVENTS = 64  # of one span


@dataclass(frozen=True)
class SpanEvent:
    """An event at a time of the monotonic clock, in seconds."""

    at_s: float
    name: str
    attributes: Mapping[str, Value] = field(default_factory=dict)


@dataclass
class Span:
    """One span. Times are seconds of the monotonic clock; `offset_ns` converts them to the system's clock."""

    name: str
    trace_id: str
    parent_id: str | None
    start_s: float
    offset_ns: int
    end_s: float = 0.0
    kind: int = INTERNAL
    span_id: str = field(default_factory=lambda: secrets.token_hex(8))
    state: str | None = None
    is_remote: bool = False  # the parent is in another process
    attributes: dict[str, Value] = field(default_factory=dict)
    events: list[SpanEvent] = field(default_factory=list)
    error: str = ""  # description of the failure

    def encoded(self) -> dict[str, Any]:
        """Return the span in OTLP's JSON encoding."""
        kept = self.events[:MAX_EVENTS]
        optional = {
            "parentSpanId": self.parent_id,
            "traceState": self.state,
            "droppedEventsCount": len(self.events) - len(kept),
        }
        return {
            "traceId": self.trace_id,
            "spanId": self.span_id,
            **{name: value for name, value in optional.items() if value},
            "flags": SAMPLED | HAS_IS_REMOTE | (IS_REMOTE if self.is_remote else 0),
            "name": self.name,
            "kind": self.kind,
            "startTimeUnixNano": self._unix_ns(self.start_s),
            "endTimeUnixNano": self._unix_ns(max(self.start_s, self.end_s)),
            "attributes": encode_attributes(self.attributes),
            "events": [
                {
                    "timeUnixNano": self._unix_ns(event.at_s),
                    "name": event.name,
                    "attributes": encode_attributes(event.attributes),
                }
                for event in kept
            ],
            "status": {"code": ERROR, "message": self.error[:MAX_TEXT]} if self.error else {"code": OK},
        }

    def _unix_ns(self, at_s: float) -> str:
        return str(self.offset_ns + round(at_s * 1e9))  # 64-bit integers are texts in JSON


def encode_attributes(attributes: Mapping[str, Value]) -> list[dict[str, Any]]:
    """Return attributes as the KeyValue messages of OTLP."""
    return [{"key": name, "value": _encode_value(value)} for name, value in attributes.items()]


def _encode_value(value: Value) -> dict[str, Any]:
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
        case str():
            return {"stringValue": _printable(value)}
        case _:
            return {"arrayValue": {"values": [_encode_value(each) for each in value]}}


def _printable(text: str) -> str:
    """Return a text that UTF-8 can encode: a lone surrogate, which JSON bodies may contain, becomes `?`."""
    return text[:MAX_TEXT].encode("utf-8", "replace").decode()


@dataclass(frozen=True)
class SequenceTimes:
    """Times of one sequence, in seconds of the monotonic clock; 0.0 if not reached."""

    arrived: float
    scheduled: float
    first_token: float
    ended: float


class RequestSpan:
    """Span of one HTTP request, the parent of the spans of its sequences.

    `export` takes each finished span. Sequences may end after their request: those of background responses, and
    replies with an Idempotency-Key.
    """

    def __init__(self, trace: Trace, start_s: float, export: Callable[[Span], None], *, has_content: bool) -> None:
        self.has_content = has_content  # whether texts of the request and its reply are recorded
        self._export = export
        self._num_sequences = 0
        self._span = Span(
            "request",
            trace.trace_id,
            trace.parent_id,
            start_s,
            offset_ns=time.time_ns() - time.monotonic_ns(),
            kind=SERVER,
            state=trace.state,
            is_remote=trace.parent_id is not None,
        )

    @property
    def trace_id(self) -> str:
        return self._span.trace_id

    @property
    def span_id(self) -> str:
        return self._span.span_id

    def update(self, attributes: Mapping[str, Value | None]) -> None:
        """Set attributes, except those whose value is None."""
        self._span.attributes |= {name: value for name, value in attributes.items() if value is not None}

    def fail(self, kind: str, *, is_client_error: bool = False) -> None:
        """Record why the request failed, unless that is known. `kind` is a class of errors with few values. Errors of
        clients do not count as failures of this service."""
        self._span.attributes.setdefault("error.type", kind)
        if not is_client_error:
            self._span.error = self._span.error or kind

    def end(self, name: str, at_s: float) -> None:
        """Finish the span. Attributes that are set before the next batch is sent still belong to it."""
        self._span.name, self._span.end_s = name, at_s
        self._export(self._span)

    def add_media(self, start_s: float, end_s: float, items: int, cached: int) -> None:
        """Export a span for the media of the request. `cached` of the items were processed for an earlier request."""
        span = Span("media", self.trace_id, self.span_id, start_s, self._span.offset_ns, end_s, state=self._span.state)
        span.attributes = {"slipway.media.items": items, "slipway.media.cached": cached}
        self._export(span)

    def add_sequence(
        self, times: SequenceTimes, phases: Mapping[str, Mapping[str, Value]], events: Iterable[SpanEvent], error: str
    ) -> None:
        """Export the spans of a sequence that has ended.

        Args:
            phases: attributes of the spans `queue`, `prefill` and `decode`.
            events: each becomes part of the span in which it happened.
            error: why the sequence failed, a property of its last span; "": it did not.
        """
        self._num_sequences += 1
        if self._num_sequences > MAX_SEQUENCES:
            self.update({"slipway.sequences.omitted": self._num_sequences - MAX_SEQUENCES})
            return
        spans = [
            Span(
                name,
                self.trace_id,
                self.span_id,
                start_s,
                self._span.offset_ns,
                end_s,
                state=self._span.state,
                attributes=dict(phases[name]),
            )
            for name, start_s, end_s in _intervals(times)
        ]
        for event in events:
            owner = next((span for span in reversed(spans) if event.at_s >= span.start_s), spans[0])
            owner.events.append(event)
        if error:
            spans[-1].error = spans[-1].attributes["error.type"] = error
        for span in spans:
            self._export(span)


def _intervals(times: SequenceTimes) -> list[tuple[str, float, float]]:
    """Return (name, start, end) of the phases that a sequence reached."""
    bounds = [("queue", times.arrived), ("prefill", times.scheduled), ("decode", times.first_token)]
    reached = [(name, start_s) for name, start_s in bounds if start_s]
    ends = [*(start_s for _, start_s in reached[1:]), times.ended]
    return [(name, start_s, end_s) for (name, start_s), end_s in zip(reached, ends, strict=True)]


def message_parts(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the parts of a chat message of OpenAI's API in the format of the conventions."""
    parts = [_content_part(part) for part in _listed(message.get("content"))]
    if reasoning := message.get("reasoning"):
        parts.insert(0, {"type": "reasoning", "content": reasoning})
    for call in _listed(message.get("tool_calls")):
        if isinstance(call, Mapping):
            function = call.get("function") or {}
            arguments = function.get("arguments")
            parts.append(
                {"type": "tool_call", "id": call.get("id"), "name": function.get("name"), "arguments": arguments}
            )
    if message.get("role") == "tool":
        return [{"type": "tool_call_response", "id": message.get("tool_call_id"), "response": message.get("content")}]
    return parts


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _content_part(part: Any) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "content": part}
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return {"type": "text", "content": part["text"]}
    return {"type": "generic", "content": part}


def input_messages(texts: Mapping[str, Any]) -> str:
    """Return the JSON text of `gen_ai.input.messages` from the fields of a request that contain texts."""
    messages: list[dict[str, Any]] = []
    for name, value in texts.items():
        if name == "messages" and isinstance(value, list):
            messages += [
                {"role": each.get("role", "user"), "parts": message_parts(each)}
                for each in value
                if isinstance(each, Mapping)
            ]
        elif name == "system":
            messages.insert(0, {"role": "system", "parts": [_content_part(part) for part in _listed(value)]})
        elif name != "tools":
            messages.append({"role": "user", "parts": [_content_part(part) for part in _listed(value)]})
    return json.dumps(messages, default=str)


def output_messages(choices: Iterable[tuple[list[dict[str, Any]], str | None]]) -> str:
    """Return the JSON text of `gen_ai.output.messages` from the parts and the finish reason of each choice."""
    return json.dumps(
        [{"role": "assistant", "parts": parts, "finish_reason": finish or "error"} for parts, finish in choices],
        default=str,
    )
