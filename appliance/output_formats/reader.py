"""Streaming parser of a reply: text to events. The joined events do not depend on how the text is split.

Rules: whitespace before a call is content only if other text is there; a possible marker is held back until it is
decided; reasoning is recognised only before the first content; a marker of a call inside open reasoning ends the
reasoning; a call that is incomplete at the end keeps its arguments so far, and is dropped if it has no name yet.
"""

from collections.abc import Sequence
from typing import Protocol

from appliance.output_formats.calls_reader import CallsReader
from appliance.output_formats.channels import ChannelReader
from appliance.output_formats.declaration import Function, OutputFormat
from appliance.output_formats.events import CallArguments, CallBroken, CallStart, Content, Event, ReasoningText
from appliance.output_formats.marks import decided


class Reader(Protocol):
    """Parser of one reply."""

    @property
    def is_reasoning(self) -> bool: ...

    def feed(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]:
        """Return the events of held-back text at the end of the reply."""
        ...


def reader_of(
    output_format: OutputFormat, *, functions: Sequence[Function] = (), reasons: bool = False, one_call: bool = False
) -> Reader:
    """Return a parser for the format. `reasons` says that the reply begins inside the reasoning. `functions` are passed
    to the call bodies. With `one_call` all calls but the first are dropped."""
    if output_format.channels is not None:
        calls = output_format.calls is not None
        return ChannelReader(output_format.channels, calls=calls, reasons=reasons, one_call=one_call)
    return ReplyReader(output_format, functions=functions, reasons=reasons, one_call=one_call)


