"""Output formats as grammars: the allowed replies in llguidance's dialect of Lark.

The grammar is built from the declaration that also parses replies, so the parser understands every constrained reply.
Reasoning is not constrained: the constraint begins after its end (docs/http.md, Structured output). Without reasoning,
a schema or expression is passed unchanged.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from llguidance.gbnf_to_lark import any_to_lark

from appliance.output_formats.channels import answer, call, free, thoughts
from appliance.output_formats.declaration import Calls, Channels, Function, Reasoning, Special
from appliance.output_formats.grammar import SPACES, LarkWriter, all_calls, text_with_calls, text_without_calls
from appliance.output_formats.lark import literal
from appliance.output_formats.structural import between_slashes, structural_grammar
from engine.api.errors import RequestError
from engine.api.messages import Grammar
from engine.structured.definition import json_expression


@dataclass(frozen=True)
class Language:
    """Requested structured output. `special` returns the id of a marker that is a special token."""

    kind: Literal["json_schema", "regex", "choice", "grammar", "structural_tag"]
    source: Any  # a schema, an expression, the choices, a Lark or GBNF grammar, or a structural tag
    param: str

    def grammar(self, special: Special) -> Grammar:
        """Return a grammar of this language alone."""
        if self.kind == "json_schema":
            return Grammar("json_schema", json.dumps(self.source, ensure_ascii=False))
        if self.kind == "regex":
            return Grammar("regex", self.source)
        if self.kind == "choice":
            return Grammar("lark", f"start: {self.expression(special)}")
        if self.kind == "structural_tag":
            return Grammar("lark", structural_grammar(self.source, self.param, special))
        return Grammar("lark", _to_lark(self.source, self.param))

    def expression(self, special: Special) -> str:
        """Return the language as part of a Lark rule."""
        if self.kind == "json_schema":
            return json_expression(self.source)
        if self.kind == "regex":
            return between_slashes(self.source)
        if self.kind == "choice":
            return "(" + " | ".join(map(literal, self.source)) + ")"
        if self.kind == "structural_tag":
            return f"%lark {{\n{structural_grammar(self.source, self.param, special)}\n}}"
        return f"%lark {{\n{_to_lark(self.source, self.param)}\n}}"


def _to_lark(source: str, param: str) -> str:
    try:
        return str(any_to_lark(source))
    except Exception as error:  # the converter raises plain Exception for every error
        raise RequestError(f"{param}: the grammar is neither Lark nor GBNF: {error}", param) from error


@dataclass(frozen=True)
class Constraint:
    """Builds grammars for one request."""

    special: Special  # returns the id of a marker that is a special token; free text cannot contain such a marker
    reasoning: Reasoning | None = None  # format of the reasoning that may come first
    reasons: bool = False  # whether the prompt has opened the reasoning
    channels: Channels | None = None  # if set, the whole reply consists of messages

    def reply(self, language: Language) -> Grammar:
        """Return a grammar of replies in this language."""
        writer = LarkWriter(self.special)
        if self.channels is not None:
            return self._lark(answer(self.channels, language.expression(self.special), writer), writer)
        if self.reasoning is None:
            return language.grammar(self.special)
        return self._lark(language.expression(self.special), writer)

    def calls(
        self,
        calls: Calls,
        functions: Sequence[Function],
        *,
        one_call: bool,
        otherwise: Language | None = None,
    ) -> Grammar:
        """Return a grammar of one or more calls of these functions, or of a text in the language `otherwise`."""
        writer = LarkWriter(self.special)
        if self.channels is not None:
            expression = call(self.channels, functions, writer)
        else:
            expression = all_calls(calls, functions, writer, one_call=one_call)
        if otherwise is not None:
            other = otherwise.expression(self.special)
            other = answer(self.channels, other, writer) if self.channels is not None else other
            expression = f"({expression} | {other})"
        return self._lark(expression, writer, calls)

    def text_with_calls(self, calls: Calls, functions: Sequence[Function], *, one_call: bool) -> Grammar:
        """Return a grammar of free text in which each call is of one of these functions."""
        writer = LarkWriter(self.special)
        if self.channels is not None:
            return writer.grammar(free(self.channels, functions, writer, reasons=self.reasons))
        return self._lark(text_with_calls(calls, functions, writer, one_call=one_call), writer, calls)

    def text_without_calls(self, calls: Calls) -> Grammar | None:
        """Return a grammar of free text without calls. Return None if calls have no marker, because any JSON could be a
        call."""
        writer = LarkWriter(self.special)
        if self.channels is not None:
            return writer.grammar(free(self.channels, (), writer, reasons=self.reasons))
        if calls.bare or not (calls.openings or calls.starts):
            return None
        return self._lark(text_without_calls(calls, writer), writer, calls)

    def _lark(self, expression: str, writer: LarkWriter, calls: Calls | None = None) -> Grammar:
        """Return the grammar of an optional reasoning part and the expression. Markers of calls end reasoning, so they
        are excluded from it."""
        if self.reasoning is None:
            return writer.grammar(expression)
        if self.channels is not None:
            first = thoughts(self.channels, writer, opened=self.reasons)
            return writer.grammar(f"{first} {expression}" if self.reasons else f"({first})? {expression}")
        refused = writer.texts((*calls.openings, *calls.starts)) if calls is not None else []
        start, thinking = self.reasoning.start, writer.until_any(self.reasoning.ends, refused)
        if not self.reasons:
            return writer.grammar(f"({writer.text(start)} {thinking} {SPACES})? {expression}")
        again = f"({writer.text(start)})? " if start and self.special(start) is not None else ""
        return writer.grammar(f"{again}{thinking} {SPACES} {expression}")
