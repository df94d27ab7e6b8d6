"""Structural tags as Lark grammars: text of which some parts are constrained.

A format is a tree of nodes (`{"type": "sequence", "elements": [...]}` and so on; docs/structured-output.md lists them);
the older form is a list of structures with triggers. Markers that are special tokens of the model become these tokens.
Free text and the marker after it form one lazy lexeme, because the lexer takes the longest match and does not give text
back.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from llguidance.gbnf_to_lark import any_to_lark

from appliance.output_formats.lark import literal, pattern
from engine.api.errors import RequestError
from engine.structured.definition import json_expression
from engine.structured.schema import enforce

Special = Callable[[str], int | None]

MAX_DEPTH: Final = 32
_MARKER: Final = re.compile(r"<[^<>\s]{1,64}>|\[/?[A-Z_]{1,64}\]")  # texts that may be special tokens
_ANY: Final = "(?s:.*)"


def structural_grammar(tag: dict[str, Any], param: str, special: Special) -> str:
    """Return the Lark rules of the tag, beginning at `start`. Raise RequestError with the location of an error."""
    compilation = _Compilation(param, special)
    form = tag.get("format")
    if form is None and ("structures" in tag or "triggers" in tag):
        expression = compilation.triggered(_modern(tag, param), "structural_tag")
    else:
        expression = compilation.node(form, "format")
    return "\n".join([f"start: {expression}", *compilation.rules])


def _modern(tag: dict[str, Any], param: str) -> dict[str, Any]:
    """Convert structures and triggers to an equivalent node."""
    structures = tag.get("structures")
    if not isinstance(structures, list) or not all(isinstance(each, dict) for each in structures):
        raise RequestError(f"{param}: structures must be a list of objects with begin, schema and end.", param)
    tags = [
        {
            "begin": each.get("begin"),
            "content": {"type": "json_schema", "json_schema": each.get("schema", {})},
            "end": each.get("end"),
        }
        for each in structures
    ]
    return {"triggers": tag.get("triggers"), "tags": tags}


@dataclass
class _Compilation:
    """Compilation of one structural tag. Rules are named by number; they cannot clash with names of a user, who has
    none here."""

    param: str
    special: Special
    rules: list[str] = field(default_factory=list)
    depth: int = 0

    def node(self, node: Any, place: str) -> str:
        """Return the expression of a node."""
        kind = node.get("type") if isinstance(node, dict) else None
        compiled = _NODES.get(kind) if isinstance(kind, str) else None
        if compiled is None:
            raise self.refusal(f"{place} must be an object whose type is one of {', '.join(_NODES)}, not {kind!r}")
        if self.depth == MAX_DEPTH:
            raise self.refusal(f"{place} is nested deeper than {MAX_DEPTH} nodes")
        self.depth += 1
        expression = compiled(self, node, place)
        self.depth -= 1
        return expression

    def refusal(self, message: str) -> RequestError:
        return RequestError(f"{self.param}: {message}.", self.param)

    def rule(self, body: str, *, lazy: bool = False) -> str:
        """Add a rule and return its name: a terminal's if the body is a single lexeme with operators."""
        name = f"{'T' if ' & ' in body else 'r'}{len(self.rules)}"
        self.rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def text(self, node: dict[str, Any], name: str, place: str) -> str:
        value = node.get(name)
        if not isinstance(value, str):
            raise self.refusal(f"{place}.{name} must be a text")
        return value

    def texts(self, node: dict[str, Any], name: str, place: str) -> list[str]:
        value = node.get(name)
        if not isinstance(value, list) or not value or not all(isinstance(each, str) and each for each in value):
            raise self.refusal(f"{place}.{name} must be a list of texts that are not empty")
        return value

    def nodes(self, node: dict[str, Any], name: str, place: str) -> list[Any]:
        value = node.get(name)
        if not isinstance(value, list) or not value:
            raise self.refusal(f"{place}.{name} must be a list that is not empty")
        return value

    def flag(self, node: dict[str, Any], name: str, place: str) -> bool:
        value = node.get(name, False)
        if not isinstance(value, bool):
            raise self.refusal(f"{place}.{name} must be true or false")
        return value

    def marked(self, text: str) -> list[str | int]:
        """Split a text into ids of special tokens and the texts between them."""
        pieces: list[str | int] = []
        at = 0
        for found in _MARKER.finditer(text):
            token = self.special(found[0])
            if token is not None:
                pieces += [text[at : found.start()], token]
                at = found.end()
        return [piece for piece in [*pieces, text[at:]] if piece != ""]

    def exactly(self, text: str) -> str:
        return " ".join(_piece(piece) for piece in self.marked(text)) or '""'

    # Free text

    def without(self, markers: Sequence[str]) -> str:
        """Return an expression of any text in which none of the markers occurs."""
        if not markers:
            return f"/{_ANY}/"
        return self.rule(f"/{_ANY}/ & ~/{_ANY}({_either(markers)}){_ANY}/")

    def up_to(self, marker: str, content: str = _ANY, excluded: Sequence[str] = ()) -> str:
        """Return text that matches `content`, up to and including the first occurrence of the marker."""
        pieces = self.marked(marker)
        if pieces and isinstance(pieces[0], int):
            before = self.rule(_lexeme(content, excluded)) if content != _ANY or excluded else f"/{_ANY}/"
            return " ".join([before, *map(_piece, pieces)])
        first = str(pieces[0]) if pieces else ""
        lexeme = self.rule(_lexeme(f"({content}){pattern(first)}", excluded), lazy=True)
        return " ".join([lexeme, *map(_piece, pieces[1:])])

    # Nodes

    def tag(self, node: Any, place: str, *, behind: str = "") -> str:
        """Return the expression of begin, content and end. `behind` is the trigger, which has already been matched."""
        if not isinstance(node, dict):
            raise self.refusal(f"{place} must be an object with begin, content and end")
        begin = self.text(node, "begin", place)[len(behind) :]
        ends = node.get("end")
        if isinstance(ends, str):
            ends = [ends]
        if not isinstance(ends, list) or not ends or not all(isinstance(each, str) for each in ends):
            raise self.refusal(f"{place}.end must be a text or a list of texts")
        inside = f"{place}.content"
        content = node["content"] if isinstance(node.get("content"), dict) else {}
        kind = content.get("type")
        if kind == "any_text":
            excluded = self.excluded(content, inside)
            rest = [self.up_to(each, excluded=excluded) if each else self.node(content, inside) for each in ends]
        elif kind == "regex":
            expression = _expression(self.text(content, "pattern", inside))
            rest = [self.up_to(each, expression) if each else f"/{expression}/" for each in ends]
        else:
            rest = [f"{self.node(content, inside)} ({' | '.join(map(self.exactly, ends))})"]
        return f"{self.exactly(begin)} ({' | '.join(rest)})"

    def excluded(self, node: dict[str, Any], place: str) -> list[str]:
        return self.texts(node, "excludes", place) if node.get("excludes") else []

    def triggered(self, node: dict[str, Any], place: str) -> str:
        """Return free text in which every trigger begins one of the tags."""
        triggers = self.texts(node, "triggers", place)
        tags = self.nodes(node, "tags", place)
        triggers = [each for each in triggers if not any(each != one and each.startswith(one) for one in triggers)]
        for each in triggers:
            if any(each != one and one in each for one in triggers):
                raise self.refusal(f"{place}.triggers: {each!r} has another trigger inside")
        textual = [each for each in triggers if not isinstance(self.marked(each)[0], int)]
        excluded = self.excluded(node, place)
        rest = self.without([*textual, *excluded])
        begun = dict.fromkeys(triggers, "")
        for number, tag in enumerate(tags):
            at = f"{place}.tags[{number}]"
            begin = self.text(tag, "begin", at) if isinstance(tag, dict) else ""
            trigger = next((each for each in triggers if begin.startswith(each)), None)
            if trigger is None:
                raise self.refusal(f"{at}.begin must start with one of the triggers")
            begun[trigger] += (" | " if begun[trigger] else "") + self.tag(tag, at, behind=trigger)
        calls = []
        for trigger, bodies in begun.items():
            if bodies:
                seen = f"{rest} {self.exactly(trigger)}" if trigger not in textual else self.up_to(trigger)
                calls.append(f"{seen} ({bodies})")
        call = f"({' | '.join(calls)})"
        once = self.flag(node, "at_least_one", place)
        if self.flag(node, "stop_after_first", place):
            return call if once else f"({call} | {rest})"
        return f"{call}{'+' if once else '*'} {rest}"

    def separated(self, node: dict[str, Any], place: str) -> str:
        tags = [self.tag(each, f"{place}.tags[{at}]") for at, each in enumerate(self.nodes(node, "tags", place))]
        one = f"({' | '.join(tags)})"
        if not self.flag(node, "stop_after_first", place):
            one = f"({one} ({self.exactly(self.text(node, 'separator', place))} {one})*)"
        return one if self.flag(node, "at_least_one", place) else f"{one}?"

    def sequence(self, node: dict[str, Any], place: str) -> str:
        """Return the elements in sequence. Free text is combined with the fixed text that follows it."""
        elements = self.nodes(node, "elements", place)
        out, at = [], 0
        while at < len(elements):
            each, here = elements[at], f"{place}.elements[{at}]"
            follows = elements[at + 1] if at + 1 < len(elements) else None
            at += 1
            if not isinstance(each, dict) or each.get("type") != "any_text" or follows is None:
                out.append(self.node(each, here))
                continue
            if not isinstance(follows, dict) or follows.get("type") not in ("const_string", "tag"):
                raise self.refusal(f"{here}: only const_string or tag can follow any_text")
            tag = follows["type"] == "tag"
            marker = self.text(follows, "begin" if tag else "value", f"{place}.elements[{at}]")
            if not marker:
                raise self.refusal(f"{here}: what follows any_text must begin with a fixed text")
            out.append(self.up_to(marker, excluded=self.excluded(each, here)))
            if tag:
                out.append(self.tag(follows, f"{place}.elements[{at}]", behind=marker))
            at += 1
        return " ".join(out)

    def schema(self, node: dict[str, Any], place: str) -> str:
        schema = node.get("json_schema", node.get("schema"))
        if not isinstance(schema, dict | bool):
            raise self.refusal(f"{place}.json_schema must be a JSON schema")
        if node.get("style", "json") != "json":
            raise self.refusal(f"{place}.style must be json")
        return json_expression(enforce(schema, strict=True, param=self.param).schema)

    def grammar(self, node: dict[str, Any], place: str) -> str:
        text = self.text(node, "grammar", place)
        try:
            return f"%lark {{\n{any_to_lark(text)}\n}}"
        except Exception as error:  # the converter raises plain Exception for every error
            raise self.refusal(f"{place}.grammar is neither Lark nor GBNF: {error}") from error

    def repeat(self, node: dict[str, Any], place: str) -> str:
        least, most = node.get("min", 0), node.get("max", -1)
        counts = all(isinstance(each, int) and not isinstance(each, bool) for each in (least, most))
        if not counts or least < 0 or (most != -1 and most < max(least, 1)):
            raise self.refusal(f"{place}: min must be at least 0, and max at least min, or -1 for no bound")
        upper = "" if most == -1 else str(most)
        return f"({self.node(node.get('content'), f'{place}.content')}){{{least},{upper}}}"

    def token(self, node: dict[str, Any], place: str) -> str:
        asked = node.get("token")
        token = self.special(asked) if isinstance(asked, str) else asked
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise self.refusal(f"{place}.token must be an id or the name of a special token of this model")
        return f"<[{token}]>"


