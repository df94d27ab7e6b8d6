"""Parts of a reply in order: reasoning, content and tool calls, in pieces. Pieces of one kind are concatenated."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Content:
    text: str


@dataclass(frozen=True)
class ReasoningText:
    """A piece of reasoning. `channel` is the channel of a format with channels: "analysis", or "commentary" for text
    next to calls."""

    text: str
    channel: str = ""


@dataclass(frozen=True)
class CallStart:
    """Start of a call: emitted once, when the function is known and before the arguments. `id` is the model's own id of
    the call, if its format has one."""

    index: int
    name: str
    id: str = ""


@dataclass(frozen=True)
class CallArguments:
    """A piece of a call's arguments as JSON text."""

    index: int
    text: str


@dataclass(frozen=True)
class CallBroken:
    """A started call turned out to be invalid. `text` is all of it as the model wrote it, markers included. A stream
    cannot retract what it sent, so it keeps the call with the arguments so far; a complete reply shows the text
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
    """Merge adjacent pieces of one kind. The result does not depend on how the text was split."""
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
