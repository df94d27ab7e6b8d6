"""What an output format is: a reasoning part and a call part, each declared once; it constrains and it parses.

A new format is one `Reasoning` or `Calls` value in `appliance.chat.format.formats`; a new shape of call body is one
`Body`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from appliance.chat.format.events import Event


@dataclass(frozen=True)
class Function:
    """A function that the model may call; `parameters` is its JSON schema, `strict` wants arguments to follow it."""

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False


class BodyReader(Protocol):
    """Reads one call. `feed` gives the events of a piece of text and how much of it belongs to the call."""

    @property
    def status(self) -> Literal["open", "done", "broken"]: ...

    @property
    def started(self) -> bool: ...

    def feed(self, text: str) -> tuple[list[Event], int]: ...


class Body(Protocol):
    """How a call is written between its markers."""

    def reader(self, index: int, functions: Sequence[Function]) -> BodyReader: ...

    def grammar(self, function: Function) -> str:
        """A Lark expression of one call of this function."""
        ...


@dataclass(frozen=True)
class Reasoning:
    """Thoughts before the answer. `trim` are characters that pad the markers and belong to neither text."""

    name: str
    start: str
    end: str
    trim: str = "\n"


@dataclass(frozen=True)
class Calls:
    """Tool calls: each between `begin` and `end`, padded by `pad` when written under a grammar. A chat template that
    has all of `recognised_by` belongs to the format. An empty `begin` makes all of the reply one call."""

    name: str
    begin: str
    end: str
    body: Body
    pad: str = "\n"
    recognised_by: tuple[str, ...] = ()


@dataclass(frozen=True)
class OutputFormat:
    """What one model's replies look like."""

    reasoning: Reasoning | None = None
    calls: Calls | None = None

    def markers(self) -> tuple[str, ...]:
        """Texts that a decoder must not hide, should they be special tokens."""
        found = [self.reasoning.start, self.reasoning.end] if self.reasoning else []
        if self.calls:
            found += [self.calls.begin, self.calls.end]
        return tuple(marker for marker in found if marker)
