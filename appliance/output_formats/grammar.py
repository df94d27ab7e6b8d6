"""Grammars of calls in llguidance's dialect of Lark, from the declaration that also reads them."""

from collections.abc import Mapping, Sequence
from typing import Any

from appliance.output_formats.declaration import Calls, Function, Special, pieces
from appliance.output_formats.lark import ANY_TEXT, json_schema, literal, pattern
from engine.api.messages import Grammar

SPACES = r"/[ \n]{0,4}/"


class LarkWriter:
    """Collects the rules of one grammar. `special` gives the id of a marker that is a special token."""

    def __init__(self, special: Special) -> None:
        self._special = special
        self._rules: dict[str, str] = {}  # name by body

    def grammar(self, expression: str) -> Grammar:
        rules = [f"{name}: {body}" for body, name in self._rules.items()]
        return Grammar("lark", "\n".join([f"start: {expression}", *rules]))

    def _cut(self, text: str) -> list[str | int]:
        """The text with its special tokens as ids."""
        parts: list[str | int] = []
        for piece, may_be in pieces(text):
            token = self._special(piece) if may_be else None
            if token is not None:
                parts.append(token)
            elif parts and isinstance(parts[-1], str):
                parts[-1] += piece
            else:
                parts.append(piece)
        return parts

    def text(self, text: str) -> str:
        return " ".join(f"<[{part}]>" if isinstance(part, int) else literal(part) for part in self._cut(text))

    def json(self, schema: Mapping[str, Any]) -> str:
        return json_schema(schema)

    def rule(self, body: str, flags: str = "") -> str:
        name = self._rules.get(body)
        if name is None:
            # Expressions can only be combined in a terminal, which has a name of capitals and no flags.
            letter = "T" if "/ & ~/" in body else "r"
            name = self._rules[body] = f"{letter}{len(self._rules)}{flags if letter == 'r' else ''}"
        name = name.removesuffix("[lazy]")
        return self.rule(name, flags) if flags and name.startswith("T") else name

    def until(self, end: str, expression: str = "", without: Sequence[str] = ()) -> str:
        """A textual end belongs into the expression itself, as the lexer takes the longest text and does not give back
        the end's first characters. Lazy: it ends at the first one, not at the last; what an expression asks for may go
        beyond the first, so there, and for the end without its padding, nothing may stand behind another one."""
        inner = f"({expression.replace('/', chr(92) + '/')})" if expression else ANY_TEXT[1:-1]
        parts = self._cut(end)
        at = next((place for place, part in enumerate(parts) if isinstance(part, int)), len(parts))
        before = "".join(map(str, parts[:at]))
        found = _without(f"/{inner}{pattern(before)}/", without)
        if at == len(parts) and (expression or end != end.strip()):
            found += f" & ~/(?s:.*){pattern(end.strip())}(?s:.+)/"
        if at == len(parts):
            return self.rule(found, "[lazy]")
        behind = " ".join(f"<[{part}]>" if isinstance(part, int) else literal(part) for part in parts[at:])
        return f"{self.rule(found)} {behind}"

    def until_any(self, ends: Sequence[str], without: Sequence[str] = ()) -> str:
        """As `until`, up to the first of several ends."""
        texts = self.texts(ends)
        options = [self.until(end, without=without) for end in ends if end not in texts or len(ends) == 1]
        if len(ends) > 1 and texts:
            found = f"/{ANY_TEXT[1:-1]}({'|'.join(map(pattern, texts))})/"
            options.append(self.rule(_without(found, without), "[lazy]"))
        return options[0] if len(options) == 1 else f"({' | '.join(options)})"

    def texts(self, markers: Sequence[str]) -> list[str]:
        """Those without special tokens: a free text could hold them."""
        return [mark for mark in markers if mark and all(isinstance(part, str) for part in self._cut(mark))]


def _sequence(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def _bodies(calls: Calls, functions: Sequence[Function], writer: LarkWriter) -> str:
    return writer.rule(" | ".join(calls.body.grammar(function, writer) for function in functions))


def _calls_behind(
    marker: str, calls: Calls, functions: Sequence[Function], writer: LarkWriter, *, one_call: bool
) -> str:
    """All calls, behind the marker that opens them, which is "" or the beginning of what is written first."""
    bodies = _bodies(calls, functions, writer)
    behind = _sequence(bodies, writer.text(calls.end))
    whole = writer.rule(_sequence(writer.text(calls.begin), behind))
    opening = "" if calls.bare else calls.open
    if marker and not opening.strip():
        head, one = writer.text(calls.begin.removeprefix(marker)), behind
    else:
        head, one = writer.text(opening.removeprefix(marker)), whole
    more = ""
    if not (one_call or calls.only):
        more = f"({_sequence(writer.text(', ' if calls.listed else calls.separator), whole)})*"
    inside = f'"[" {one} {more} "]"' if calls.listed else _sequence(one, more)
    return _sequence(head, inside, "" if calls.bare else writer.text(calls.close))


def all_calls(calls: Calls, functions: Sequence[Function], writer: LarkWriter, *, one_call: bool) -> str:
    """A reply that is nothing but calls."""
    return _calls_behind("", calls, functions, writer, one_call=one_call)


def text_with_calls(calls: Calls, functions: Sequence[Function], writer: LarkWriter, *, one_call: bool) -> str:
    """Free text in which each call that is begun is one of these functions."""
    marker = calls.open.strip() or calls.begin.strip()
    refused = writer.texts((*calls.openings, *calls.starts))
    if calls.bare:
        rest = writer.rule(_without(r"/(\s*[^\s{\[](?s:.*))?/", refused))
        return f"({_calls_behind('', calls, functions, writer, one_call=one_call)} | {rest})"
    others = [mark for mark in refused if mark != marker]
    rest = writer.rule(_without(ANY_TEXT, refused))
    single = one_call or not calls.open
    behind = _calls_behind(marker, calls, functions, writer, one_call=single)
    return f"({writer.until(marker, without=others)} {behind}){'?' if one_call else '*'} {rest}"


def text_without_calls(calls: Calls, writer: LarkWriter) -> str:
    """Free text in which no marker of a call occurs. Markers that are special tokens are no text anyway."""
    return writer.rule(_without(ANY_TEXT, writer.texts((*calls.openings, *calls.starts))))


def _without(expression: str, markers: Sequence[str]) -> str:
    """The expression, of a text in which none of the markers occurs."""
    return " & ".join([expression, *(f"~/(?s:.*){pattern(marker)}(?s:.*)/" for marker in markers)])
