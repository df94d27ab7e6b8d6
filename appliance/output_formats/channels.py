"""Replies as messages with headers (harmony format of gpt-oss): the channel of a message decides whether it is content,
reasoning or a call.

A header is `<|start|>assistant to=functions.f<|channel|>commentary <|constrain|>json<|message|>`; the recipient may
also follow the channel. The prompt ends with the beginning of the first header.
"""

import re
from collections.abc import Sequence
from typing import Literal

from appliance.output_formats.declaration import Channels, Function, Writer
from appliance.output_formats.events import CallArguments, CallBroken, CallStart, Content, Event, ReasoningText
from appliance.output_formats.json_text import JsonValue
from appliance.output_formats.lark import ANY_TEXT
from appliance.output_formats.marks import SPACE, first, skip_space, undecided

_MOST_HEADER = 300
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")

Kind = Literal["content", "reasoning", "call"]


class ChannelReader:
    """Reads one reply. Without `calls`, arguments of calls are reasoning. `reasons` says that the prompt opened the
    reasoning channel."""

    def __init__(self, channels: Channels, *, calls: bool, reasons: bool = False, one_call: bool = False) -> None:
        self._channels = channels
        self._calls, self._one_call = calls, one_call
        self._text = ""  # not yet decided
        self._header = ""
        self._in_header = not reasons
        self._kind: Kind = "reasoning"
        self._channel = channels.thinking
        self._name = ""
        self._count = 0
        self._arguments = JsonValue()
        self._started = False
        self._raw = ""  # of a call, after its header
        self._spoke = False  # reasoning has been emitted
        self._fresh = True  # nothing of this message has been emitted

    @property
    def is_reasoning(self) -> bool:
        return not self._in_header and self._kind == "reasoning"

    def feed(self, text: str) -> list[Event]:
        self._text += text
        events: list[Event] = []
        while self._text and (self._read_header(events) if self._in_header else self._read_message(events)):
            pass
        return self._kept(events)

    def finish(self) -> list[Event]:
        events: list[Event] = []
        text, self._text = self._text, ""
        if self._in_header:
            header = self._header + text
            if header.strip(SPACE) and not self._heads(header):
                events.append(Content(header))
        else:
            self._say(text, events)
            self._close(events, cut=True)
        return self._kept(events)

    def _kept(self, events: list[Event]) -> list[Event]:
        if not self._one_call:
            return events
        return [
            event
            for event in events
            if not (isinstance(event, CallStart | CallArguments | CallBroken) and event.index > 0)
        ]

    # Headers

    def _heads(self, text: str) -> bool:
        """Return whether the text can be a header or the beginning of one."""
        bare, marks = text.lstrip(SPACE), self._channels
        known = (marks.start, marks.channel, marks.constrain, marks.message, marks.role, "to=")
        return any(bare.startswith(one) or one.startswith(bare) for one in known)

    def _read_header(self, events: list[Event]) -> bool:
        whole = self._header + self._text
        end = whole.find(self._channels.message)
        head = whole[: end if end >= 0 else len(whole) - undecided(whole, [self._channels.message])]
        if not self._heads(head) or len(head) > _MOST_HEADER:
            # This is not a header: treat it as content.
            self._begin("content", self._channels.final)
            self._text, self._header = whole, ""
            return True
        if end < 0:
            self._header, self._text = whole, ""
            return False
        self._header, self._text = "", whole[end + len(self._channels.message) :]
        self._headed(head)
        return bool(self._text)

    def _headed(self, head: str) -> None:
        channels = self._channels
        named = re.search(rf"{re.escape(channels.channel)}\s*([\w.\-]+)", head)
        recipient = _RECIPIENT.search(head)
        channel = named[1] if named else channels.final
        if recipient is not None and recipient[1] not in ("user", channels.role):
            self._begin("call" if self._calls else "reasoning", channel)
            self._name = recipient[1].removeprefix(channels.recipient)
        else:
            self._begin("content" if channel == channels.final else "reasoning", channel)

    def _begin(self, kind: Kind, channel: str) -> None:
        self._in_header, self._kind, self._channel = False, kind, channel
        self._arguments, self._started, self._raw = JsonValue(), False, ""
        self._fresh = True

    # Messages

    def _read_message(self, events: list[Event]) -> bool:
        ends = (self._channels.end, self._channels.start, *self._channels.ends)
        if self._kind == "call" and self._arguments.status == "open":
            self._read_call(events)
            if not self._text or self._started and self._arguments.status == "open":
                return False
        found = first(self._text, ends)
        if found is None:
            keep = undecided(self._text, ends)
            ready, self._text = self._text[: len(self._text) - keep], self._text[len(self._text) - keep :]
            self._say(ready, events)
            return False
        place, mark = found
        self._say(self._text[:place], events)
        self._close(events)
        self._in_header = True
        self._text = self._text[place + (0 if mark == self._channels.start else len(mark)) :]
        return True

    def _say(self, text: str, events: list[Event]) -> None:
        if not text:
            return
        if self._kind == "content":
            events.append(Content(text))
        elif self._kind == "reasoning":
            between = "\n" if self._spoke and self._fresh else ""
            events.append(ReasoningText(between + text, self._channel))
            self._spoke, self._fresh = True, False
        else:
            self._raw += text

    def _read_call(self, events: list[Event]) -> None:
        """Read the arguments to the end of their JSON; its strings may contain texts that look like markers."""
        if not self._started and self._raw.strip(SPACE):
            return  # the earlier text is not JSON, and this text belongs to it
        start = 0 if self._started else skip_space(self._text)
        if start == len(self._text) or not (self._started or self._text[start] == "{"):
            return
        if not self._started:
            self._started = True
            events.append(CallStart(self._count, self._name))
            self._count += 1
        used = self._arguments.feed(self._text, start)
        if used > start:
            events.append(CallArguments(self._count - 1, self._text[start:used]))
        self._raw += self._text[:used]
        self._text = self._text[used:]

    def _close(self, events: list[Event], *, cut: bool = False) -> None:
        """End the message. `cut` says that the reply ends here, so a call without any arguments is dropped."""
        if self._kind == "call" and self._started and self._arguments.status == "broken":
            events.append(CallBroken(self._count - 1, self._raw))
        elif self._kind == "call" and not self._started and self._raw.strip(SPACE):
            events.append(ReasoningText(self._raw, self._channel))
        elif self._kind == "call" and not self._started and not cut:
            events += [CallStart(self._count, self._name), CallArguments(self._count, "{}")]
            self._count += 1


