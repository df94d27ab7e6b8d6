"""Call bodies with one tag per argument: `<function=f><parameter=k>v</parameter></function>` and similar formats.

Values are plain text and are converted to JSON by the schema of their parameter; strings are streamed. A value that
must be a list or an object ends where its JSON ends, so its strings may contain texts that look like tags.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from appliance.output_formats.declaration import BodyReader, Function, Status, Writer
from appliance.output_formats.events import CallArguments, CallStart, Event
from appliance.output_formats.loose_call import string_pattern
from appliance.output_formats.marks import at_front, skip_space
from appliance.output_formats.named_json import NAME
from appliance.output_formats.nested_tags import Nested, nested_grammar
from appliance.output_formats.parameters import ANY_NAME, MOST_ANY, required, takes_any
from appliance.output_formats.tag_values import Json, Plain, Streamed, Value
from appliance.output_formats.typed import is_text, kinds, parameter, properties, quoted, resolved

_NAME = re.compile(NAME)
_TYPES = frozenset(("number", "integer", "boolean", "null", "array", "object"))
_WRITTEN = {"integer": "number"}  # type names in attributes
_MOST_NAME = 256


class _Reader:
    def __init__(self, tags: "Tags", index: int, functions: Sequence[Function], ends: Sequence[str]) -> None:
        self.status: Status = "open"
        self.started = False
        self._tags, self._index = tags, index
        self._known = {function.name: function.parameters for function in functions}
        self._ends = tuple(ends)
        self._state, self._behind = self._head, self._between  # current state, and state after the value
        self._name = ""
        self._count = 0  # number of arguments
        self._value: Value = Plain("", frozenset())
        self._key = self._said = ""  # of the argument being read

    def feed(self, text: str) -> tuple[list[Event], int]:
        events: list[Event] = []
        at = 0
        while self.status == "open" and at < len(text):
            used = self._state(text[at:], events)
            if used is None:
                break
            at += used
        return events, at

    # Each state returns how much of the text it consumed, None if it needs more text.

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
            return None if len(text) - begin < _MOST_NAME + len(closing or " ") else self._broken()
        if _NAME.fullmatch(text, begin, end) is None or end - begin > _MOST_NAME:
            return self._broken()
        self._name, self._state = text[begin:end], self._after_name if self._tags.after_name else self._between
        return end + len(closing)

    def _after_name(self, text: str, events: list[Event]) -> int | None:
        """Skip the rest of the tag with the name."""
        end = text.find(self._tags.after_name)
        if end < 0:
            return self._unless_long(text, self._tags.after_name)
        if end > _MOST_NAME:
            return self._broken()
        self._state = self._between
        return end + len(self._tags.after_name)

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
            return self._unless_long(text, closing)
        if end > _MOST_NAME:
            return self._broken()
        self._key, self._said = self._tags.plain(text[:end].strip()), ""
        self._state = self._before_value if self._tags.before_value or self._tags.attribute else self._at_value
        return end + len(closing)

    def _before_value(self, text: str, events: list[Event]) -> int | None:
        """Read the declared type of the value, up to the tag that opens it."""
        mark = self._tags.before_value.strip() or self._tags.attribute_end
        end = text.find(mark)
        if end < 0:
            return self._unless_long(text, mark)
        said = self._tags.said(text[:end])
        if end > _MOST_NAME or said is None:
            return self._broken()
        self._said, self._state = said, self._at_value
        return end + len(mark)

    def _at_value(self, text: str, events: list[Event]) -> int | None:
        """Detect the kind of the value at its first character, or its wrapper."""
        opening, closing = self._tags.wrap
        found = at_front(text, [opening]) if opening else ""
        tagged = self._tags.tagged(text)
        if found is None or tagged is None:
            return None
        self._begin_value(closing if found else self._tags.closing(self._key), events, tagged)
        self._state, self._behind = self._in_value, self._behind_wrapped if found else self._between
        return len(found)

    def _begin_value(self, end: str, events: list[Event], tagged: str) -> None:
        events.append(CallArguments(self._index, f"{', ' if self._count else '{'}{quoted(self._key)}: "))
        self._count += 1
        parameters = self._known.get(self._name, {})
        schema = parameter(parameters, self._key)
        allowed = kinds(schema, parameters)
        if self._said == "true" or self._said == "string" and (not allowed or "string" in allowed):
            allowed = frozenset(("string",))
        elif self._said in _TYPES:
            allowed = allowed - {"string"} or frozenset((self._said,))
        container = bool(allowed & {"array", "object"}) and "string" not in allowed
        if self._tags.nested and (tagged == "tag" and allowed != {"string"} or tagged == "text" and container):
            self._value = Nested(self._tags.nested, self._key, schema, parameters)
        elif self._said == "false":
            self._value = Json(end)
        elif is_text(allowed):
            self._value = Streamed(end, self._tags.trim)
        elif container:
            self._value = Json(end, allowed)
        else:
            self._value = Plain(end, allowed, self._tags.trim)

    def _in_value(self, text: str, events: list[Event]) -> int | None:
        piece, used, done = self._value.feed(text)
        if piece:
            events.append(CallArguments(self._index, piece))
        if done:
            self._state = self._behind
        return used or None

    def _behind_wrapped(self, text: str, events: list[Event]) -> int | None:
        start = skip_space(text)
        found = at_front(text[start:], [self._tags.closing(self._key)])
        if found is None:
            return start or None
        if not found:
            return self._broken()
        self._state = self._between
        return start + len(found)

    def _unless_long(self, text: str, mark: str) -> int | None:
        """Return None while a missing mark may still arrive within the length limit, else mark the call as broken."""
        return None if len(text) < _MOST_NAME + len(mark) else self._broken()

    def _broken(self) -> int:
        self.status = "broken"
        return 0


def _end_of_name(text: str, begin: int, closing: str) -> int | None:
    """Return the end of the name: its closing mark; if there is none, whitespace or the next tag. None if more text is
    needed."""
    if closing:
        end = text.find(closing, begin)
        return None if end < 0 else end
    match = re.compile(r"[\s<]").search(text, begin)
    return None if match is None else match.start()


@dataclass(frozen=True)
class Tags:
    """Format of a call with one tag per argument."""

    head: tuple[str, str]  # texts around the name of the function
    key: tuple[str, str]  # texts around the name of an argument
    after_value: str  # text after a value; with `nested` it contains the argument's name in braces
    tail: str = ""  # end of the call
    before_value: str = ""  # text before a value
    attribute: str = ""
    """Attribute of the opening tag after the key that says whether the value is a string, or with `typed` its type."""
    attribute_end: str = ">"  # text after the attribute
    typed: bool = False
    kind: tuple[str, str] = ("", "")  # tags between key and value that may contain the type
    number: str = ""  # attribute after the name with the number of the call in quotes
    after_name: str = ""  # end of the tag with the name
    wrap: tuple[str, str] = ("", "")  # texts that the parser accepts around a value; grammars do not write them
    escaped: bool = False  # whether quotes and ampersands in an attribute are entities
    nested: str = ""  # marker of nested tags (see `nested_tags`)
    trim: str = ""  # padding of a value on each side
    line: str = "\n"  # text after each tag

    def reader(self, index: int, functions: Sequence[Function], ends: Sequence[str]) -> BodyReader:
        return _Reader(self, index, functions, ends)

    def texts(self) -> tuple[str, ...]:
        found = (*self.head, self.after_name, *self.key, *self.kind, self.before_value, *self.wrap, self.after_value)
        texts = (*found, self.attribute_end if self.attribute else "", self.tail)
        return tuple(text.removesuffix("{}>") for text in texts)

    def closing(self, key: str) -> str:
        """Return the tag after the value of this argument."""
        return self.after_value.replace("{}", key) if self.nested else self.after_value

    def tagged(self, text: str) -> Literal["tag", "text", "other"] | None:
        """Classify a value where nested tags are allowed: "tag" if it begins with a tag, "other" if it may be JSON,
        else "text". Return None if more text is needed."""
        if not self.nested:
            return "other"
        bare = text[skip_space(text) :]
        found = at_front(bare, [f"{self.nested}<", f"{self.nested}</"]) if bare else None
        if found is None:
            return None
        return "tag" if found == f"{self.nested}<" else "other" if bare[0] in "[{" else "text"

    def plain(self, written: str) -> str:
        """Decode a name from an attribute."""
        return written.replace("&quot;", '"').replace("&amp;", "&") if self.escaped else written

    def spelled(self, name: str) -> str:
        return name.replace("&", "&amp;").replace('"', "&quot;") if self.escaped else name

    def said(self, between: str) -> str | None:
        """Return the declared type between a key and its value, "" if there is none; None if the text is invalid
        there."""
        if self.attribute:
            found = re.search(rf'{self.attribute}="([^"]*)"', between)
            return found[1] if found else ""
        opening, closing = map(re.escape, self.kind)
        match = re.fullmatch(rf"\s*(?:{opening}(.*?){closing}\s*)?", between, re.DOTALL)
        if match is None:
            return None
        return (match[1] or "").split("[")[0].strip().lower()

    def grammar(self, function: Function, writer: Writer) -> str:
        needed = required(function.parameters)
        head = f"{self.head[0]}{self.spelled(function.name)}{self.head[1]}"
        if self.number:
            parts = [
                writer.text(f'{head}{self.number}"'),
                "/[0-9]{1,3}/",
                writer.text(f'"{self.after_name}{self.line}'),
            ]
        else:
            parts = [writer.text(f"{head}{self.after_name}{self.line}")]
        # a grammar cannot name the closing tag of an unknown nested argument
        if takes_any(function.parameters) and not self.nested:
            parts.append(f"{writer.rule(self._any_argument(writer))}{{0,{MOST_ANY}}}")
        for name, schema in properties(function.parameters).items():
            one = writer.rule(self._argument(name, schema, function.parameters, writer))
            parts.append(one if name in needed else f"{one}?")
        return " ".join([*parts, writer.text(self.tail)])

    def _any_argument(self, writer: Writer) -> str:
        attribute = self._attribute("string" if self.typed else "true")
        behind = writer.text(f"{self.key[1]}{attribute}{self.before_value}{self.trim}")
        value = f"{behind} {writer.until(self.trim + self.after_value)} {writer.text(self.line)}"
        return f"{writer.text(self.key[0])} {ANY_NAME} {value}"

    def _argument(self, name: str, schema: Any, root: Mapping[str, Any], writer: Writer) -> str:
        schema = resolved(schema, root)
        allowed = kinds(schema, root)
        plain = is_text(allowed) or "string" in allowed
        said = {"string"} if plain else {_WRITTEN.get(kind, kind) for kind in allowed}
        said = said if self.typed else {"true" if plain else "false"}
        openings = sorted(f"{self.key[0]}{self.spelled(name)}{self.key[1]}{self._attribute(each)}" for each in said)
        opening = " | ".join(writer.text(f"{each}{self.before_value}{self.trim}") for each in openings)
        closing = f"{self.trim}{self.closing(name)}"
        if self.nested:
            written = nested_grammar(schema, root, closing, self.nested, writer, self._value)
        else:
            written = self._value(schema, root, closing, writer)
        value = f"{f'({opening})' if len(openings) > 1 else opening} {written}"
        return f"{value} {writer.text(self.line)}" if self.line else value

    def _attribute(self, said: str) -> str:
        return f' {self.attribute}="{said}"{self.attribute_end}' if self.attribute else ""

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
