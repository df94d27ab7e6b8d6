"""A YAML file as written: positions of keys and values, and the text that messages may show.

`appliance.config.yaml_loader` reads the meaning of a manifest; this module reads its text, for edits and for messages
that quote a line. For a file that is not YAML, only lines are available.
"""

import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path as File

import yaml
from yaml.events import (
    CollectionStartEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)

from engine.api.files import MANIFEST_BYTES, read_file

Path = tuple[str | int, ...]
Position = tuple[int, int]  # line and column, from 1
MAX_DEPTH = 20
HIDDEN = "•••"
_BREAK = re.compile(r"\r\n|[\n\r\x85\u2028\u2029]")  # line breaks of YAML


@dataclass
class Node:
    """A node of the YAML document."""

    path: Path
    start: Position
    end: Position  # position after the last character
    kind: str  # scalar, mapping, sequence
    flow: bool = False  # written in braces or brackets
    text: str = ""  # text of a scalar, without quotes
    entries: "list[tuple[Node, Node]]" = field(default_factory=list)
    items: "list[Node]" = field(default_factory=list)


@dataclass
class Document:
    lines: list[str]
    breaks: list[str]
    root: Node | None = None
    keys: dict[Position, tuple[Node, int]] = field(default_factory=dict)
    """Mapping that contains the key at a position, and the key's index there."""
    values: dict[Position, Node] = field(default_factory=dict)
    found: dict[Path, Node] = field(default_factory=dict)  # first node of each path

    @property
    def text(self) -> str:
        return "".join(line + end for line, end in zip(self.lines, self.breaks, strict=True))

    def parent(self, node: Node) -> tuple[Node, int] | None:
        """Return the mapping that contains a value, and its index there."""
        for mapping, index in self.keys.values():
            if mapping.entries[index][1] is node:
                return mapping, index
        return None

    def within(self, node: Node) -> "Iterator[Node]":
        """Yield a value and all values below it."""
        yield node
        for inner in (*node.items, *(value for _, value in node.entries)):
            yield from self.within(inner)

    def shown(self, number: int) -> str:
        """Return a line with secrets hidden, or "" if it is unknown where they are."""
        line = self.lines[number - 1] if 0 < number <= len(self.lines) else ""
        if self.root is None and within_secrets(self.lines, number):
            return ""
        for start, end in reversed(self._hidden_spans(number, line)):
            line = line[: start - 1] + HIDDEN + line[end - 1 :]
        return line

    def shown_column(self, number: int, column: int) -> int:
        """Map a column to the column in the shown line. A column in a hidden part maps to the start of that part."""
        shift = 0
        for start, end in self._hidden_spans(number, self.lines[number - 1] if number <= len(self.lines) else ""):
            if column <= start:
                break
            if column < end:
                return start + shift
            shift += len(HIDDEN) - (end - start)
        return column + shift

    def _hidden_spans(self, number: int, line: str) -> list[tuple[int, int]]:
        """Return the hidden spans of a line in order, without overlaps."""
        found = [(match.start() + 1, match.end() + 1) for match in _SECRET_TEXT.finditer(line)]
        spans: list[tuple[int, int]] = []
        for start, end in sorted([*found, *self._secret_spans(number)]):
            if spans and start < spans[-1][1]:
                spans[-1] = (spans[-1][0], max(end, spans[-1][1]))
            else:
                spans.append((start, end))
        return spans

    def _is_secret(self, node: Node) -> bool:
        if node.path[-2:] in (("endpoints", "api_keys"), ("traces", "headers")):
            known = [str(path[-1]) for path in self.found if path[-2:-1] == ("secrets",)]
            return not names_secret(node.text, known)
        return is_secret(node.path)

    @cached_property
    def _secrets(self) -> list[Node]:
        return [node for node in self.values.values() if node.kind == "scalar" and self._is_secret(node)]

    def _secret_spans(self, number: int) -> Iterator[tuple[int, int]]:
        for node in self._secrets:
            if node.start[0] <= number <= node.end[0]:
                start = node.start[1] if node.start[0] == number else 1
                end = node.end[1] if node.end[0] == number else len(self.lines[number - 1]) + 1
                if end > start:
                    yield start, end


def read_document(file: File) -> Document | None:
    """Return the document, or None if the file is missing or not text."""
    try:
        data = read_file(file, MANIFEST_BYTES)
        return document(data.removeprefix(b"\xef\xbb\xbf").decode("utf-8"))
    except (OSError, UnicodeDecodeError):
        return None


def document(text: str) -> Document:
    lines, breaks, at = [], [], 0
    for match in _BREAK.finditer(text):
        lines.append(text[at : match.start()])
        breaks.append(match[0])
        at = match.end()
    made = Document([*lines, text[at:]], [*breaks, ""])
    try:
        _read(made, text)
    except (yaml.YAMLError, StopIteration, RecursionError):
        made.root, made.keys, made.values, made.found = None, {}, {}, {}
    return made


def _read(made: Document, text: str) -> None:
    events = (event for event in yaml.parse(text, Loader=yaml.SafeLoader))
    for event in events:
        if isinstance(event, MappingStartEvent):
            made.root = _node(made, event, events, (), 0)
            break
    for _ in events:  # the remaining events are not used, but reading them detects errors
        pass


