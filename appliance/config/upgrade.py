"""Rewriting of a manifest in an older version of the format.

Only the characters of changed keys are edited, so that comments, order, quotes and indentation are kept. The result is
read again and compared with the original before it is returned.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml
from yaml.events import (
    CollectionEndEvent,
    CollectionStartEvent,
    Event,
    MappingStartEvent,
    ScalarEvent,
    SequenceStartEvent,
)

from appliance.config.deprecated import parts
from appliance.config.manifest import API_VERSION
from appliance.config.versions import OLDER, Older, older, translate
from appliance.config.yaml_loader import Path, dotted, read_yaml

BOM = "\ufeff"


class NoUpgrade(Exception):
    """Raised if the text cannot be rewritten. The message states where and why."""


@dataclass(frozen=True)
class Span:
    """Position of a key and its value in a text, in characters."""

    key: tuple[int, int]
    value: tuple[int, int]
    column: int
    flow: bool  # inside braces
    scalar: bool  # a single value, not a mapping


@dataclass(frozen=True)
class Edit:
    start: int
    end: int
    text: str


def upgrade(data: bytes, source: str) -> bytes:
    """Return the manifest in the current version, unchanged if it already is. Raise NoUpgrade."""
    tree = read_yaml(data, source)
    if unreadable := [fault for fault in tree.faults if not fault.path]:
        raise NoUpgrade("\n".join(f"{fault.place}: {fault.message}" for fault in unreadable))
    version = older(tree.value)
    if version is None:
        found = tree.value.get("apiVersion")
        if found == API_VERSION:
            return data
        known = ", ".join([*(one.name for one in OLDER), API_VERSION])
        place = tree.values.get(("apiVersion",), tree.values.get((), source))
        raise NoUpgrade(f"{place}: apiVersion is {'missing' if found is None else found}; known: {known}")
    text = data.decode()
    mark = BOM if text.startswith(BOM) else ""
    text = text[len(mark) :]
    for edit in sorted(_edits(text, tree.value, version), key=lambda edit: edit.start, reverse=True):
        text = text[: edit.start] + edit.text + text[edit.end :]
    changed = (mark + text).encode()
    translate(tree)
    again = read_yaml(changed, source)
    if again.value != tree.value or len(again.faults) > len(tree.faults):
        raise NoUpgrade(f"{source}: cannot be rewritten without changing its meaning; write {API_VERSION} by hand")
    return changed


def _edits(text: str, value: dict[str, Any], version: Older) -> Iterator[Edit]:
    spans = dict(_spans(text))
    start, end = spans[("apiVersion",)].value
    yield Edit(start, end, text[start:end].replace(version.name, API_VERSION))
    for base, _ in parts(value):
        for rename in version.renames:
            path = (*base, *rename.old)
            if span := spans.get(path):
                if not span.scalar:
                    raise NoUpgrade(f"{dotted(path)} is a mapping or list; it must be text")
                yield from _nest(text, span, rename.section[-1])


def _nest(text: str, span: Span, section: str) -> Iterator[Edit]:
    """Move a key and its value into a section: in braces on the same line if the value is plain, else on a new line."""
    start, end = span.value
    written = text[start:end]
    quoted = written[:1] in ("'", '"')
    if span.flow or (written and "\n" not in written and (quoted or not set(written) & set(",[]{}|>"))):
        quote = text[span.key[0]] if text[span.key[0]] in "'\"" else ""
        yield Edit(span.key[0], span.key[0], f"{quote}{section}{quote}: {{")
        yield Edit(end, end, "}")
        return
    line_end = "\r\n" if "\r\n" in text else "\n"
    yield Edit(span.key[0], span.key[0], f"{section}:{line_end}{' ' * (span.column + 2)}")
    for at, character in enumerate(written[:-1] if written.endswith("\n") else written, start):
        if character == "\n" and text[at + 1 : at + 2] not in ("\n", "\r", ""):
            yield Edit(at + 1, at + 1, "  ")


def _spans(text: str) -> Iterator[tuple[Path, Span]]:
    """Yield all keys of the mappings in a document."""
    events = (event for event in yaml.parse(text, Loader=yaml.SafeLoader))
    for event in events:
        if isinstance(event, CollectionStartEvent):
            yield from _inside(event, events, ())
            return


def _inside(opened: Event, events: Iterator[Event], path: Path) -> Iterator[tuple[Path, Span]]:
    if isinstance(opened, SequenceStartEvent):
        count = 0
        while not isinstance(item := next(events), CollectionEndEvent):
            yield from _inside(item, events, (*path, count))
            count += 1
    elif isinstance(opened, MappingStartEvent):
        while not isinstance(key := next(events), CollectionEndEvent):
            value = next(events)
            inner = (*path, getattr(key, "value", "?"))
            yield inner, _span(key, value, bool(opened.flow_style))
            yield from _inside(value, events, inner)


def _span(key: Event, value: Event, flow: bool) -> Span:
    marks = [key.start_mark, key.end_mark, value.start_mark, value.end_mark]
    at = [mark.index for mark in marks if mark is not None]
    assert len(at) == 4 and marks[0] is not None, "events of a text carry their marks"
    return Span((at[0], at[1]), (at[2], at[3]), marks[0].column, flow, isinstance(value, ScalarEvent))
