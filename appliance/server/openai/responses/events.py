"""Output items of a response and their stream events, built from the tokens of a chat reply.

Tokens are taken one at a time, so that the events and their sequence numbers depend on the tokens only. A stream can
therefore resume after any event, regardless of how the tokens are grouped the second time. Items follow one another:
each is opened, extended, and closed when the next one begins or the reply ends.
"""

import hashlib
from collections.abc import Callable, Iterator
from io import StringIO
from typing import Any, Literal, Protocol

from appliance.output_formats.events import CallArguments, CallBroken, CallStart, Content, Event, ReasoningText, joined
from appliance.output_formats.json_string import JsonString

Fields = dict[str, Any]
Status = Literal["in_progress", "completed", "incomplete"]


class Item(Protocol):
    """One output item. Its events do not have an output_index or a sequence_number yet."""

    id: str

    def opening(self) -> Iterator[Fields]: ...

    def add(self, text: str, logprobs: list[Fields]) -> Iterator[Fields]: ...

    def closing(self) -> Iterator[Fields]: ...

    def fields(self, status: Status) -> Fields: ...


class Reasoning:
    def __init__(self, id: str) -> None:
        self.id = id
        self._text = StringIO()  # a str would be copied for each token

    def _part(self) -> Fields:
        return {"type": "reasoning_text", "text": self._text.getvalue()}

    def opening(self) -> Iterator[Fields]:
        yield {"type": "response.content_part.added", "content_index": 0, "part": self._part()}

    def add(self, text: str, logprobs: list[Fields]) -> Iterator[Fields]:
        self._text.write(text)
        yield {"type": "response.reasoning_text.delta", "content_index": 0, "delta": text}

    def closing(self) -> Iterator[Fields]:
        yield {"type": "response.reasoning_text.done", "content_index": 0, "text": self._text.getvalue()}
        yield {"type": "response.content_part.done", "content_index": 0, "part": self._part()}

    def fields(self, status: Status) -> Fields:
        content = [self._part()] if self._text.tell() else []
        named = {"id": self.id, "type": "reasoning", "summary": [], "content": content}
        return {**named, "encrypted_content": None, "status": status}


class Message:
    def __init__(self, id: str) -> None:
        self.id = id
        self._text = StringIO()  # a str would be copied for each token
        self.logprobs: list[Fields] = []
        self._begun = False

    def _part(self) -> Fields:
        text = self._text.getvalue()
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self.logprobs)}

    def opening(self) -> Iterator[Fields]:
        self._begun = True
        yield {"type": "response.content_part.added", "content_index": 0, "part": self._part()}

    def add(self, text: str, logprobs: list[Fields]) -> Iterator[Fields]:
        self._text.write(text)
        self.logprobs += logprobs
        yield {"type": "response.output_text.delta", "content_index": 0, "delta": text, "logprobs": logprobs}

    def closing(self) -> Iterator[Fields]:
        done = {"content_index": 0, "text": self._text.getvalue(), "logprobs": list(self.logprobs)}
        yield {"type": "response.output_text.done", **done}
        yield {"type": "response.content_part.done", "content_index": 0, "part": self._part()}

    def fields(self, status: Status) -> Fields:
        content = [self._part()] if self._begun else []
        return {"id": self.id, "type": "message", "role": "assistant", "status": status, "content": content}


class Call:
    def __init__(self, id: str, call_id: str, name: str) -> None:
        self.id = id
        self.call_id = call_id
        self.name = name
        self._arguments = StringIO()

    def opening(self) -> Iterator[Fields]:
        yield from ()

    def add(self, text: str, logprobs: list[Fields]) -> Iterator[Fields]:
        self._arguments.write(text)
        yield {"type": "response.function_call_arguments.delta", "delta": text}

    def closing(self) -> Iterator[Fields]:
        done = {"name": self.name, "arguments": self._arguments.getvalue()}
        yield {"type": "response.function_call_arguments.done", **done}

    def fields(self, status: Status) -> Fields:
        named = {"id": self.id, "type": "function_call", "call_id": self.call_id, "name": self.name}
        return {**named, "arguments": self._arguments.getvalue(), "status": status}


