"""Declarative description of output formats: reasoning, tool calls, channels. The same declaration constrains and
parses replies.

A new family is one `Reasoning` value in `reasoning_families` or one `Calls` value in `call_families` or `tag_families`;
a new shape of call body is one `Body`. Texts of a declaration are written as the model writes them, including line
breaks; the parser treats whitespace around them as optional.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

from appliance.output_formats.events import Event

Status = Literal["open", "done", "broken"]
# Parts of a declared text that may be one special token, such as <|message|>, <tool_call> or [TOOL_CALLS]. PLaMo's tags
# are three or more tokens, of which the first and the last are special: <|plamo:begin_ think :plamo|>. MiniMax's mark
# is one token: ]<]minimax[>[ and MiniCPM's tags begin with one: <function name="f">
_MARKER = re.compile(r"\]<\]\w+\[>\[|<\w+(?= name=\")|<\|\w+:(?:begin|end)_|:\w+\|>|<[^<>\s]+>|\[[A-Z_/]+\]")
Special = Callable[[str], int | None]  # returns the id of a marker that is a special token, else None


@dataclass(frozen=True)
class Function:
    """A function that the model may call. `parameters` is its JSON schema. With `strict` its arguments must follow the
    schema."""

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False


class BodyReader(Protocol):
    """Parser of one call. `feed` returns the events of a piece of text and how much of it belongs to the call; the
    caller passes the rest again with more text appended. `started` says that the name of the function was emitted."""

    @property
    def status(self) -> Status: ...

    @property
    def started(self) -> bool: ...

    def feed(self, text: str) -> tuple[list[Event], int]: ...


class Writer(Protocol):
    """Builder of a grammar. Every method returns a Lark expression."""

    def text(self, text: str) -> str:
        """Return an expression of exactly this text; special tokens become token ids."""
        ...

    def json(self, schema: Mapping[str, Any]) -> str: ...

    def until(self, end: str, expression: str = "") -> str:
        """Return any text, or a text of a regular expression, up to and including the first `end`."""
        ...

    def rule(self, body: str) -> str:
        """Return the name of a new rule with this body."""
        ...


class Body(Protocol):
    """Format of a call between its markers."""

    def reader(self, index: int, functions: Sequence[Function], ends: Sequence[str]) -> BodyReader:
        """Return a parser of one call. `ends` are the markers that may follow the body; a body without an end of its
        own ends before one of them."""
        ...

    def grammar(self, function: Function, writer: Writer) -> str:
        """Return a Lark expression of one call of this function."""
        ...

    def texts(self) -> tuple[str, ...]:
        """Return the fixed texts that may contain markers."""
        ...


@dataclass(frozen=True)
class Reasoning:
    """Format of the reasoning before the answer. `recognised_by` and `model_types` work as in `Calls`."""

    name: str
    start: str
    end: str
    trim: str = "\n"  # characters that pad the markers and belong to neither text
    others: tuple[tuple[str, str], ...] = ()  # further pairs of equivalent markers
    implicit: bool = False
    """The reply begins inside the reasoning even without `start`, unless the prompt closed it or a switch is off."""
    switches: tuple[str, ...] = ()
    """Variables of the chat template that switch reasoning on. With `default` True, reasoning is on if all of them are
    true; otherwise it is on if any is. If it is off and the prompt shows no reasoning, the whole reply is content."""
    default: bool = True  # value of unset switches
    answer: tuple[str, str] | None = None  # markers around the answer; they belong to no text
    dropped: tuple[str, ...] = ()  # markers that may occur anywhere in the answer and are removed
    recognised_by: tuple[str, ...] = ()
    model_types: tuple[str, ...] = ()

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        return ((self.start, self.end), *self.others)

    @cached_property
    def starts(self) -> tuple[str, ...]:
        return tuple(start for start, _ in self.pairs if start)

    @cached_property
    def ends(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(end for _, end in self.pairs))

    def switched_on(self, variables: Mapping[str, Any]) -> bool:
        values = [variables.get(name) for name in self.switches]
        on = [self.default if value is None else bool(value) for value in values]
        return not on or (all(on) if self.default else any(on))


Ids = Literal["", "functions", "short"]


@dataclass(frozen=True)
class Calls:
    """Format of tool calls. A section between `open` and `close` contains all calls, each between `begin` and `end`;
    any marker may be empty. If there are no markers around a body and calls are not bare, the whole reply is one call.
    """

    name: str
    body: Body
    begin: str = ""
    end: str = ""
    open: str = ""
    close: str = ""
    separator: str = "\n"
    listed: bool = False  # calls form a list in brackets; otherwise `separator` is between them
    bare: bool = False  # a reply may begin with calls without any marker; grammars then also write them so
    also: tuple[tuple[str, str], ...] = ()
    """Further pairs of markers accepted by the parser: they open and close the section, or without `open` they begin a
    call and close it."""
    starts: tuple[str, ...] = ()  # beginnings of a body that are accepted without the preceding marker
    ids: Ids = ""
    """Call ids that the template requires: "functions" means functions.name:0, "short" means 9 letters and digits."""
    recognised_by: tuple[str, ...] = ()
    """The format is recognised if the chat template contains all of these; if empty, the format is used only by
    name."""
    model_types: tuple[str, ...] = ()
    """If set, the format is recognised only if the model type (config.json) begins with one of these."""

    @property
    def only(self) -> bool:
        """Return whether the whole reply is one call."""
        return not (self.begin or self.open or self.bare)

    @property
    def openings(self) -> dict[str, str]:
        """Return the markers within a text that open calls, and the markers that close them."""
        first = self.open.strip() or self.begin.strip()
        pairs = {first: self.close.strip()} if first else {}
        return pairs | dict(self.also)


@dataclass(frozen=True)
class Channels:
    """Reply as messages, each with a header that names its channel and optionally a recipient, which makes it a call:
    `start` role `channel` name to=recipient `constrain` type `message` text `ends`. Texts of the channel `final` are
    content, others are reasoning."""

    start: str
    channel: str
    constrain: str
    message: str
    end: str
    ends: tuple[str, ...]  # further markers that end a message and the reply
    role: str
    final: str
    thinking: str
    calling: str
    recipient: str  # prefix of the names of functions

    def texts(self) -> tuple[str, ...]:
        return (self.start, self.channel, self.constrain, self.message, self.end, *self.ends)


@dataclass(frozen=True)
class OutputFormat:
    """Output format of one model. If `channels` is set, it defines how `reasoning` and `calls` are written."""

    reasoning: Reasoning | None = None
    calls: Calls | None = None
    channels: Channels | None = None

    @property
    def name(self) -> str:
        """Return the display name of the formats of calls and reasoning."""
        names = [part.name for part in (self.calls, self.reasoning) if part is not None]
        return " + ".join(dict.fromkeys(names)) or "plain"

    def markers(self) -> tuple[str, ...]:
        """Return all fixed texts of the format; () if a reply is plain text."""
        found: list[str] = list(self.channels.texts()) if self.channels else []
        if self.reasoning:
            found += [*self.reasoning.starts, *self.reasoning.ends, *(self.reasoning.answer or ())]
            found += self.reasoning.dropped
        if self.calls:
            calls = self.calls
            found += [calls.begin, calls.end, calls.open, calls.close, *calls.starts, *calls.body.texts()]
            found += [marker for pair in calls.also for marker in pair]
        return tuple(text for text in dict.fromkeys(found) if text)

    def tokens(self) -> tuple[str, ...]:
        """Return the markers that the detokenizer must keep if they are special tokens."""
        return tuple(dict.fromkeys(part for text in self.markers() for part, marks in pieces(text) if marks))


def pieces(text: str) -> list[tuple[str, bool]]:
    """Split the text at possible special tokens. Return the pieces, each with whether it may be a special token."""
    found, at = [], 0
    for match in _MARKER.finditer(text):
        if match.start() > at:
            found.append((text[at : match.start()], False))
        found.append((match[0], True))
        at = match.end()
    return found + ([(text[at:], False)] if at < len(text) else [])
