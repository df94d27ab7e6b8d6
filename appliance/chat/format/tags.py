"""Call bodies in tags, one for each argument: `<function=f><parameter=k>v</parameter></function>` and its kin.

Values are plain text and become JSON by the schema of their parameter; a string streams as it comes. A value that must
be a list or an object ends where its JSON ends, so that its strings may hold what looks like a tag.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from appliance.chat.format.declaration import BodyReader, Function, Status, Writer
from appliance.chat.format.events import CallArguments, CallStart, Event
from appliance.chat.format.json_text import JsonValue
from appliance.chat.format.loose_call import string_pattern
from appliance.chat.format.marks import SPACE, at_front, first, skip_space, undecided
from appliance.chat.format.named_json import NAME
from appliance.chat.format.parameters import ANY_NAME, MOST_ANY, required, takes_any
from appliance.chat.format.typed import (
    as_json,
    inside,
    is_text,
    json_or_text,
    kinds,
    parameter,
    properties,
    quoted,
    resolved,
)

_NAME = re.compile(NAME)
_MOST_NAME = 256


class _Reader:
    def __init__(self, tags: "Tags", index: int, functions: Sequence[Function], ends: Sequence[str]) -> None:
        self.status: Status = "open"
        self.started = False
        self._tags, self._index = tags, index
        self._known = {function.name: function.parameters for function in functions}
        self._ends = tuple(ends)
        self._state = self._head
        self._name = ""
        self._count = 0  # of arguments
        self._value: _Value = _Plain("", frozenset())
        self._key = ""

    def feed(self, text: str) -> tuple[list[Event], int]:
        events: list[Event] = []
        at = 0
        while self.status == "open" and at < len(text):
            used = self._state(text[at:], events)
            if used is None:
                break
            at += used
        return events, at

    # Each state gives how much of the text it used, None where it must see more.

    def _head(self, text: str, events: list[Event]) -> int | None:
        start = skip_space(text)
        opening, closing = self._tags.head
        found = at_front(text[start:], [opening]) if opening else opening
        if found is None:
            return start or None
        if found != opening:
            return self._broken()
        begin = start + len(opening)
        end = _end_of_name(text, begin, closing)
        if end is None:
            return None if len(text) - begin <= _MOST_NAME else self._broken()
        if _NAME.fullmatch(text, begin, end) is None or end - begin > _MOST_NAME:
            return self._broken()
        self._name, self._state = text[begin:end], self._between
        return end + len(closing)

    def _between(self, text: str, events: list[Event]) -> int | None:
        start = skip_space(text)
        front = text[start:]
        tail = self._tags.tail.strip()
        found = at_front(front, [mark for mark in (self._tags.key[0], tail, *self._ends) if mark])
        if found is None:
            return start or None
        if not found:
            return self._broken()
        if not self.started:
            self.started = True
            events.append(CallStart(self._index, self._name))
        if found == self._tags.key[0]:
            self._state = self._in_key
            return start + len(found)
        events.append(CallArguments(self._index, "}" if self._count else "{}"))
        self.status = "done"
        return start + (len(found) if found == tail else 0)

    def _in_key(self, text: str, events: list[Event]) -> int | None:
        closing = self._tags.key[1]
        end = text.find(closing)
        if end < 0:
            return None if len(text) <= _MOST_NAME else self._broken()
        if end > _MOST_NAME:
            return self._broken()
        self._key = text[:end].strip()
        self._state = self._before_value if self._tags.before_value or self._tags.attribute else self._in_value
        if self._state == self._in_value:
            self._begin_value("", events)
        return end + len(closing)

    def _before_value(self, text: str, events: list[Event]) -> int | None:
        """The attribute that says whether the value is a string, or the tag that opens the value."""
        mark = self._tags.before_value.strip() or ">"
        end = text.find(mark)
        if end < 0:
            return None if len(text) <= _MOST_NAME else self._broken()
        between = text[:end]
        if end > _MOST_NAME or (self._tags.before_value and between.strip(SPACE)):
            return self._broken()
        self._begin_value(between, events)
        self._state = self._in_value
        return end + len(mark)

    def _begin_value(self, attribute: str, events: list[Event]) -> None:
        events.append(CallArguments(self._index, f"{', ' if self._count else '{'}{quoted(self._key)}: "))
        self._count += 1
        parameters = self._known.get(self._name, {})
        allowed = kinds(parameter(parameters, self._key), parameters)
        end = self._tags.after_value
        said = re.search(rf'{self._tags.attribute}="(true|false)"', attribute) if self._tags.attribute else None
        if said is not None and said[1] == "true":
            allowed = frozenset(("string",))
        if said is not None and said[1] == "false":
            self._value = _Json(end)
        elif is_text(allowed):
            self._value = _Streamed(end, self._tags.trim)
        elif "string" not in allowed and allowed & {"array", "object"}:
            self._value = _Json(end, allowed)
        else:
            self._value = _Plain(end, allowed, self._tags.trim)

    def _in_value(self, text: str, events: list[Event]) -> int | None:
        piece, used, done = self._value.feed(text)
        if piece:
            events.append(CallArguments(self._index, piece))
        if done:
            self._state = self._between
        return used or None

    def _broken(self) -> int:
        self.status = "broken"
        return 0


def _end_of_name(text: str, begin: int, closing: str) -> int | None:
    """Where the name ends: at its closing, or without one at whitespace or the next tag."""
    if closing:
        end = text.find(closing, begin)
        return None if end < 0 else end
    match = re.compile(r"[\s<]").search(text, begin)
    return None if match is None else match.start()


class _Value(Protocol):
    """Reads a value to its closing tag. `feed` gives JSON text, how much was used, and whether the tag is read."""

    def feed(self, text: str) -> tuple[str, int, bool]: ...


class _Plain:
    """A value that is converted once it is complete."""

    def __init__(self, end: str, allowed: frozenset[str], trim: str = "") -> None:
        self._end, self._allowed, self._trim = end, allowed, trim
        self._text = ""

    def feed(self, text: str) -> tuple[str, int, bool]:
        found = text.find(self._end)
        if found < 0:
            used = len(text) - undecided(text, [self._end])
            self._text += text[:used]
            return "", used, False
        self._text += text[:found]
        if self._trim:
            self._text = self._text.removeprefix(self._trim).removesuffix(self._trim)
        return as_json(self._text, self._allowed), found + len(self._end), True


class _Streamed:
    """A string, escaped as it comes. One line end next to each tag belongs to the tags where `trim` says so."""

    def __init__(self, end: str, trim: str) -> None:
        self._end, self._trim = end, trim
        self._begun = False

    def feed(self, text: str) -> tuple[str, int, bool]:
        at, piece = 0, ""
        if not self._begun:
            at = len(self._trim) if self._trim and text.startswith(self._trim) else 0
            self._begun, piece = True, '"'
        ends = [self._end, *([self._trim + self._end] if self._trim else [])]
        found = first(text[at:], ends)
        if found is None:
            used = len(text) - undecided(text[at:], ends)
            return piece + inside(text[at:used]), used, False
        end = at + found[0]
        return f'{piece}{inside(text[at:end])}"', end + len(found[1]), True


class _Json:
    """A value in JSON, which ends where it ends; what proves to be none ends at the closing tag like any other."""

    def __init__(self, end: str, allowed: frozenset[str] | None = None) -> None:
        self._end, self._allowed = end, allowed
        self._value: JsonValue | None = JsonValue()
        self._text = ""
        self._read = 0  # characters that the closing tag cannot begin in

    def feed(self, text: str) -> tuple[str, int, bool]:
        self._text += text
        if self._value is not None and not self._json(self._value):
            return "", len(text), False
        place = self._text.find(self._end, self._read)
        if place < 0:
            self._read = max(self._read, len(self._text) - len(self._end) + 1)
            return "", len(text), False
        value, rest = self._text[:place], len(self._text) - place - len(self._end)
        written = json_or_text(value) if self._allowed is None else as_json(value, self._allowed)
        return written, len(text) - rest, True

    def _json(self, value: JsonValue) -> bool:
        """Whether the closing tag may be looked for: behind a container or a string, or at once behind anything
        else."""
        if not self._read:
            start = skip_space(self._text)
            if start == len(self._text):
                return False
            if self._text[start] not in '{["':
                self._value = None
                return True
        self._read = value.feed(self._text, self._read)
        if value.status == "broken":
            self._read = 0
        if value.status != "open":
            self._value = None
        return value.status != "open"


@dataclass(frozen=True)
class Tags:
    """`head` stands around the function's name, `key` around an argument's; `before_value` and `after_value` around
    its value; `tail` ends the call. With an `attribute` the opening tag goes on behind the key and says by it whether
    the value is a string. `trim` pads a value on each side. `line` is written behind each tag."""

    head: tuple[str, str]
    key: tuple[str, str]
    after_value: str
    tail: str = ""
    before_value: str = ""
    attribute: str = ""
    trim: str = ""
    line: str = "\n"

    def reader(self, index: int, functions: Sequence[Function], ends: Sequence[str]) -> BodyReader:
        return _Reader(self, index, functions, ends)

    def texts(self) -> tuple[str, ...]:
        return (*self.head, *self.key, self.before_value, self.after_value, self.tail)

    def grammar(self, function: Function, writer: Writer) -> str:
        needed = required(function.parameters)
        parts = [writer.text(f"{self.head[0]}{function.name}{self.head[1]}{self.line}")]
        if takes_any(function.parameters):
            parts.append(f"{writer.rule(self._any_argument(writer))}{{0,{MOST_ANY}}}")
        for name, schema in properties(function.parameters).items():
            one = writer.rule(self._argument(name, schema, function.parameters, writer))
            parts.append(one if name in needed else f"{one}?")
        return " ".join([*parts, writer.text(self.tail)])

    def _any_argument(self, writer: Writer) -> str:
        attribute = f' {self.attribute}="true">' if self.attribute else ""
        behind = writer.text(f"{self.key[1]}{attribute}{self.before_value}{self.trim}")
        value = f"{behind} {writer.until(self.trim + self.after_value)} {writer.text(self.line)}"
        return f"{writer.text(self.key[0])} {ANY_NAME} {value}"

    def _argument(self, name: str, schema: Any, root: Mapping[str, Any], writer: Writer) -> str:
        schema = resolved(schema, root)
        allowed = kinds(schema, root)
        plain = is_text(allowed) or "string" in allowed
        opening = f"{self.key[0]}{name}{self.key[1]}"
        if self.attribute:
            opening += f' {self.attribute}="{"true" if plain else "false"}">'
        closing = f"{self.trim}{self.after_value}"
        value = f"{writer.text(opening + self.before_value + self.trim)} {self._value(schema, root, closing, writer)}"
        return f"{value} {writer.text(self.line)}" if self.line else value

    def _value(self, schema: Mapping[str, Any], root: Mapping[str, Any], closing: str, writer: Writer) -> str:
        allowed = kinds(schema, root)
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if values is not None and (is_text(allowed) or "string" in allowed):
            plain = [value for value in values if isinstance(value, str)]
            return "(" + " | ".join(map(writer.text, plain)) + f") {writer.text(closing)}"
        if is_text(allowed) or "string" in allowed:
            return writer.until(closing, string_pattern(schema) if is_text(allowed) else "")
        shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
        return f"{writer.json({**shared, **schema})} {writer.text(closing)}"