class CustomCall:
    """A call of a custom tool. Its input is the only string in the call's arguments, decoded while it streams."""

    def __init__(self, id: str, call_id: str, name: str) -> None:
        self.id = id
        self.call_id = call_id
        self.name = name
        self.input = ""
        self._string = JsonString()

    def opening(self) -> Iterator[Fields]:
        yield from ()

    def add(self, text: str, logprobs: list[Fields]) -> Iterator[Fields]:
        if piece := self._string.feed(text):
            self.input += piece
            yield {"type": "response.custom_tool_call_input.delta", "delta": piece}

    def closing(self) -> Iterator[Fields]:
        yield {"type": "response.custom_tool_call_input.done", "input": self.input}

    def fields(self, status: Status) -> Fields:
        named = {"id": self.id, "type": "custom_tool_call", "call_id": self.call_id, "name": self.name}
        return {**named, "input": self.input, "status": status}


class Output:
    """All items of one response.

    Item IDs are derived from `name`. `custom` has the names of custom tools, whose calls have a text input.
    """

    def __init__(self, name: str, custom: frozenset[str], *, shows_reasoning: bool) -> None:
        self._name = name
        self._custom = custom
        self._shows_reasoning = shows_reasoning
        self._done: list[Fields] = []
        self._open: Item | None = None
        self._held: list[Fields] = []  # logprobs of tokens whose text has not arrived yet
        self.calls = 0
        self.broken_calls = 0

    def take(self, events: list[Event], logprobs: list[Fields]) -> Iterator[Fields]:
        """Return the API events for the parsed output of one token."""
        self._held += logprobs
        for event in joined(events):
            if isinstance(event, Content):
                yield from self._into(Message, event.text)
            elif isinstance(event, ReasoningText):
                if self._shows_reasoning:
                    yield from self._into(Reasoning, event.text)
            elif isinstance(event, CallStart):
                yield from self._call(event)
            elif isinstance(event, CallArguments):
                yield from self._add(event.text)
            elif isinstance(event, CallBroken):
                # Clients have already seen this item: keep its partial content and mark it as incomplete.
                self.broken_calls += 1
                yield from self._close("incomplete")
            self._held = [] if isinstance(event, Content) else list(logprobs)
        if events and not isinstance(events[-1], Content):
            self._held = []

    def end(self, status: Status) -> Iterator[Fields]:
        """Close the open item at the end of the reply.

        A reply without any item gets an empty message, so that `output` has an item with status `incomplete` in that
        case too.
        """
        if not self._done and self._open is None:
            yield from self._begin(Message(self._id("msg")))
        yield from self._close(status)

    def close(self) -> Iterator[Fields]:
        """Close the open item of a reply that did not end regularly."""
        yield from self._close("incomplete")

    def items(self) -> list[Fields]:
        opened = [] if self._open is None else [self._open.fields("in_progress")]
        return [*self._done, *opened]

    def _into(self, kind: Callable[[str], Reasoning | Message], text: str) -> Iterator[Fields]:
        if not isinstance(self._open, kind):  # type: ignore[arg-type]
            yield from self._close("completed")
            yield from self._begin(kind(self._id("msg" if kind is Message else "rs")))
        yield from self._add(text)

    def _call(self, event: CallStart) -> Iterator[Fields]:
        yield from self._close("completed")
        self.calls += 1
        custom = event.name in self._custom
        make = CustomCall if custom else Call
        yield from self._begin(make(self._id("ctc" if custom else "fc"), self._id("call"), event.name))

    def _begin(self, item: Item) -> Iterator[Fields]:
        self._open = item
        yield {
            "type": "response.output_item.added",
            "output_index": len(self._done),
            "item": item.fields("in_progress"),
        }
        yield from self._placed(item.opening())

    def _add(self, text: str) -> Iterator[Fields]:
        if self._open is not None:
            held, self._held = self._held, []
            yield from self._placed(self._open.add(text, held))

    def _close(self, status: Status) -> Iterator[Fields]:
        if self._open is None:
            return
        yield from self._placed(self._open.closing())
        place, fields = len(self._done), self._open.fields(status)
        self._done.append(fields)
        self._open = None
        yield {"type": "response.output_item.done", "output_index": place, "item": fields}

    def _placed(self, events: Iterator[Fields]) -> Iterator[Fields]:
        assert self._open is not None, "events are of an open item"
        for event in events:
            yield {**event, "item_id": self._open.id, "output_index": len(self._done)}

    def _id(self, prefix: str) -> str:
        digest = hashlib.blake2b(f"{self._name}/{len(self._done)}".encode(), digest_size=16)
        return f"{prefix}_{digest.hexdigest()}"
