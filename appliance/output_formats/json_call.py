"""Call bodies in JSON: an object with name and arguments, or the bare arguments of a known function."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from appliance.output_formats.declaration import BodyReader, Function, Writer
from appliance.output_formats.events import CallArguments, CallStart, Event
from appliance.output_formats.json_text import JsonValue

_SPACE = re.compile(r"[ \t\n\r]*")


class _ObjectReader:
    """Parser of `{"name": …, "arguments": {…}}` with the keys in any order. Arguments are streamed once the name is
    known. With `waits` the name is emitted only when arguments begin, and an object without arguments is not a call."""

    def __init__(self, index: int, name_key: str, argument_keys: tuple[str, ...], waits: bool) -> None:
        self.status: Literal["open", "done", "broken"] = "open"
        self.started = False
        self._index = index
        self._name_key = name_key
        self._argument_keys = argument_keys
        self._waits = waits
        self._name = ""
        self._expects = "{"  # { key_or_end key : value next
        self._key = ""
        self._seen: set[str] = set()
        self._value = JsonValue()
        self._raw = ""  # of the key or value being read
        self._streams = False
        self._held = ""  # arguments that arrived before the name

    def feed(self, text: str) -> tuple[list[Event], int]:
        events: list[Event] = []
        at = 0
        while at < len(text) and self.status == "open":
            if self._expects in ("key", "value") and self._raw:
                at = self._read_value(text, at, events)
                continue
            at = _SPACE.match(text, at).end()  # type: ignore[union-attr]  # the pattern matches everywhere
            if at < len(text):
                at = self._token(text, at, events)
        return events, at

    def _token(self, text: str, at: int, events: list[Event]) -> int:
        character = text[at]
        if self._expects == "{" and character == "{":
            self._expects = "key_or_end"
        elif self._expects in ("key_or_end", "next") and character == "}":
            self._end(events)
        elif self._expects == "next" and character == ",":
            self._expects = "key_or_key"
        elif self._expects in ("key_or_end", "key_or_key") and character == '"':
            return self._begin("key", text, at, events)
        elif self._expects == ":" and character == ":":
            self._expects = "value_start"
        elif self._expects == "value_start":
            self._streams = self._key in self._argument_keys and character == "{"
            if self._streams and self._name:
                self._start(events)
            return self._begin("value", text, at, events)
        else:
            self.status = "broken"
            return at
        return at + 1

    def _begin(self, what: str, text: str, at: int, events: list[Event]) -> int:
        self._expects, self._raw, self._value = what, "", JsonValue()
        return self._read_value(text, at, events)

    def _read_value(self, text: str, at: int, events: list[Event]) -> int:
        after = self._value.feed(text, at)
        piece = text[at:after]
        self._raw += piece
        if self._streams and self.started:
            events += [CallArguments(self._index, piece)] if piece else []
        elif self._streams:
            self._held += piece
        if self._value.status == "broken":
            self.status = "broken"
        elif self._value.status == "done":
            self._complete(events)
        return after

    def _complete(self, events: list[Event]) -> None:
        raw, self._raw = self._raw, ""
        if self._expects == "key":
            self._key, self._expects = json.loads(raw), ":"
            again = self._argument_keys if self._key in self._argument_keys else (self._key,)
            if not self._seen.isdisjoint(again):
                self.status = "broken"
            self._seen.add(self._key)
            return
        self._expects = "next"
        if self._key == self._name_key:
            self._named(json.loads(raw), events)
        elif self._key in self._argument_keys and not self._streams:
            self._unstreamed(json.loads(raw), events)
        self._streams = False

    def _named(self, name: object, events: list[Event]) -> None:
        if not isinstance(name, str) or not name:
            self.status = "broken"
            return
        self._name = name
        if self._held or not self._waits:
            self._start(events)

    def _start(self, events: list[Event]) -> None:
        if self.started:
            return
        self.started = True
        events.append(CallStart(self._index, self._name))
        if self._held:
            events.append(CallArguments(self._index, self._held))

    def _unstreamed(self, value: object, events: list[Event]) -> None:
        """Handle arguments as a string of JSON, which some models write, or null."""
        if isinstance(value, str) and self._is_object(value):
            if self._name:
                self._start(events)
                events.append(CallArguments(self._index, value))
            self._held = value
        elif value is not None:
            self.status = "broken"
        else:
            self._seen -= set(self._argument_keys)

    @staticmethod
    def _is_object(text: str) -> bool:
        try:
            return isinstance(json.loads(text), dict)
        except (ValueError, RecursionError):
            return False

    def _end(self, events: list[Event]) -> None:
        if not self.started:
            self.status = "broken"
            return
        if self._seen.isdisjoint(self._argument_keys):
            events.append(CallArguments(self._index, "{}"))
        self.status = "done"


@dataclass(frozen=True)
class JsonCall:
    """JSON object per call. Grammars write the first of `argument_keys`. With `waits` an object without arguments is
    not a call, which distinguishes calls without markers from other JSON."""

    name_key: str = "name"
    argument_keys: tuple[str, ...] = ("arguments", "parameters")
    waits: bool = False

    def reader(self, index: int, functions: Sequence[Function], ends: Sequence[str]) -> BodyReader:
        return _ObjectReader(index, self.name_key, self.argument_keys, self.waits)

    def grammar(self, function: Function, writer: Writer) -> str:
        name = json.dumps(function.name, ensure_ascii=False)
        head = f'{{"{self.name_key}": {name}, "{self.argument_keys[0]}": '
        return f"{writer.text(head)} {writer.json(function.parameters)} {writer.text('}')}"

    def texts(self) -> tuple[str, ...]:
        return ()


class _ArgumentsReader:
    """Parser of a reply that is only the arguments object of one known function."""

    def __init__(self, name: str) -> None:
        self.started = False
        self._name = name
        self._value = JsonValue()
        self._is_object = True

    @property
    def status(self) -> Literal["open", "done", "broken"]:
        return self._value.status if self._is_object else "broken"

    def feed(self, text: str) -> tuple[list[Event], int]:
        start = 0 if self.started else _SPACE.match(text).end()  # type: ignore[union-attr]
        if not self.started and start < len(text) and text[start] != "{":
            self._is_object = False
            return [], start
        after = self._value.feed(text, start)
        events: list[Event] = []
        if after > start:
            if not self.started:
                self.started = True
                events.append(CallStart(0, self._name))
            events.append(CallArguments(0, text[start:after]))
        return events, after


@dataclass(frozen=True)
class BareArguments:
    """Format of a reply for which tool_choice names the function."""

    name: str

    def reader(self, index: int, functions: Sequence[Function], ends: Sequence[str]) -> BodyReader:
        return _ArgumentsReader(self.name)

    def grammar(self, function: Function, writer: Writer) -> str:
        return writer.json(function.parameters)

    def texts(self) -> tuple[str, ...]:
        return ()