def _either(texts: Sequence[str]) -> str:
    return "|".join(map(pattern, texts))


def _piece(piece: str | int) -> str:
    return f"<[{piece}]>" if isinstance(piece, int) else literal(piece)


def _lexeme(expression: str, excluded: Sequence[str]) -> str:
    return f"/{expression}/" + (f" & ~/{_ANY}({_either(excluded)}){_ANY}/" if excluded else "")


def between_slashes(expression: str) -> str:
    """Return a regular expression as a lexeme: unescaped slashes and line breaks are escaped."""
    return f"/{_expression(expression)}/"


def _expression(text: str) -> str:
    out, escaped = [], False
    for character in text:
        out.append("\\/" if character == "/" and not escaped else "\\n" if character == "\n" else character)
        escaped = character == "\\" and not escaped
    return "".join(out)


Node = Callable[[_Compilation, dict[str, Any], str], str]


def _wrapped(sign: str) -> Node:
    return lambda it, node, place: f"({it.node(node.get('content'), f'{place}.content')}){sign}"


def _either_node(it: _Compilation, node: dict[str, Any], place: str) -> str:
    each = [it.node(part, f"{place}.elements[{at}]") for at, part in enumerate(it.nodes(node, "elements", place))]
    return f"({' | '.join(each)})"


_NODES: Final[dict[str, Node]] = {
    "const_string": lambda it, node, place: it.exactly(it.text(node, "value", place)),
    "json_schema": _Compilation.schema,
    "regex": lambda it, node, place: between_slashes(it.text(node, "pattern", place)),
    "grammar": _Compilation.grammar,
    "any_text": lambda it, node, place: it.without(it.excluded(node, place)),
    "tag": lambda it, node, place: it.tag(node, place),
    "triggered_tags": _Compilation.triggered,
    "tags_with_separator": _Compilation.separated,
    "sequence": _Compilation.sequence,
    "or": _either_node,
    "optional": _wrapped("?"),
    "star": _wrapped("*"),
    "plus": _wrapped("+"),
    "repeat": _Compilation.repeat,
    "token": _Compilation.token,
}
