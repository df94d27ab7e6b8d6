"""A reply's text to events, piece by piece. However the text is cut, the joined events are the same.

Rules: whitespace before a call is no content if nothing else stands there; a possible marker is held back until it is
decided; reasoning is only looked for before the first content; a call's marker inside unclosed reasoning ends the
reasoning; a call that is unfinished at the end keeps its arguments so far, one without a name so far is dropped.
"""

from collections.abc import Sequence
from typing import Protocol

from appliance.output_formats.calls_reader import CallsReader
from appliance.output_formats.channels import ChannelReader
from appliance.output_formats.declaration import Function, OutputFormat
from appliance.output_formats.events import CallArguments, CallBroken, CallStart, Content, Event, ReasoningText
from appliance.output_formats.marks import decided


class Reader(Protocol):
    """Reads one reply."""

    @property
    def is_reasoning(self) -> bool: ...

    def feed(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]:
        """What was held back, at the end of the reply."""
        ...


def reader_of(
    output_format: OutputFormat, *, functions: Sequence[Function] = (), reasons: bool = False, one_call: bool = False
) -> Reader:
    """`reasons`: the reply begins inside of the reasoning. `functions` are given to the call bodies; `one_call` drops
    all calls but the first."""
    if output_format.channels is not None:
        calls = output_format.calls is not None
        return ChannelReader(output_format.channels, calls=calls, reasons=reasons, one_call=one_call)
    return ReplyReader(output_format, functions=functions, reasons=reasons, one_call=one_call)


class ReplyReader:
    """A reply of reasoning, content and calls; the parameters are those of `reader_of`."""

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
        self._may_repeat = reasons  # a start marker at the very beginning of reasoning that began without one
        self._dropped = self._reasoning.dropped if self._reasoning is not None else ()
        self._answers = False  # inside the markers of an answer
        self._may_answer = self._reasoning is not None and self._reasoning.answer is not None
        self._pads = ""  # characters to leave out before the next text of the present part
        self._text = ""  # not yet decided
        self._blank = ""  # whitespace that is content only if content follows
        self._has_content = False
        self._count = 0
        self._section: CallsReader | None = None
        self._opened = ""  # the marker that the section began with
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
        """What was held back, at the end of the reply."""
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
        """Without all calls but the first."""
        return [
            event
            for event in events
            if not (isinstance(event, CallStart | CallArguments | CallBroken) and event.index > 0)
        ]

    # Each state takes from the front of `_text` what is decided and tells whether to go on.

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
        """Reasoning that began by itself may yet write its start marker, which is no text. Whether that is decided."""
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
        """Emits reasoning without its padding: what may be padding of the end marker waits in `_blank`."""
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
        else:  # content came before the marker, so it is content itself
            self._say(marker, events)
        return True

    def _open_reasoning(self) -> None:
        assert self._reasoning is not None, "its marker was found"
        self._may_reason, self._blank = False, ""
        self._pads, self._state = self._reasoning.trim, self._in_reasoning

    def _content_marks(self) -> tuple[str, ...]:
        """What may stand in content and is none."""
        if self._reasoning is None or not (self._may_reason or self._may_answer or self._answers):
            return (*self._call_marks, *self._dropped)
        starts = self._reasoning.starts if self._may_reason else ()
        return (*self._call_marks, *self._answer_marks(), *self._dropped, *starts)

    def _answer_marks(self) -> tuple[str, ...]:
        if self._reasoning is None or self._reasoning.answer is None or not (self._may_answer or self._answers):
            return ()
        return self._reasoning.answer[1:] if self._answers else self._reasoning.answer[:1]

    def _answer(self, marker: str, events: list[Event]) -> None:
        """A marker around the answer: it is no text, nor are the line ends beside it."""
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
        """Calls may begin here without a marker: only whitespace and reasoning may come before. Whether the text says
        enough to go on."""
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
            if not raw:  # the marker that a body begins with is no beginning here
                raw = self._opened
                self._text = self._text.removeprefix(raw)
            events.append(Content(raw))
            if self._calls.only:
                self._calls, self._call_marks = None, ()  # the bare call that all of it was to be is none: text follows
        elif self._calls.only:
            self._calls, self._has_content = None, True
            self._state = self._in_nothing
        return True

    def _in_nothing(self, events: list[Event]) -> bool:
        """Behind the one call that all of the reply is."""
        self._text = ""
        return False
