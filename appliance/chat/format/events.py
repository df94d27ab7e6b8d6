"""What a reply consists of, in order: reasoning, content and tool calls, in pieces. Pieces of one kind concatenate."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Content:
    text: str


@dataclass(frozen=True)
class ReasoningText:
    text: str


@dataclass(frozen=True)
class CallStart:
    """A call whose function is known; once per call, before its arguments."""

    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A piece of a call's arguments, JSON text."""

    index: int
    text: str


@dataclass(frozen=True)
class CallBroken:
    """A started call turned out to be no call; `text` is all of it as the model wrote it, markers included. A stream
    cannot take back what it sent, so the call stands there with the arguments so far; a whole reply shows the text
    instead."""

    index: int
    text: str


Event = Content | ReasoningText | CallStart | CallArguments | CallBroken


def joined(events: list[Event]) -> list[Event]:
    """The events with adjacent pieces of one kind put together: the same for every way to cut the text."""
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(event, Content) and isinstance(last, Content):
            result[-1] = Content(last.text + event.text)
        elif isinstance(event, ReasoningText) and isinstance(last, ReasoningText):
            result[-1] = ReasoningText(last.text + event.text)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments) and last.index == event.index:
            result[-1] = CallArguments(event.index, last.text + event.text)
        else:
            result.append(event)
    return result