def _node(made: Document, event: Event, events: Iterator[Event], path: Path, depth: int) -> Node:
    if depth > MAX_DEPTH:
        raise yaml.YAMLError("nested too deep")
    flow = isinstance(event, CollectionStartEvent) and bool(event.flow_style)
    text = event.value if isinstance(event, ScalarEvent) else ""
    node = Node(path, _position(event, "start_mark"), _position(event, "end_mark"), "scalar", flow, text)
    if isinstance(event, MappingStartEvent):
        node.kind = "mapping"
        while not isinstance(event := next(events), MappingEndEvent):
            key = _node(made, event, events, (*path, "?"), depth + 1)
            name = event.value if isinstance(event, ScalarEvent) else "?"
            made.keys.setdefault(key.start, (node, len(node.entries)))
            value = _node(made, next(events), events, (*path, name), depth + 1)
            node.entries.append((key, value))
    elif isinstance(event, SequenceStartEvent):
        node.kind = "sequence"
        while not isinstance(event := next(events), SequenceEndEvent):
            node.items.append(_node(made, event, events, (*path, len(node.items)), depth + 1))
    inner = node.items or [value for _, value in node.entries]
    if flow:
        node.end = _position(event, "end_mark")
    elif inner:
        node.end = inner[-1].end  # a block ends at its last value, not at the next token
    if path[-1:] != ("?",):
        made.values.setdefault(node.start, node)
        made.found.setdefault(path, node)
    return node


def _position(event: Event, which: str) -> Position:
    mark = getattr(event, which)
    return mark.line + 1, mark.column + 1


# -- secrets -----------------------------------------------------------------------------------------------------------

_SECRET_NAME = re.compile(r"secret|passw(or)?d|credential|apikey|accesskey|privatekey|authtoken|hftoken|bearer")
_SECRET_TEXT = re.compile(
    r"(?<=://)[^/\s:@]*:[^/\s@]+(?=@)|\b(sk-|hf_|gh[pousr]_|github_pat_|glpat-|xox[abpr]-|AKIA|ASIA|AIza|eyJ)[\w.-]{6,}|-----BEGIN[^\n]*"
    # At least 24 consecutive letters and digits, with both kinds: not a word, path, model name or digest.
    r"|(?<![\w/.-])(?<!sha256: \")(?=[A-Za-z_+=-]*[0-9])(?=[0-9_+=-]*[A-Za-z])[A-Za-z0-9_+=]{24,}(?![\w/.-])"
)


_PASSWORD = re.compile(r"(?<=://)[^/\s:@]*:[^/\s@]+(?=@)")
_CLEAR_TEXT = re.compile(
    r"://[^/\s:@]*:[^/\s@]+@|-----BEGIN \w* ?PRIVATE KEY"
    r"|\b(sk-|hf_|gh[pousr]_|github_pat_|glpat-|xox[abpr]-|AKIA|ASIA|AIza)[\w.-]{12,}"
)
_VARIABLE_NAME = re.compile(r"(keys?|token|secrets?|passwords?|passwd|passphrase|credentials?)$", re.IGNORECASE)


def is_secret_variable(name: str) -> bool:
    """Return whether an environment variable or a key of `variables` has a name that suggests a secret."""
    return bool(_VARIABLE_NAME.search(name))


def is_secret(path: Path) -> bool:
    """Return whether the value at a path may be a secret.

    This is so below `secrets`, and below a key whose name suggests a secret.
    """
    if path[-2:-1] == ("variables",) and is_secret_variable(str(path[-1])):
        return True
    names = [re.sub(r"[-_ ]", "", part).lower() for part in path if isinstance(part, str)]
    return any(_SECRET_NAME.search(name) for name in names)


def is_hidden(path: Path, value: object) -> bool:
    """Return whether a value must not be shown, because of its path or its form."""
    if isinstance(value, list):
        return any(is_hidden(path, item) for item in value)
    return is_secret(path) or isinstance(value, str) and masked(value) != value


def names_secret(text: str, known: Iterable[str]) -> bool:
    """Return whether a text is probably meant as the name of a secret, and so is not a secret itself."""
    return text in known or bool(difflib.get_close_matches(text, list(known), 1, 0.6))


def masked(text: str) -> str:
    """Hide keys and tokens of known services in a text."""
    return _SECRET_TEXT.sub(HIDDEN, text)


def without_password(text: str) -> str:
    """Return a text without the passwords in its addresses."""
    return _PASSWORD.sub(HIDDEN, text)


def is_clear_text(text: str) -> bool:
    """Return whether a text contains a token of a known service, a private key, or an address with a password."""
    return _CLEAR_TEXT.search(text) is not None


def within_secrets(lines: list[str], number: int) -> bool:
    """Return whether the section around a line mentions secrets, in a text that is not YAML."""
    first = number - 1
    while first > 0 and (not lines[first : first + 1] or not re.match(r"[A-Za-z]", lines[first])):
        first -= 1
    around = "".join(lines[first:number]).lower()
    return bool(_SECRET_NAME.search(re.sub(r"[-_ ]", "", around)))