# Grammars. They start after the beginning of the header that is in the prompt.


def _head(channels: Channels, channel: str, writer: Writer) -> str:
    return writer.text(f"{channels.channel}{channel}{channels.message}")


def thoughts(channels: Channels, writer: Writer, *, opened: bool) -> str:
    """Return a grammar of a reasoning message and the beginning of the next header."""
    head = "" if opened else f"{_head(channels, channels.thinking, writer)} "
    return f"{head}{writer.until(channels.end)} {writer.text(channels.start + channels.role)}"


def call(channels: Channels, functions: Sequence[Function], writer: Writer) -> str:
    one = []
    for function in functions:
        to = f"{channels.channel}{channels.calling} to={channels.recipient}{function.name} "
        head = writer.text(f"{to}{channels.constrain}json{channels.message}")
        one.append(f"{head} {writer.json(function.parameters)}")
    return "(" + " | ".join(one) + ")"


def answer(channels: Channels, expression: str, writer: Writer) -> str:
    return f"{_head(channels, channels.final, writer)} {expression}"


def free(channels: Channels, functions: Sequence[Function], writer: Writer, *, reasons: bool) -> str:
    """Return a grammar of any messages in which each call is of one of these functions."""
    names = (channels.thinking, channels.calling, channels.final)
    heads = " | ".join(_head(channels, name, writer) for name in names)
    calls = f" | {call(channels, functions, writer)}" if functions else ""
    message = writer.rule(f"({heads}) {ANY_TEXT}{calls}")
    more = f"({writer.text(channels.end + channels.start + channels.role)} {message})*"
    return f"{ANY_TEXT if reasons else message} {more}"