class ReplyReader:
    """Parser of a reply with reasoning, content and calls. The parameters are those of `reader_of`."""

    def __init__(
        self,
        output_format: OutputFormat,
        *,
        functions: Sequence[Function] = (),
        reasons: bool = False,
        one_call: bool = False,
    ) -> None:
        self._reasoning = output_format.reasoning
        self._calls = output_format.calls
        self._call_marks = (*self._calls.openings, *self._calls.starts) if self._calls else ()
        self._functions = functions
        self._one_call = one_call
        self._may_reason = self._reasoning is not None and not reasons
        self._may_bare = self._calls is not None and (self._calls.bare or self._calls.only)
        self._may_repeat = reasons  # a start marker may follow at the beginning of reasoning that began without one
        self._dropped = self._reasoning.dropped if self._reasoning is not None else ()
        self._answers = False  # inside the markers of an answer
        self._may_answer = self._reasoning is not None and self._reasoning.answer is not None
        self._pads = ""  # characters to strip before the next text of this part
        self._text = ""  # not yet decided
        self._blank = ""  # whitespace that is content only if content follows
        self._has_content = False
        self._count = 0
        self._section: CallsReader | None = None  # parser of the current section of calls
        self._opened = ""  # the marker that opened the section
        self._state = self._in_content
        if reasons and self._reasoning:
            self._state, self._pads = self._in_reasoning, self._reasoning.trim

    @property
    def is_reasoning(self) -> bool:
        return self._state == self._in_reasoning

    def feed(self, text: str) -> list[Event]:
        self._text += text
        events: list[Event] = []
        while self._text and self._state(events):
            pass
        return self._kept(events) if self._one_call else events

    def finish(self) -> list[Event]:
        """Return the events of held-back text at the end of the reply."""
        events: list[Event] = []
        text, self._text = self._text, ""
        if self._state == self._in_reasoning:
            self._reason(text, events, final=True)
        elif self._state == self._in_calls and self._section is not None:
            events += self._section.finish(text)
        elif self._state == self._in_content:
            self._say(text, events)
            if self._blank and not self._count and not self._has_content:
                events.append(Content(self._blank))
        return self._kept(events) if self._one_call else events

    def _kept(self, events: list[Event]) -> list[Event]:
        """Drop all calls but the first."""
        return [
            event
            for event in events
            if not (isinstance(event, CallStart | CallArguments | CallBroken) and event.index > 0)
        ]

    # Each state consumes the decided text at the front of `_text` and returns whether to continue.

    def _in_reasoning(self, events: list[Event]) -> bool:
        assert self._reasoning is not None, "only a format with reasoning enters this state"
        if self._may_repeat and not self._repeated():
            return False
        place, marker = decided(self._text, (*self._reasoning.ends, *self._call_marks))
        ready, self._text = self._text[:place], self._text[place:]
        self._reason(ready, events, final=marker is not None)
        if marker is None:
            return False
        self._text = self._text[len(marker) :]
        self._pads = self._reasoning.trim
        if marker in self._reasoning.ends:
            self._state = self._in_content
        else:
            self._begin_calls(marker)
        return True

    def _repeated(self) -> bool:
        """Skip a start marker at the beginning of reasoning that began without one. Return whether enough text has
        arrived to decide that."""
        assert self._reasoning is not None, "only a format with reasoning enters this state"
        bare = self._text.lstrip()
        if any(start.startswith(bare) and start != bare for start in self._reasoning.starts):
            return False
        self._may_repeat = False
        for start in self._reasoning.starts:
            if bare.startswith(start):
                self._text = bare[len(start) :]
        return bool(self._text)

    def _reason(self, text: str, events: list[Event], *, final: bool) -> None:
        """Emit reasoning without its padding. Possible padding of the end marker is held back in `_blank`."""
        assert self._reasoning is not None, "only a format with reasoning has reasoning text"
        text = self._blank + (text.lstrip(self._pads) if self._pads else text)
        bare = text.rstrip(self._reasoning.trim)
        self._blank = "" if final else text[len(bare) :]
        if bare:
            self._pads = ""
            events.append(ReasoningText(bare))

    def _in_content(self, events: list[Event]) -> bool:
        if self._may_bare and not self._has_content:
            if not self._before_bare():
                return False
            if self._state != self._in_content:
                return True
        place, marker = decided(self._text, self._content_marks())
        ready, self._text = self._text[:place], self._text[place:]
        self._say(ready, events)
        if marker is None:
            return False
        self._text = self._text[len(marker) :]
        if marker in self._call_marks:
            self._begin_calls(marker)
        elif marker in self._answer_marks():
            self._answer(marker, events)
        elif marker in self._dropped:
            pass
        elif self._may_reason:
            self._open_reasoning()
        else:  # after content the marker is content itself
            self._say(marker, events)
        return True

    def _open_reasoning(self) -> None:
        assert self._reasoning is not None, "its marker was found"
        self._may_reason, self._blank = False, ""
        self._pads, self._state = self._reasoning.trim, self._in_reasoning

    def _content_marks(self) -> tuple[str, ...]:
        """Return the markers that may end or interrupt content."""
        if self._reasoning is None or not (self._may_reason or self._may_answer or self._answers):
            return (*self._call_marks, *self._dropped)
        starts = self._reasoning.starts if self._may_reason else ()
        return (*self._call_marks, *self._answer_marks(), *self._dropped, *starts)

    def _answer_marks(self) -> tuple[str, ...]:
        if self._reasoning is None or self._reasoning.answer is None or not (self._may_answer or self._answers):
            return ()
        return self._reasoning.answer[1:] if self._answers else self._reasoning.answer[:1]

    def _answer(self, marker: str, events: list[Event]) -> None:
        """Handle a marker around the answer. The marker and adjacent line breaks are not content."""
        assert self._reasoning is not None, "its marker was found"
        if self._answers:
            self._answers = False
        elif self._has_content:
            self._say(marker, events)
            return
        else:
            self._answers, self._may_reason = True, False
        self._may_answer, self._blank, self._pads = False, "", self._reasoning.trim

    def _before_bare(self) -> bool:
        """Begin calls without a marker, if only whitespace and reasoning came before. Return whether enough text has
        arrived to continue."""
        assert self._calls is not None, "only calls are bare"
        bare = self._text.lstrip()
        if not bare:
            return False
        starts = self._content_marks()
        if any(start.startswith(bare) and start != bare for start in starts):
            return False
        if any(bare.startswith(start) for start in starts):
            return True
        self._text, self._may_bare = self._blank + (self._text.lstrip(self._pads) if self._pads else self._text), False
        self._begin_calls("")
        return True

    def _say(self, text: str, events: list[Event]) -> None:
        if self._pads:
            text = text.lstrip(self._pads)
            if not text:
                return
            self._pads = ""
        if self._reasoning is None and self._calls is None:
            if text:
                events.append(Content(text))
            return
        if not self._has_content and (not text or text.isspace()):
            self._blank += text
            return
        if text:
            self._may_reason = False
            text = self._blank + text
            kept = text.rstrip(self._reasoning.trim) if self._answers and self._reasoning else text
            self._blank = text[len(kept) :]
            self._has_content = True
            if kept:
                events.append(Content(kept))

    def _begin_calls(self, marker: str) -> None:
        assert self._calls is not None, "only a format with calls begins one"
        body_begun = marker in self._calls.starts
        self._section = CallsReader(self._calls, self._functions, marker, self._count, body_begun=body_begun)
        if body_begun:
            self._text = marker + self._text
        self._opened = marker
        self._blank, self._pads, self._state = "", "", self._in_calls

    def _in_calls(self, events: list[Event]) -> bool:
        section = self._section
        assert section is not None and self._calls is not None, "calls are being read"
        found, used = section.feed(self._text)
        events += found
        self._text = self._text[used:]
        self._count = section.count
        if section.status == "open":
            return False
        self._state, self._section, self._may_bare = self._in_content, None, False
        self._has_content = any(isinstance(event, Content) for event in found)
        if section.status == "broken":
            self._has_content, self._may_reason = True, False
            raw = section.raw
            if not raw:  # here the marker at the beginning of a body is plain text
                raw = self._opened
                self._text = self._text.removeprefix(raw)
            events.append(Content(raw))
            if self._calls.only:
                # the reply was expected to be one bare call and is not: text follows
                self._calls, self._call_marks = None, ()
        elif self._calls.only:
            self._calls, self._has_content = None, True
            self._state = self._in_nothing
        return True

    def _in_nothing(self, events: list[Event]) -> bool:
        """Drop the text after the one call that is the whole reply."""
        self._text = ""
        return False
