"""Call bodies in JSON whose only key is the name of the function: `{"f": {…}}`."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from appliance.output_formats.declaration import BodyReader, Function, Status, Writer
from appliance.output_formats.events import CallArguments, CallStart, Event
from appliance.output_formats.json_text import JsonValue
from appliance.output_formats.marks import skip_space


class _Reader:
    def __init__(self, index: int) -> None:
        self.status: Status = "open"
        self.started = False
        self._index = index
        self._signs = ["{", '"', ":", "{", "}"]  # expected characters at which a value begins or the object ends
        self._value: JsonValue | None = None
        self._key = ""

    def feed(self, text: str) -> tuple[list[Event], int]:
        events: list[Event] = []
        at = 0
        while at < len(text) and self.status == "open":
            at = self._next(text, at, events) if self._value is None else self._read(self._value, text, at, events)
        return events, at

    def _next(self, text: str, at: int, events: list[Event]) -> int:
        at = skip_space(text, at)
        if at == len(text):
            return at
        if text[at] != self._signs[0]:
            self.status = "broken"
            return at
        sign = self._signs.pop(0)
        if sign == '"' or sign == "{" and len(self._signs) == 1:
            if sign == "{":
                self.started = True
                events.append(CallStart(self._index, json.loads(self._key)))
            self._value = JsonValue()
            return at
        self.status = "open" if self._signs else "done"
        return at + 1

    def _read(self, value: JsonValue, text: str, at: int, events: list[Event]) -> int:
        after = value.feed(text, at)
        if self.started and after > at:
            events.append(CallArguments(self._index, text[at:after]))
        elif not self.started:
            self._key += text[at:after]
        if value.status == "done":
            self._value = None
        if value.status == "broken" or self._value is None and not self.started and not json.loads(self._key):
            self.status = "broken"
        return after


@dataclass(frozen=True)
class KeyedJson:
    """JSON object per call."""

    def reader(self, index: int, functions: Sequence[Function], ends: Sequence[str]) -> BodyReader:
        return _Reader(index)

    def grammar(self, function: Function, writer: Writer) -> str:
        name = json.dumps(function.name, ensure_ascii=False)
        return f"{writer.text(f'{{{name}: ')} {writer.json(function.parameters)} {writer.text('}')}"

    def texts(self) -> tuple[str, ...]:
        return ()
