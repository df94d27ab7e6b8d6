"""Call bodies that contain the name of the function and then its arguments as one JSON object."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from appliance.output_formats.declaration import BodyReader, Function, Status, Writer
from appliance.output_formats.events import CallArguments, CallStart, Event
from appliance.output_formats.json_text import JsonValue
from appliance.output_formats.marks import first, undecided

NAME = r"[^\s<>\[\]{}()\"'`,;]+"
_MOST_HEAD = 300  # limit of the characters before the arguments; a longer text is not a name


class _Reader:
    def __init__(self, index: int, head: re.Pattern[str], ends: Sequence[str]) -> None:
        self.status: Status = "open"
        self.started = False
        self._index, self._pattern, self._ends = index, head, tuple(ends)
        self._head = ""
        self._value = JsonValue()

    def feed(self, text: str) -> tuple[list[Event], int]:
        return self._arguments(text) if self.started else self._read_head(text)

    def _read_head(self, text: str) -> tuple[list[Event], int]:
        found = first(text, (*self._ends, "{"))
        keep = undecided(text, self._ends) if found is None else 0
        end = len(text) - keep if found is None else found[0]
        room = _MOST_HEAD - len(self._head)
        if end > room:
            self._head += text[:room]
            self.status = "broken"
            return [], room
        self._head += text[:end]
        if found is None:
            return [], end
        match = self._pattern.fullmatch(self._head)
        if match is None:
            self.status = "broken"
            return [], end
        self.started = True
        begun: list[Event] = [CallStart(self._index, match["name"], match.groupdict().get("id") or "")]
        if found[1] != "{":
            self.status = "done"
            return [*begun, CallArguments(self._index, "{}")], end
        events, used = self._arguments(text[end:])
        return begun + events, end + used

    def _arguments(self, text: str) -> tuple[list[Event], int]:
        used = self._value.feed(text)
        self.status = self._value.status
        return [CallArguments(self._index, text[:used])] if used else [], used


@dataclass(frozen=True)
class NamedJson:
    """Call as `before` name `between` {arguments} `after`."""

    between: str
    before: str = ""
    after: str = ""
    prefix: str = ""  # text before the name of the function
    numbered: bool = False
    """Whether the call's number follows the name (functions.name:0); the whole text is then the id of the call."""
    id_mark: str = ""  # marker before an optional id
    others: tuple[str, ...] = ()  # texts that the parser accepts in place of `between`

    def reader(self, index: int, functions: Sequence[Function], ends: Sequence[str]) -> BodyReader:
        return _Reader(index, self._head, ends)

    @cached_property
    def _head(self) -> re.Pattern[str]:
        """Return a pattern of everything before the arguments. All parts but the name are optional."""
        name = f"(?P<name>{NAME}?)" if self.numbered else f"(?P<name>{NAME})"
        if self.numbered:
            name = f"(?P<id>(?:{re.escape(self.prefix)})?{name}(?::[0-9]+)?)"
        before = f"(?:{re.escape(self.before)})?" if self.before else ""
        marked = rf"(?:{re.escape(self.id_mark)}\s*(?P<id>[^\s\[]+))?\s*" if self.id_mark else ""
        between = "|".join(r"\s*".join(map(re.escape, each.split())) for each in (self.between, *self.others))
        return re.compile(rf"\s*{before}\s*{name}\s*{marked}(?:{between})?\s*")

    def grammar(self, function: Function, writer: Writer) -> str:
        number = "/:[0-9]{1,3}/ " if self.numbered else ""
        head = f"{writer.text(self.before + self.prefix + function.name)} {number}{writer.text(self.between)}"
        return f"{head} {writer.json(function.parameters)} {writer.text(self.after)}"

    def texts(self) -> tuple[str, ...]:
        return tuple(text for text in (self.before, self.id_mark, self.between, self.after) if text)
