"""An output format as a grammar: what the reply may be, in llguidance's dialect of Lark.

The same declaration that parses a reply builds it, so a constrained reply is always one that the parser understands.
Reasoning stays free: the constraint begins behind its end (docs/http.md, Structured output). Without reasoning a plain
schema or expression is sent as it is.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from llguidance.gbnf_to_lark import any_to_lark

from appliance.chat.format.declaration import Calls, Function, Reasoning
from appliance.chat.format.lark import ANY_TEXT, literal, pattern, without
from appliance.chat.structural import Special, between_slashes, structural_grammar
from engine.api.errors import RequestError
from engine.api.messages import Grammar


@dataclass(frozen=True)
class Language:
    """What structured output was asked for. `source` is a schema, an expression, the choices, a Lark or GBNF grammar,
    or a structural tag. `special` gives the id of a marker that is a special token."""

    kind: Literal["json_schema", "regex", "choice", "grammar", "structural_tag"]
    source: Any
    param: str

    def grammar(self, special: Special) -> Grammar:
        """The language on its own."""
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
        """The language as part of a Lark rule."""
        if self.kind == "json_schema":
            return "%json " + json.dumps(self.source, ensure_ascii=False)
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
    except Exception as error:  # the converter raises plain Exception for every kind of fault
        raise RequestError(f"{param}: the grammar is neither Lark nor GBNF: {error}", param) from error


@dataclass(frozen=True)
class Constraint:
    """Builds grammars for one request. `special` gives the id of a marker that is a special token: such a marker is no
    text. `reasoning` is the part that may come first, `reasons` whether the prompt opened it already."""

    special: Callable[[str], int | None]
    reasoning: Reasoning | None = None
    reasons: bool = False

    def reply(self, language: Language) -> Grammar:
        """The reply is a text of this language."""
        if self.reasoning is None:
            return language.grammar(self.special)
        return self._lark(language.expression(self.special))

    def calls(
        self,
        calls: Calls,
        functions: Sequence[Function],
        *,
        one_call: bool,
        otherwise: Language | None = None,
    ) -> Grammar:
        """One or more calls of these functions, or (`otherwise`) a text of a language."""
        expression = self._one_of(calls, functions)
        if not one_call and calls.begin:
            expression = f"{expression} ({literal(calls.pad)} {expression})*"
        if otherwise is not None:
            expression = f"({expression} | {otherwise.expression(self.special)})"
        return self._lark(expression)

    def text_with_calls(self, calls: Calls, functions: Sequence[Function], *, one_call: bool) -> Grammar:
        """Free text in which each call that is begun is one of these functions."""
        call = f"begun {self._inside(calls, functions)}"
        token = self.special(calls.begin)
        rest = without(calls.begin) if token is None else ANY_TEXT
        rules = {"begun": self._until(calls.begin), "REST": rest}
        return self._lark(f"({call})? REST" if one_call else f"({call})* REST", rules)

    def _one_of(self, calls: Calls, functions: Sequence[Function]) -> str:
        if not calls.begin:
            return self._bodies(calls, functions)
        return f"{self._marker(calls.begin)} {self._inside(calls, functions)}"

    def _inside(self, calls: Calls, functions: Sequence[Function]) -> str:
        """A call behind its begin marker."""
        pad = literal(calls.pad)
        return f"{pad} {self._bodies(calls, functions)} {pad} {self._marker(calls.end)}"

    def _bodies(self, calls: Calls, functions: Sequence[Function]) -> str:
        return "(" + " | ".join(calls.body.grammar(function) for function in functions) + ")"

    def _marker(self, text: str) -> str:
        token = self.special(text)
        return literal(text) if token is None else f"<[{token}]>"

    def _until(self, marker: str) -> str:
        """The body of a rule: any text up to and with the marker. A textual marker belongs into the expression itself,
        as the lexer takes the longest text and does not give back the marker's first characters."""
        token = self.special(marker)
        return ANY_TEXT[:-1] + pattern(marker) + "/" if token is None else f"any <[{token}]>"

    def _lark(self, expression: str, rules: dict[str, str] | None = None) -> Grammar:
        rules = dict(rules or {})
        if self.reasoning is not None:
            rules |= {"thoughts": self._until(self.reasoning.end), "space": r"/[ \n]{0,4}/"}
            if self.reasons:
                expression = f"thoughts space {expression}"
            else:
                expression = f"({self._marker(self.reasoning.start)} thoughts space)? {expression}"
        lines = [f"start: {expression}"]
        for name, body in rules.items():
            # Lazy: the expression ends at the first marker, not at the last one.
            lazy = "[lazy]" if name in ("begun", "thoughts") and body.startswith("/") else ""
            lines.append(f"{name}{lazy}: {body}")
        if any(body.startswith("any ") for body in rules.values()):
            lines.append(f"any: {ANY_TEXT}")
        return Grammar("lark", "\n".join(lines))
