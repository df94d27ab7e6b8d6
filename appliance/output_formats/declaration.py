"""What an output format is, as data: reasoning, tool calls, channels. It constrains a reply and it parses one.

A new family is one `Reasoning` or `Calls` value in `appliance.output_formats.families`; a new shape of call body is one
`Body`. Texts of a declaration are what a model writes, line ends included; whitespace around them is optional when a
reply is read.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

from appliance.output_formats.events import Event

Status = Literal["open", "done", "broken"]
# What may be one special token within a declared text, such as <|message|>, <tool_call> or [TOOL_CALLS].
# PLaMo's tags are three tokens or more, of which the first and the last are special: <|plamo:begin_ think :plamo|>.
# MiniMax's mark is one: ]<]minimax[>[ and MiniCPM's tags begin with one: <function name="f">
_MARKER = re.compile(r"\]<\]\w+\[>\[|<\w+(?= name=\")|<\|\w+:(?:begin|end)_|:\w+\|>|<[^<>\s]+>|\[[A-Z_/]+\]")
Special = Callable[[str], int | None]  # the id of a marker that is a special token


@dataclass(frozen=True)
class Function:
    """A function that the model may call; `parameters` is its JSON schema, `strict` wants arguments to follow it."""

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False


class BodyReader(Protocol):
    """Reads one call. `feed` gives the events of a piece of text and how much of it belongs to the call; what it does
    not take it wants to see again, with more behind it. `started`: the call's function was told."""

    @property
    def status(self) -> Status: ...

    @property
    def started(self) -> bool: ...

    def feed(self, text: str) -> tuple[list[Event], int]: ...


class Writer(Protocol):
    """A grammar in the making. Every method gives a Lark expression."""

    def text(self, text: str) -> str:
        """Exactly this, its special tokens as tokens."""
        ...

    def json(self, schema: Mapping[str, Any]) -> str: ...

    def until(self, end: str, expression: str = "") -> str:
        """Any text, or one of a regular expression, up to and with the first `end`."""
        ...

    def rule(self, body: str) -> str:
        """The body under a name of its own."""
        ...


class Body(Protocol):
    """How a call is written between its markers."""

    def reader(self, index: int, functions: Sequence[Function], ends: Sequence[str]) -> BodyReader:
        """`ends` are the markers behind the body: a body that can do without its own end is over before one."""
        ...

    def grammar(self, function: Function, writer: Writer) -> str:
        """A Lark expression of one call of this function."""
        ...

    def texts(self) -> tuple[str, ...]:
        """The fixed texts in which markers may stand."""
        ...


@dataclass(frozen=True)
class Reasoning:
    """Thoughts before the answer. `trim` are characters that pad the markers and belong to neither text; `others` are
    further pairs of markers that mean the same. `implicit`: a reply begins inside, whether it writes `start` or not,
    unless the prompt closed the reasoning or a switch is off.

    `switches` are variables of the chat template; unset ones count as `default`. With default True reasoning is on if
    all of them are, else if any is. Where it is off and the prompt shows nothing, all of the reply is content.
    `answer` are markers around what follows, which belong to no text; `dropped` are others that may stand anywhere in
    it. See `Calls` for how it is recognised.
    """

    name: str
    start: str
    end: str
    trim: str = "\n"
    others: tuple[tuple[str, str], ...] = ()
    implicit: bool = False
    switches: tuple[str, ...] = ()
    default: bool = True
    answer: tuple[str, str] | None = None
    dropped: tuple[str, ...] = ()
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
    """Tool calls. All of them stand between `open` and `close`, each between `begin` and `end`; any of these may be
    empty. `listed`: they are a list in brackets; else `separator` stands between two.

    Leniency: `also` are further pairs that open and close, or without `open` begin a call and close; `starts` are
    beginnings of a body that are read without the marker before it; `bare`: a reply may begin with calls without any
    marker, which is then also how a grammar writes them. With nothing before and behind a body all of the reply is one
    call.

    A chat template that has all of `recognised_by` belongs to the format; where `model_types` are given, only with a
    model whose type (config.json) begins with one of them. Without signs a format is only taken by its name. `ids` says
    what the template wants call ids to be: "functions" like functions.name:0, "short" 9 letters and digits.
    """

    name: str
    body: Body
    begin: str = ""
    end: str = ""
    open: str = ""
    close: str = ""
    separator: str = "\n"
    listed: bool = False
    bare: bool = False
    also: tuple[tuple[str, str], ...] = ()
    starts: tuple[str, ...] = ()
    ids: Ids = ""
    recognised_by: tuple[str, ...] = ()
    model_types: tuple[str, ...] = ()

    @property
    def only(self) -> bool:
        """All of the reply is one call."""
        return not (self.begin or self.open or self.bare)

    @property
    def openings(self) -> dict[str, str]:
        """Markers in the midst of a text with which calls open, and those that close them."""
        first = self.open.strip() or self.begin.strip()
        pairs = {first: self.close.strip()} if first else {}
        return pairs | dict(self.also)


@dataclass(frozen=True)
class Channels:
    """A reply as messages, each with a header that names its channel and maybe a recipient, whose call it then is:
    `start` role `channel` name to=recipient `constrain` type `message` text `ends`. Texts of the channel `final` are
    content, others reasoning."""

    start: str
    channel: str
    constrain: str
    message: str
    end: str
    ends: tuple[str, ...]  # others that end a message, and with it the reply
    role: str
    final: str
    thinking: str
    calling: str
    recipient: str  # what names of functions begin with

    def texts(self) -> tuple[str, ...]:
        return (self.start, self.channel, self.constrain, self.message, self.end, *self.ends)


@dataclass(frozen=True)
class OutputFormat:
    """What one model's replies look like. With channels these are how `reasoning` and `calls` are written."""

    reasoning: Reasoning | None = None
    calls: Calls | None = None
    channels: Channels | None = None

    @property
    def name(self) -> str:
        """For people: how calls and reasoning are written."""
        names = [part.name for part in (self.calls, self.reasoning) if part is not None]
        return " + ".join(dict.fromkeys(names)) or "plain"

    def markers(self) -> tuple[str, ...]:
        """All fixed texts of the format; () where a reply is nothing but text."""
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
        """What a decoder must not hide, should it be a special token."""
        return tuple(dict.fromkeys(part for text in self.markers() for part, marks in pieces(text) if marks))


def pieces(text: str) -> list[tuple[str, bool]]:
    """The text cut at what may be special tokens, and whether each piece may be one."""
    found, at = [], 0
    for match in _MARKER.finditer(text):
        if match.start() > at:
            found.append((text[at : match.start()], False))
        found.append((match[0], True))
        at = match.end()
    return found + ([(text[at:], False)] if at < len(text) else [])
