"""Conversion of fixes to minimal text edits, which replace, insert or delete columns.

Every edit is verified: the edited text is valid YAML, and a moved key is at its new path.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from appliance.config.document import Document, Node, Path, Position, document, is_hidden, masked, within_secrets
from appliance.config.fix import Add, Fix, Move, Remove, RepairYaml, Replace, Strip, Write
from appliance.config.yaml_loader import Place

INDENT = "  "


@dataclass(frozen=True, order=True)
class Edit:
    """Replacement of the text from `column` up to, but excluding, column `end` of `end_line`.

    Lines and columns start at 1. `column` equal to `end` inserts text.
    """

    file: str
    line: int
    column: int
    end: int
    replacement: str
    end_line: int = 0  # 0: the same line

    @property
    def start(self) -> Position:
        return self.line, self.column

    @property
    def stop(self) -> Position:
        return self.end_line or self.line, self.end


def edits_for(fix: Fix | None, place: Place, text: Document) -> tuple[Edit, ...]:
    """Return the edits that fix a problem at this place; () if there are none."""
    if fix is None or not place.line:
        return ()
    at = (place.line, place.column)
    match fix:
        case RepairYaml():
            return _repaired(text, place)
        case Strip(count):
            made = [_edit(place, at, (at[0], at[1] + count), "")]
        case Replace(old, new):
            made = _replaced(text, place, old, new)
        case Add(name, value):
            made = [_edit(place, *_first(text), f"{name}: {value}\n")]
        case Write(value):
            made = _written(text, place, value)
        case Remove():
            made = _removed(text, place)
        case Move(path, value):
            made = _moved(text, place, (*place.base, *path), value)
    after = document(apply(text, made))
    done = after.root is not None and (not isinstance(fix, Move) or (*place.base, *fix.path) in after.found)
    return tuple(made) if made and done else ()


def apply(text: Document, edits: Iterable[Edit]) -> str:
    """Return the text with all edits applied from last to first. Edits must not overlap."""
    lines = [line + end for line, end in zip(text.lines, text.breaks, strict=True)]
    for edit in sorted(edits, key=lambda e: e.start, reverse=True):
        (first, column), (last, end) = edit.start, edit.stop
        behind = lines[last - 1][end - 1 :] if last <= len(lines) else ""
        lines[first - 1 : last] = [lines[first - 1][: column - 1] + edit.replacement + behind]
    return "".join(lines)


def overlap(edits: Sequence[Edit], others: Sequence[Edit]) -> bool:
    """Return whether two changes affect the same text or insert at the same position."""
    return any(
        a.file == b.file and (a.start < b.stop and b.start < a.stop or a.start == b.start)
        for a in edits
        for b in others
    )


def end_of(text: Document, place: Place) -> int:
    """Return the column after the key or value at a place; 0 if it is unknown or on a later line."""
    at = (place.line, place.column)
    if at in text.keys:
        mapping, index = text.keys[at]
        return mapping.entries[index][0].end[1]
    node = text.values.get(at)
    return node.end[1] if node and node.end[0] == at[0] and node.end > at else 0


def _edit(place: Place, start: Position, end: Position, replacement: str) -> Edit:
    return Edit(place.source, *start, end[1], replacement, end[0] if end[0] != start[0] else 0)


def _is_yaml(text: str) -> bool:
    return document(text).root is not None


def _first(text: Document) -> tuple[Position, Position]:
    """Return the position of the first key, where a new key is inserted."""
    line = text.root.start[0] if text.root and not text.root.flow else 1
    return (line, 1), (line, 1)


def _written(text: Document, place: Place, value: str) -> list[Edit]:
    at = (place.line, place.column)
    node = text.values.get(at)
    if node is None and at in text.keys:  # an empty section is identified by its key
        mapping, index = text.keys[at]
        node = mapping.entries[index][1]
    if node is None:
        return []
    empty = node.start == node.end
    return [_edit(place, node.start, node.end, f" {value}" if empty else value)]


def _replaced(text: Document, place: Place, old: str, new: str) -> list[Edit]:
    line = text.lines[place.line - 1] if place.line <= len(text.lines) else ""
    column = line.find(old, place.column - 1) + 1
    if not column:
        return []
    at = (place.line, column)
    made = [_edit(place, at, (place.line, column + len(old)), new)]
    around = [node for node in text.values.values() if node.kind == "scalar" and node.start <= at < node.end]
    if _is_yaml(apply(text, made)) or not around or not (raw := _verbatim(text, around[0])):
        return made
    start, end = column - around[0].start[1], column - around[0].start[1] + len(old)
    return [_edit(place, around[0].start, around[0].end, quoted(raw[:start] + new + raw[end:]))]  # inside braces


def _entry(text: Document, place: Place) -> tuple[Node, int] | None:
    at = (place.line, place.column)
    if at in text.keys:
        return text.keys[at]
    node = text.values.get(at)
    return text.parent(node) if node else None


def _removed(text: Document, place: Place) -> list[Edit]:
    entry = _entry(text, place)
    if entry is None:
        return []
    layer = text.found.get(place.base) if place.base else None
    mapping, index = _whole(text, *entry, layer)
    if layer is not None and mapping is layer and len(mapping.entries) == 1:
        return [_edit(place, mapping.start, mapping.end, "{}")]
    if mapping.flow:
        return [_out_of_braces(place, mapping, index)]
    key, value = mapping.entries[index]
    last = max(value.end[0], key.end[0])
    if last < len(text.lines):
        return [_edit(place, (key.start[0], 1), (last + 1, 1), "")]
    return [_edit(place, (key.start[0], 1), (last, len(text.lines[last - 1]) + 1), "")]


def _whole(text: Document, mapping: Node, index: int, keep: Node | None = None) -> tuple[Node, int]:
    """Return the entry to remove: the section itself if it would become empty."""
    while len(mapping.entries) == 1 and mapping is not keep and (above := text.parent(mapping)):
        mapping, index = above
    return mapping, index


def _out_of_braces(place: Place, mapping: Node, index: int) -> Edit:
    key, value = mapping.entries[index]
    if index + 1 < len(mapping.entries):
        return _edit(place, key.start, mapping.entries[index + 1][0].start, "")
    before = mapping.entries[index - 1][1].end if index else key.start
    return _edit(place, before, max(value.end, key.end), "")


def _moved(text: Document, place: Place, path: Path, value: str) -> list[Edit]:
    entry = _entry(text, place)
    if entry is None or path in text.found:
        return []
    mapping, index = entry
    key, node = mapping.entries[index]
    if mapping.path == path[:-1]:  # same section: only the name changes
        renamed = [_edit(place, key.start, key.end, str(path[-1]))]
        return renamed + ([_edit(place, node.start, node.end, value)] if value and node.end > node.start else [])
    if any(is_hidden(inner.path, inner.text) for inner in text.within(node)):
        return []  # a shown edit would reveal the value that it moves
    value = value or _verbatim(text, node)
    if not value:
        return []
    depth = max(length for length in range(len(path)) if length == 0 or path[:length] in text.found)
    above = text.found.get(path[:depth])
    if above is None or above.kind != "mapping":
        return []
    braces = len(path) > depth + 1 or above.flow
    nested = quoted(value) if braces and "${" in value and value[0] not in "\"'[{" else value
    for part in reversed(path[depth + 1 :]):
        nested = f"{{{part}: {nested}}}"
    line = f"{path[depth]}: {nested}"
    goes, number = _whole(text, mapping, index, above)
    if goes is above:
        key, node = goes.entries[number]
        return [_edit(place, key.start, max(node.end, key.end), line)]
    return [*_inserted(text, place, above, line), *_removed(text, place)]


def _verbatim(text: Document, node: Node) -> str:
    """Return the text of a value if it is on one line, as a scalar or in braces."""
    if node.start[0] != node.end[0] or not (node.kind == "scalar" or node.flow):
        return ""
    return text.lines[node.start[0] - 1][node.start[1] - 1 : node.end[1] - 1]


def _inserted(text: Document, place: Place, above: Node, line: str) -> list[Edit]:
    if above.flow:
        if not above.entries:
            at = (above.start[0], above.start[1] + 1)
            return [_edit(place, at, at, line)]
        at = above.entries[-1][1].end
        return [_edit(place, at, at, f", {line}")]
    key, _ = above.entries[0]
    at = (key.start[0], key.start[1])
    return [_edit(place, at, at, f"{line}\n{' ' * (key.start[1] - 1)}")]


# -- invalid YAML ------------------------------------------------------------------------------------------------------

_GLUED = re.compile(r"(\s*(?:- )?[A-Za-z_]\w*:)([^\s/].*)$")
_VALUE = re.compile(r"(\s*(?:- )?[A-Za-z_]\w*: +)([^'\"#{\[].*?)(\s+#.*)?$")
_INTERPOLATED = re.compile(r"\$\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}[^,}\]]*")
_IN_BRACES = re.compile(r"([{,]\s*[A-Za-z_]\w*: +)([^'\"#{\[,}][^,}]*)")


def _repaired(text: Document, place: Place) -> tuple[Edit, ...]:
    """Return the first of several common repairs that makes the file valid YAML."""
    number = place.line
    line = text.lines[number - 1] if number <= len(text.lines) else ""
    tried: list[list[Edit]] = []
    if match := re.match(r"[ \t]*\t[ \t]*", line):
        tried += [
            [_edit(place, (number, 1), (number, match.end() + 1), _spaces(match[0], width))] for width in (2, 4, 8)
        ]
        tried += _all_tabs(text, place)
    if match := _GLUED.match(line):
        tried.append([_edit(place, (number, match.end(1) + 1), (number, match.end(1) + 1), " ")])
    if match := _INTERPOLATED.match(line, place.column - 1):
        start, end = (number, match.start() + 1), (number, match.end() + 1)
        tried.append([_edit(place, start, end, quoted(match[0]))])
    for match in (_VALUE.match(line), *_IN_BRACES.finditer(line)):
        if match and masked(line) == line and not within_secrets(text.lines, number):
            start, end = (number, match.start(2) + 1), (number, match.end(2) + 1)
            tried.append([_edit(place, start, end, quoted(match[2]))])
    tried += _aligned(text, place)
    tried += _closed(text, place)
    return next((tuple(edits) for edits in tried if _is_yaml(apply(text, edits))), ())


def quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _spaces(blank: str, width: int) -> str:
    return " " * (blank.count(" ") + width * blank.count("\t"))


def _all_tabs(text: Document, place: Place) -> list[list[Edit]]:
    """Replace the tabs of all lines, because fixing a single line does not make the file valid."""
    blanks = [(n, match[0]) for n, line in enumerate(text.lines, 1) if (match := re.match(r"[ \t]*\t[ \t]*", line))]
    return [
        [_edit(place, (n, 1), (n, len(blank) + 1), _spaces(blank, width)) for n, blank in blanks] for width in (2, 4)
    ]


def _aligned(text: Document, place: Place) -> list[list[Edit]]:
    """Indent the line like the one above, or two columns deeper."""
    blank = re.match(r" *", text.lines[place.line - 1])
    above = next((line for line in reversed(text.lines[: place.line - 1]) if line.strip()), "")
    if blank is None or not above:
        return []
    width = len(above) - len(above.lstrip(" "))
    widths = [width + len(INDENT)] if above.rstrip().endswith(":") else [width]
    return [[_edit(place, (place.line, 1), (place.line, len(blank[0]) + 1), " " * w)] for w in widths]


def _closed(text: Document, place: Place) -> list[list[Edit]]:
    """Close a bracket or brace at the end of the line that opens it: the named line or the one above."""
    tried = []
    for number in (place.line, place.line - 1):
        line = text.lines[number - 1] if number else ""
        bare = re.sub(r"\"[^\"]*\"|'[^']*'|\s#.*", "", line)
        missing = bare.count("{") - bare.count("}"), bare.count("[") - bare.count("]")
        if max(missing) > 0 and min(missing) >= 0:
            at = (number, len(re.sub(r"\s+#.*|\s+$", "", line)) + 1)
            tried.append([_edit(place, at, at, "]" * missing[1] + "}" * missing[0])])
    return tried
