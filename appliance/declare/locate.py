"""YAML with positions, read strictly: every value knows its file:line:column, and what two YAML readers would read
differently is an error, not a surprise.

The language is the YAML 1.2 core schema over one mapping in one document. Refused with a reading to write instead: what
YAML 1.1 and 1.2 take for different values (`no`, `010`, `12:30`, `1e3`, `2026-01-01`), numbers in other bases, tabs as
indentation, duplicate keys, keys that are no text, anchors, aliases, merge keys and tags.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import yaml
from yaml.events import (
    AliasEvent,
    CollectionStartEvent,
    DocumentEndEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
    StreamEndEvent,
    StreamStartEvent,
)

from appliance.declare.document import within_secrets
from appliance.declare.remedy import Mend, Remedy, Remove, Strip
from appliance.declare.scalar import read_plain

Path = tuple[str | int, ...]
MAX_DEPTH = 20


@dataclass(frozen=True, order=True)
class Place:
    """Where a value was written: a file with line and column (from 1), or an option or variable, which has neither."""

    source: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source


@dataclass(frozen=True)
class Fault:
    """Something that is wrong whatever the key means. `readings` are spellings to use instead, by JSON type. Code,
    remedy and whether it is certain: as in a Problem."""

    path: Path
    place: Place
    message: str
    readings: tuple[tuple[str, str], ...] = ()
    hint: str = ""
    code: str = "not-yaml"
    remedy: Remedy | None = None
    certain: bool = True


@dataclass
class Tree:
    """Plain values of one source, the place of each key and of each value, and what is wrong with its spelling."""

    value: Any = None
    keys: dict[Path, Place] = field(default_factory=dict)
    values: dict[Path, Place] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)


def dotted(path: Path) -> str:
    """`model.names[0]`"""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def read_yaml(data: bytes, source: str) -> Tree:
    """The one mapping in a YAML document, with places and faults; `value` is {} where nothing could be read."""
    tree = Tree(value={})
    text = _decode(data, source, tree)
    if text is None:
        return tree
    what, hint = "a tab in the indentation", "indent with spaces"
    tabs = [
        Fault((), Place(source, number, len(match[0])), what, hint=hint, remedy=Mend())
        for number, line in enumerate(text.splitlines(), 1)
        if (match := re.match(r" *\t", line)) and line.strip() and not line.lstrip().startswith("#")
    ]
    if tabs:
        tree.faults += tabs
        return tree
    try:
        _Builder(source, tree).build(text)
    except yaml.MarkedYAMLError as error:
        tree.faults.append(_syntax(error, text, source))
    except yaml.reader.ReaderError as error:
        at = text[: error.position]
        place = Place(source, at.count("\n") + 1, len(at) - at.rfind("\n"))
        code = error.character if isinstance(error.character, int) else ord(error.character)
        tree.faults.append(Fault((), place, f"character U+{code:04X} is not allowed in YAML"))
    return tree


def read_value(text: str, place: Place, path: Path, tree: Tree) -> Any:
    """The value of an option or variable; its places and faults go into `tree`. Text that starts with a bracket, brace
    or quote is YAML in flow style (so JSON too); anything else is one scalar as it stands, with `#` and `: ` in it."""
    tree.values[path] = place
    if text.lstrip()[:1] not in ("{", "[", '"', "'"):
        value, reason, readings = read_plain(text.strip())
        if reason:
            tree.faults.append(Fault(path, place, f"{text.strip()}: {reason}", readings))
        return value
    try:
        return _Builder(place.source, tree, place).build_value(text, path)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or "cannot be read"
        tree.faults.append(Fault(path, place, f"not valid YAML: {problem}", hint="quote the whole value for the shell"))
        return None


def _decode(data: bytes, source: str, tree: Tree) -> str | None:
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        tree.faults.append(Fault((), Place(source, 1, 1), "the file is UTF-16", hint="save it as UTF-8"))
        return None
    data = data.removeprefix(b"\xef\xbb\xbf")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        before = data[: error.start]
        place = Place(source, before.count(b"\n") + 1, len(before) - before.rfind(b"\n"))
        message = f"byte 0x{data[error.start]:02x} is not UTF-8"
        tree.faults.append(Fault((), place, message, hint="save the file as UTF-8"))
        return None


def _syntax(error: yaml.MarkedYAMLError, text: str, source: str) -> Fault:
    mark = error.problem_mark or error.context_mark
    if "unexpected end of stream" in (error.problem or "") and error.context_mark:
        mark = error.context_mark
    line, column = (mark.line, mark.column) if mark else (0, 0)
    lines = text.splitlines()
    problem = (error.problem or "cannot be read").replace("\\t", "tab")
    message = f"not valid YAML: {problem}"
    # The parser says where it gave up; the cause is often a key without a space after its colon, there or a line above.
    for number in (line, line - 1):
        if 0 <= number < len(lines) and (match := re.match(r"\s*(- )?([A-Za-z_]\w*):([^\s/].*)$", lines[number])):
            fixed = f"{match[2]}: {'…' if within_secrets(lines, number + 1) else match[3]}"
            at = Place(source, number + 1, match.start(2) + 1)
            return Fault((), at, message, hint=f"a space must follow the colon: {fixed}", remedy=Mend())
    hint = ""
    if line < len(lines) and "\t" in lines[line][column : column + 1]:
        hint = "use spaces"
    elif "unexpected end of stream" in problem:
        hint = "the quote that opens here is not closed"
    elif "mapping values are not allowed" in problem:
        hint = "quote a text that contains ': ', or check the indentation"
    elif "found character" in problem and column < len(lines[line] if line < len(lines) else ""):
        hint = f"put a text that begins with {lines[line][column]} in quotes"
    elif "block end" in problem or "<block mapping start>" in problem:
        hint = "check the indentation: keys of one section start in the same column"
    elif "expected ',' or" in problem:
        hint = "a { or [ is not closed, or a comma is missing"
    return Fault((), Place(source, line + 1, column + 1), message, hint=hint, remedy=Mend())


_FRAME = (StreamStartEvent, StreamEndEvent, DocumentStartEvent, DocumentEndEvent)
_NO_ANCHORS = "anchors and aliases are not allowed: repeat the value"


class _Builder:
    """Builds values from parser events; one document, one mapping."""

    def __init__(self, source: str, tree: Tree, fixed: Place | None = None) -> None:
        self._source = source
        self._tree = tree
        self._fixed = fixed

    def build(self, text: str) -> None:
        events = iter(yaml.parse(text, Loader=yaml.SafeLoader))
        documents = 0
        for event in events:
            if isinstance(event, DocumentStartEvent):
                documents += 1
                if documents > 1:
                    self._fault(
                        (), event, "a second document starts here", hint="one file is one service: use one file each"
                    )
                    return
                root = next(events)
                self._root(root, events)
            elif isinstance(event, StreamEndEvent) and documents == 0:
                hint = "the least is apiVersion: slipway/v2 and model: {source: {path: …}}"
                self._tree.faults.append(Fault((), Place(self._source, 1, 1), "the file is empty", hint=hint))

    def build_value(self, text: str, path: Path) -> Any:
        """The value of a text that is no file: an option or a variable; all its parts are at the one fixed place."""
        events = (e for e in yaml.parse(text, Loader=yaml.SafeLoader) if not isinstance(e, _FRAME))
        value = self._value(next(events), events, path, len(path))
        if rest := next(events, None):
            self._fault(path, rest, "more than one value")
        return value

    def _root(self, root: Event, events: Iterator[Event]) -> None:
        value = self._value(root, events, (), 0)
        if isinstance(value, dict):
            self._tree.value = value
        elif not any(fault.path == () for fault in self._tree.faults):
            what = "a list" if isinstance(value, list) else "empty" if value is None else "a single value"
            hint = "it must be a mapping: apiVersion: slipway/v2, model: {source: {path: …}}, …"
            self._fault((), root, f"the document is {what}", hint=hint)

    def _value(self, event: Event, events: Iterator[Event], path: Path, depth: int) -> Any:
        self._tree.values[path] = self._place(event)
        assert isinstance(event, AliasEvent | ScalarEvent | CollectionStartEvent), "the parser gives values in order"
        if isinstance(event, AliasEvent):
            self._fault(
                path, event, f"alias *{event.anchor}", hint="anchors and aliases are not allowed: repeat the value"
            )
            return None
        if event.anchor is not None:
            hint = "anchors and aliases are not allowed: repeat the value"
            fault = Fault(path, self._place(event), f"anchor &{event.anchor}", hint=hint, code="no-plain-yaml")
            self._tree.faults.append(replace(fault, remedy=Strip(len(event.anchor) + 2)))
        if event.tag is not None:
            hint = "tags are not allowed: leave it out, quote what is text"
            fault = Fault(path, self._place(event), f"tag {event.tag}", hint=hint, code="no-plain-yaml")
            written = re.sub(r"^tag:yaml.org,2002:", "!!", event.tag)
            self._tree.faults.append(replace(fault, remedy=Strip(len(written) + 1) if written[0] == "!" else None))
        if depth > MAX_DEPTH and not isinstance(event, ScalarEvent):
            problem = f"nested deeper than {MAX_DEPTH} levels"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)  # type: ignore[arg-type]
        if isinstance(event, MappingStartEvent):
            return self._mapping(events, path, depth)
        if isinstance(event, SequenceStartEvent):
            items: list[Any] = []
            while not isinstance(item := next(events), SequenceEndEvent):
                items.append(self._value(item, events, (*path, len(items)), depth + 1))
            return items
        assert isinstance(event, ScalarEvent), "every other event is a scalar here"
        return self._scalar(event, path)

    def _scalar(self, event: ScalarEvent, path: Path) -> Any:
        if event.style is not None:
            return event.value
        value, reason, readings = read_plain(event.value)
        if reason:
            self._tree.faults.append(Fault(path, self._place(event), f"{event.value}: {reason}", readings))
        return value

    def _mapping(self, events: Iterator[Event], path: Path, depth: int) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        while not isinstance(event := next(events), MappingEndEvent):
            key = self._key(event, events, path, depth)
            place = self._place(event)
            inner = (*path, key if key is not None else "?")
            if key is not None and key in mapping:
                # The first value stays; the second is read for its own faults under a path of its own.
                again = self._value(next(events), events, (*path, f"{key} (again)"), depth + 1)
                message = f"duplicate key; it stands already in line {self._tree.keys[inner].line}"
                hint = "keep one of them" if again != mapping[key] else "leave one out: they are equal"
                fault = Fault(inner, place, message, hint=hint, code="duplicate-key", remedy=Remove())
                self._tree.faults.append(replace(fault, certain=again == mapping[key]))
                continue
            if key is not None:
                self._tree.keys[inner] = place
            value = self._value(next(events), events, inner, depth + 1)
            if key is not None:
                mapping[key] = value
        return mapping

    def _key(self, event: Event, events: Iterator[Event], path: Path, depth: int) -> str | None:
        if not isinstance(event, ScalarEvent):
            self._fault(path, event, "a key that is no text", hint="keys are plain words")
            if not isinstance(event, AliasEvent):
                self._value(event, events, (*path, "?"), depth + 1)
            return None
        if event.anchor is not None or event.tag is not None:
            self._fault(path, event, "an anchor or tag at a key", hint="anchors and tags are not allowed")
        if event.style is not None:
            return str(event.value)
        if event.value == "<<":
            self._fault(path, event, "merge key <<", hint="merge keys are not allowed: repeat the values")
            return None
        value, reason, _ = read_plain(event.value)
        if reason or not isinstance(value, str):
            why = reason or "it is no text"
            self._fault(
                (*path, event.value), event, f"key {event.value}: {why}", hint=f'write "{event.value}": if it is meant'
            )
            return None
        return str(value)

    def _place(self, event: Event) -> Place:
        if self._fixed:
            return self._fixed
        mark = event.start_mark
        assert mark is not None, "events of a text carry their marks"
        return Place(self._source, mark.line + 1, mark.column + 1)

    def _fault(self, path: Path, event: Event, message: str, hint: str = "") -> None:
        self._tree.faults.append(Fault(path, self._place(event), message, hint=hint, code="no-plain-yaml"))
