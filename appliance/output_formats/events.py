"""What a reply consists of, in order: reasoning, content and tool calls, in pieces. Pieces of one kind concatenate."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Content:
    text: str


@dataclass(frozen=True)
class ReasoningText:
    """`channel` is where a format with channels wrote it: "analysis", or "commentary" for what a model says beside its
    calls."""

    text: str
    channel: str = ""


@dataclass(frozen=True)
class CallStart:
    """A call whose function is known; once per call, before its arguments. `id` is the model's own name for the call,
    where its format has one."""

    index: int
    name: str
    id: str = ""


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


def _continues(last: Event, event: Event) -> bool:
    match last, event:
        case Content(), Content():
            return True
        case ReasoningText(), ReasoningText():
            return last.channel == event.channel
        case CallArguments(), CallArguments():
            return last.index == event.index
    return False


def joined(events: list[Event]) -> list[Event]:
    """The events with adjacent pieces of one kind put together: the same for every way to cut the text."""
    if len(events) < 2:
        return list(events)
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        if last is not None and _continues(last, event):
            assert not isinstance(last, CallStart) and not isinstance(event, CallStart), "starts are never continued"
            result[-1] = replace(last, text=last.text + event.text)
        else:
            result.append(event)
    return result
