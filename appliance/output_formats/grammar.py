"""Grammars of calls in llguidance's dialect of Lark, built from the declaration that also parses them."""

from collections.abc import Mapping, Sequence
from typing import Any

from appliance.output_formats.declaration import Calls, Function, Special, pieces
from appliance.output_formats.lark import ANY_TEXT, json_schema, literal, pattern
from engine.api.messages import Grammar

SPACES = r"/[ \n]{0,4}/"


class LarkWriter:
    """Collects the rules of one grammar. `special` returns the id of a marker that is a special token."""

    def __init__(self, special: Special) -> None:
        self._special = special
        self._rules: dict[str, str] = {}  # name by body

    def grammar(self, expression: str) -> Grammar:
        rules = [f"{name}: {body}" for body, name in self._rules.items()]
        return Grammar("lark", "\n".join([f"start: {expression}", *rules]))

    def _cut(self, text: str) -> list[str | int]:
        """Split the text into literal texts and ids of special tokens."""
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
            # Expressions can be combined only in a terminal, whose name is in capitals and which takes no flags.
            letter = "T" if "/ & ~/" in body else "r"
            name = self._rules[body] = f"{letter}{len(self._rules)}{flags if letter == 'r' else ''}"
        name = name.removesuffix("[lazy]")
        return self.rule(name, flags) if flags and name.startswith("T") else name

    def until(self, end: str, expression: str = "", without: Sequence[str] = ()) -> str:
        """Return text up to and including `end`. If `end` is plain text, it is part of the regular expression, because
        the lexer takes the longest match and does not give back the first characters of the end. The rule is lazy, so
        it ends at the first occurrence of `end`. An `expression` could match beyond that; so with one, and for an end
        without its padding, the rule excludes texts in which something follows an earlier end."""
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
        """Return text up to and including the first of several ends; see `until`."""
        texts = self.texts(ends)
        options = [self.until(end, without=without) for end in ends if end not in texts or len(ends) == 1]
        if len(ends) > 1 and texts:
            found = f"/{ANY_TEXT[1:-1]}({'|'.join(map(pattern, texts))})/"
            options.append(self.rule(_without(found, without), "[lazy]"))
        return options[0] if len(options) == 1 else f"({' | '.join(options)})"

    def texts(self, markers: Sequence[str]) -> list[str]:
        """Return the markers without special tokens, which free text could contain."""
        return [mark for mark in markers if mark and all(isinstance(part, str) for part in self._cut(mark))]


def _sequence(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def _bodies(calls: Calls, functions: Sequence[Function], writer: LarkWriter) -> str:
    return writer.rule(" | ".join(calls.body.grammar(function, writer) for function in functions))


def _calls_behind(
    marker: str, calls: Calls, functions: Sequence[Function], writer: LarkWriter, *, one_call: bool
) -> str:
    """Return all calls, after the marker that opens them. `marker` is "" or a prefix of the first text of the calls."""
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
    """Return a grammar of a reply that consists of calls only."""
    return _calls_behind("", calls, functions, writer, one_call=one_call)


def text_with_calls(calls: Calls, functions: Sequence[Function], writer: LarkWriter, *, one_call: bool) -> str:
    """Return a grammar of free text in which each call is of one of these functions."""
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
    """Return a grammar of free text without markers of calls. Special tokens cannot occur in free text anyway."""
    return writer.rule(_without(ANY_TEXT, writer.texts((*calls.openings, *calls.starts))))


def _without(expression: str, markers: Sequence[str]) -> str:
    """Return the expression, restricted to texts without any of the markers."""
    return " & ".join([expression, *(f"~/(?s:.*){pattern(marker)}(?s:.*)/" for marker in markers)])
