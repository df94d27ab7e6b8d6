"""Strict YAML loader with source locations: every value has its file:line:column, and ambiguous YAML is an error.

The language is the YAML 1.2 core schema, limited to one mapping in one document. Values that YAML 1.1 and 1.2 read
differently (`no`, `010`, `12:30`, `1e3`, `2026-01-01`) are refused with an unambiguous spelling. Also refused are
numbers in other bases, tabs as indentation, duplicate keys, keys that are not text, anchors, aliases, merge keys and
tags.
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

from appliance.config.fix import Fix, Remove, RepairYaml, Strip
from appliance.config.scalar import read_plain
from appliance.config.syntax import explain

Path = tuple[str | int, ...]
MAX_DEPTH = 20
MAX_POSITIONED = 65_536  # maximum characters of a text for which the column of each $ is determined
MAX_SHOWN = 60  # maximum characters of a value in a message
MAX_VALUES = 4000  # maximum values of one file; the cost of merging layers is quadratic
_NO_TEXT = re.compile(r"[\x00\ud800-\udfff]")  # characters that no path, variable or message can contain


@dataclass(frozen=True, order=True)
class Place:
    """Source location of a value: a file with line and column (from 1), or an option or variable without them."""

    source: str
    line: int = 0
    column: int = 0
    layer: str = ""  # overlay or profile that contains the value
    via: tuple["Place", ...] = ()  # locations of the `extends` that led to the file, nearest first
    base: Path = ()  # path of that overlay or profile

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source

    def within(self, layer: str, base: Path) -> "Place":
        """Return the same place inside a layer whose root is at `base`."""
        return replace(self, layer=f"{layer} of {self.layer}" if self.layer else layer, base=(*self.base, *base))

    def through(self) -> str:
        """Describe the layers, for example `in overlay dev, extended by m.yaml:2:10`; "" for the manifest itself."""
        parts = [f"in {self.layer}"] if self.layer else []
        return ", ".join([*parts, *([f"extended by {', '.join(map(str, self.via))}"] if self.via else [])])


@dataclass(frozen=True)
class Fault:
    """An error that is independent of the meaning of the key. `code`, `remedy` and `certain` are as in Problem."""

    path: Path
    place: Place
    message: str
    readings: tuple[tuple[str, str], ...] = ()  # unambiguous spellings, by JSON type
    hint: str = ""
    code: str = "not-yaml"
    fix: Fix | None = None
    certain: bool = True


@dataclass(frozen=True)
class Interpolated:
    """An interpolated value as written in the file."""

    text: str
    definition: Place | None = None
    """Source of the complete value: an environment variable, an entry of `variables`, or a text with a default; None if
    several sources contribute.
    """
    default: str | None = None  # the default that supplied the value
    shared: bool = False  # other texts refer to the same variable


@dataclass
class Tree:
    """Values of one source with their locations and YAML faults."""

    value: Any = None
    keys: dict[Path, Place] = field(default_factory=dict)  # location of each key
    values: dict[Path, Place] = field(default_factory=dict)  # location of each value
    faults: list[Fault] = field(default_factory=list)
    dollars: dict[Path, tuple[Place, ...]] = field(default_factory=dict)
    """Location of each $ in a text of a file, which may start an interpolation."""
    interpolated: dict[Path, Interpolated] = field(default_factory=dict)  # interpolated values
    unknown: set[Path] = field(default_factory=set)  # paths without a value because of a fault elsewhere


def dotted(path: Path) -> str:
    """Format a path, for example `model.names[0]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def read_yaml(data: bytes, source: str, via: tuple[Place, ...] = ()) -> Tree:
    """Read the single mapping in a YAML document, with locations and faults; `value` is {} if nothing could be read.

    `via` are the locations of the `extends` that led to the document.
    """
    tree = Tree(value={})
    start = Place(source, 1, 1, via=via)
    text = _decode(data, start, tree)
    if text is None:
        return tree
    what, hint = "a tab in the indentation", "indent with spaces"
    tabs = [
        Fault((), replace(start, line=number, column=len(match[0])), what, hint=hint, fix=RepairYaml())
        for number, line in enumerate(text.splitlines(), 1)
        if (match := re.match(r" *\t", line)) and line.strip() and not line.lstrip().startswith("#")
    ]
    if tabs:
        tree.faults += tabs
        return tree
    try:
        _Builder(start, tree, text).build()
    except yaml.MarkedYAMLError as error:
        line, column, message, hint = explain(error, text)
        place = replace(start, line=line, column=column)
        tree.faults.append(Fault((), place, message, hint=hint, fix=RepairYaml()))
    except yaml.reader.ReaderError as error:
        at = text[: error.position]
        place = replace(start, line=at.count("\n") + 1, column=len(at) - at.rfind("\n"))
        code = error.character if isinstance(error.character, int) else ord(error.character)
        tree.faults.append(Fault((), place, f"character U+{code:04X} is not allowed in YAML"))
    return tree


def read_value(text: str, place: Place, path: Path, tree: Tree) -> Any:
    """Read the value of an option or variable; its locations and faults are added to `tree`.

    Text that starts with a bracket, brace or quote is YAML flow style, which includes JSON. Any other text is a single
    scalar, even if it contains `#` or `: `.
    """
    tree.values[path] = place
    if text.lstrip()[:1] not in ("{", "[", '"', "'"):
        value, reason, readings = read_plain(text.strip())
        if reason:
            tree.faults.append(Fault(path, place, f"{_short(text.strip())}: {reason}", readings))
        return value
    try:
        return _Builder(place, tree).build_value(text, path)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or "cannot be read"
        tree.faults.append(Fault(path, place, f"not valid YAML: {problem}", hint="quote the whole value for the shell"))
        return None


def _short(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def _decode(data: bytes, start: Place, tree: Tree) -> str | None:
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        tree.faults.append(Fault((), start, "the file is UTF-16", hint="save it as UTF-8"))
        return None
    data = data.removeprefix(b"\xef\xbb\xbf")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        before = data[: error.start]
        place = replace(start, line=before.count(b"\n") + 1, column=len(before) - before.rfind(b"\n"))
        message = f"byte 0x{data[error.start]:02x} is not UTF-8"
        tree.faults.append(Fault((), place, message, hint="save the file as UTF-8"))
        return None


_FRAME = (StreamStartEvent, StreamEndEvent, DocumentStartEvent, DocumentEndEvent)
_NO_ANCHORS = "anchors and aliases are not allowed: repeat the value"


class _Builder:
    """Builder of values from parser events, for one document with one mapping.

    `start` is the location of the document and `text` its content. Without a text, every value has the location
    `start`.
    """

    def __init__(self, start: Place, tree: Tree, text: str | None = None) -> None:
        self._start = start
        self._tree = tree
        self._text = text
        self._count = 0

    def build(self) -> None:
        events = iter(yaml.parse(self._text or "", Loader=yaml.SafeLoader))
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
                hint = "the minimum is apiVersion: slipway/v2 and model: {source: {path: …}}"
                self._tree.faults.append(Fault((), self._start, "the file is empty", hint=hint))

    def build_value(self, text: str, path: Path) -> Any:
        """Return the value of an option or variable. All its parts have the same location."""
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
            self._tree.faults.append(replace(fault, fix=Strip(len(event.anchor) + 2)))
        if event.tag is not None:
            hint = "tags are not allowed: remove it, and quote text"
            fault = Fault(path, self._place(event), f"tag {event.tag}", hint=hint, code="no-plain-yaml")
            written = re.sub(r"^tag:yaml.org,2002:", "!!", event.tag)
            self._tree.faults.append(replace(fault, fix=Strip(len(written) + 1) if written[0] == "!" else None))
        if depth > MAX_DEPTH and not isinstance(event, ScalarEvent):
            problem = f"nested deeper than {MAX_DEPTH} levels"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)  # type: ignore[arg-type]
        self._count += 1
        if self._count > MAX_VALUES:
            problem = f"more than {MAX_VALUES:,} values"
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
        if self._text is not None and "$" in event.value:
            self._tree.dollars[path] = self._dollars(event, self._text)
        if match := _NO_TEXT.search(event.value):
            self._fault(path, event, f"character U+{ord(match[0]):04X} is not allowed in a text")
            return None
        if event.style is not None:
            return event.value
        value, reason, readings = read_plain(event.value)
        if reason:
            self._tree.faults.append(Fault(path, self._place(event), f"{_short(event.value)}: {reason}", readings))
        return value

    def _mapping(self, events: Iterator[Event], path: Path, depth: int) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        while not isinstance(event := next(events), MappingEndEvent):
            key = self._key(event, events, path, depth)
            place = self._place(event)
            inner = (*path, key if key is not None else "?")
            if key is not None and key in mapping:
                # The first value is kept; the second is read under a separate path to find its faults.
                again = self._value(next(events), events, (*path, f"{key} (again)"), depth + 1)
                message = f"duplicate key; it is already set in line {self._tree.keys[inner].line}"
                hint = "keep one of them" if again != mapping[key] else "leave one out: they are equal"
                fault = Fault(inner, place, message, hint=hint, code="duplicate-key", fix=Remove())
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
            self._fault(path, event, "a key that is not text", hint="keys are plain words")
            if not isinstance(event, AliasEvent):
                self._value(event, events, (*path, "?"), depth + 1)
            return None
        if event.anchor is not None or event.tag is not None:
            self._fault(path, event, "an anchor or tag at a key", hint="anchors and tags are not allowed")
        if match := _NO_TEXT.search(event.value):
            self._fault(path, event, f"character U+{ord(match[0]):04X} is not allowed in a key")
            return None
        if event.style is not None:
            return str(event.value)
        if event.value == "<<":
            self._fault(path, event, "merge key <<", hint="merge keys are not allowed: repeat the values")
            return None
        value, reason, _ = read_plain(event.value)
        if reason or not isinstance(value, str):
            why = reason or "it is not text"
            self._fault(
                (*path, event.value), event, f"key {event.value}: {why}", hint=f'write "{event.value}": if it is meant'
            )
            return None
        return str(value)

    def _place(self, event: Event) -> Place:
        if self._text is None:
            return self._start
        mark = event.start_mark
        assert mark is not None, "events of a text carry their marks"
        return replace(self._start, line=mark.line + 1, column=mark.column + 1)

    def _dollars(self, event: ScalarEvent, text: str) -> tuple[Place, ...]:
        """Return the location of each $ of a scalar, or that of the scalar if escapes prevent the mapping."""
        place, start, end = self._place(event), event.start_mark, event.end_mark
        assert start is not None and end is not None, "events of a text carry their marks"
        raw = text[start.index : end.index]
        at = [index for index, character in enumerate(raw) if character == "$"]
        if len(raw) > MAX_POSITIONED or len(at) != event.value.count("$"):
            return (place,) * event.value.count("$")
        lines = [(raw.count("\n", 0, index), index - raw.rfind("\n", 0, index)) for index in at]
        return tuple(
            replace(place, line=place.line + line, column=column if line else place.column + column - 1)
            for line, column in lines
        )

    def _fault(self, path: Path, event: Event, message: str, hint: str = "") -> None:
        self._tree.faults.append(Fault(path, self._place(event), message, hint=hint, code="no-plain-yaml"))


def single_value(path: tuple[str, ...], text: str, place: Place) -> Tree:
    """Return a tree with a single value, read from text, and the sections that contain it."""
    tree = Tree()
    tree.value = read_value(text, place, path, tree)
    for length in range(len(path), 0, -1):
        tree.value = {path[length - 1]: tree.value}
        tree.keys[path[:length]] = place
        tree.values.setdefault(path[:length], place)
    return tree
