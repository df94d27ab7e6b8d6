"""Call bodies with a name and arguments in brackets: `f(a=1, b="x")` and `call:f{a:1,b:<escape>x<escape>}`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from appliance.output_formats.declaration import BodyReader, Function, Status, Writer
from appliance.output_formats.events import CallArguments, CallStart, Event
from appliance.output_formats.loose import PYTHON, LooseArguments, Syntax
from appliance.output_formats.parameters import ANY_NAME, MOST_ANY, in_order, takes_any
from appliance.output_formats.typed import is_text, kinds, properties, quoted, resolved

_NAME = re.compile(r"[^\W\d][\w.\-:/]*")
_MOST_HEAD = 300


class _Reader:
    def __init__(self, index: int, before: str, syntax: Syntax) -> None:
        self.started = False
        self._index, self._before = index, before
        self._opener = "(" if syntax.close == ")" else "{"
        self._head = ""
        self._name = ""
        self._lost = False
        self._arguments = LooseArguments(syntax)

    @property
    def status(self) -> Status:
        return "broken" if self._lost else self._arguments.status

    def feed(self, text: str) -> tuple[list[Event], int]:
        at = 0
        while not self._name and at < len(text) and not self._lost:
            at += self._read_head(text[at])
        if not self._name or self._lost:
            return [], at
        piece, used = self._arguments.feed(text[at:])
        events: list[Event] = []
        if piece:
            if not self.started:
                self.started = True
                events.append(CallStart(self._index, self._name))
            events.append(CallArguments(self._index, piece))
        return events, at + used

    def _read_head(self, character: str) -> int:
        """Consume the character if it can belong to `before` and a name."""
        head = (self._head + character).lstrip()
        if character == self._opener and self._in_name(self._head.strip()):
            self._name = self._head.strip().removeprefix(self._before)
            return 1
        if len(head) > _MOST_HEAD or not (self._before.startswith(head) or self._in_name(head.rstrip())):
            self._lost = True
            return 0
        self._head = head
        return 1

    def _in_name(self, head: str) -> bool:
        return head.startswith(self._before) and _NAME.fullmatch(head, len(self._before)) is not None


@dataclass(frozen=True)
class LooseCall:
    """Call with `before`, a name, and arguments in the brackets of the syntax, separated by `separator`."""

    syntax: Syntax = PYTHON
    before: str = ""
    separator: str = ", "

    def reader(self, index: int, functions: Sequence[Function], ends: Sequence[str]) -> BodyReader:
        return _Reader(index, self.before, self.syntax)

    def grammar(self, function: Function, writer: Writer) -> str:
        opener = "(" if self.syntax.close == ")" else "{"
        head = writer.text(f"{self.before}{function.name}{opener}")
        values = _Values(self.syntax, function.parameters, writer)
        pairs = {
            name: f"{writer.text(name + self.syntax.sign)} {values.expression(schema)}"
            for name, schema in properties(function.parameters).items()
        }
        inner = in_order(pairs, function.parameters, writer, self.separator)
        if takes_any(function.parameters):
            one = f"{ANY_NAME} {writer.text(self.syntax.sign)} {values.expression({'type': 'string'})}"
            inner = f"({one} ({writer.text(self.separator)} {one}){{0,{MOST_ANY - 1}}})?"
        return f"{head} {inner} {writer.text(self.syntax.close)}"

    def texts(self) -> tuple[str, ...]:
        return tuple(quote for quote in self.syntax.quotes if len(quote) > 1)


@dataclass(frozen=True)
class _Values:
    """Grammar expressions of values by schema."""

    syntax: Syntax
    root: Mapping[str, Any]
    writer: Writer

    @cached_property
    def _quote(self) -> str:
        return next(iter(self.syntax.quotes))

    def expression(self, schema: Any, depth: int = 0) -> str:
        schema = resolved(schema, self.root)
        types = kinds(schema, self.root)
        if "enum" in schema or "const" in schema:
            values = [schema["const"]] if "const" in schema else schema["enum"]
            return "(" + " | ".join(self.writer.text(self.value(value)) for value in values) + ")"
        if self.syntax.sign == "=":  # nearly JSON: only its words differ
            return self._words(types) or self.writer.json(self._rooted(schema))
        if types == {"boolean"}:
            return '("true" | "false")'
        if is_text(types) or depth > 8:
            return self._text(schema)
        if types == {"array"}:
            return self._list(schema, depth)
        if types == {"object"}:
            return self._object(schema, depth)
        if types <= {"integer", "number", "null", "boolean"}:
            return self.writer.json(self._rooted(schema))
        return self._text({}) if "string" in types else self._list({}, depth)

    def value(self, value: Any) -> str:
        """Return a known value in the syntax."""
        if isinstance(value, str):
            return quoted(value) if self.syntax.sign == "=" else f"{self._quote}{value}{self._quote}"
        if isinstance(value, list):
            return "[" + ",".join(map(self.value, value)) + "]"
        if isinstance(value, dict):
            quote = quoted if self.syntax.sign == "=" else str
            return "{" + ",".join(f"{quote(key)}:{self.value(inner)}" for key, inner in value.items()) + "}"
        python = {True: "True", False: "False", None: "None"} if self.syntax.sign == "=" else {}
        json_words = {True: "true", False: "false", None: "null"}
        if value is None or isinstance(value, bool):
            return (python or json_words)[value]
        return str(value)

    def _words(self, types: frozenset[str]) -> str:
        return {frozenset(("boolean",)): '("True" | "False")', frozenset(("null",)): '"None"'}.get(types, "")

    def _rooted(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        shared = {key: self.root[key] for key in ("$defs", "definitions") if key in self.root}
        return {**shared, **schema}

    def _text(self, schema: Mapping[str, Any]) -> str:
        return f"{self.writer.text(self._quote)} {self.writer.until(self._quote, string_pattern(schema))}"

    def _list(self, schema: Mapping[str, Any], depth: int) -> str:
        item = self.writer.rule(self.expression(schema.get("items", {"type": "string"}), depth + 1))
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        comma = f'("," {item})'
        more = f"{comma}{{{max(least - 1, 0)},{'' if most is None else max(most - 1, 0)}}}"
        inner = f"{item} {more}" if most != 0 else '""'
        return f'"[" {inner if least else f"({inner})?"} "]"'

    def _object(self, schema: Mapping[str, Any], depth: int) -> str:
        pairs = {
            name: f"{self.writer.text(name + ':')} {self.expression(inner, depth + 1)}"
            for name, inner in properties(schema).items()
        }
        return f'"{{" {in_order(pairs, schema, self.writer, ",")} "}}"'


def string_pattern(schema: Mapping[str, Any]) -> str:
    """Return the schema's constraints on a string as a regular expression of the whole string; "" if there are none."""
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    pattern = schema.get("pattern")
    if isinstance(pattern, str) and pattern:
        before = "" if pattern.startswith("^") else "(?s:.*)"
        after = "" if pattern.endswith("$") else "(?s:.*)"
        return f"{before}({pattern.removeprefix('^').removesuffix('$')}){after}"
    if least or most is not None:
        return f"(?s:.{{{least},{'' if most is None else most}}})"
    return ""
