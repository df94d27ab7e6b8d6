"""A reply's text to events, piece by piece. However the text is cut, the joined events are the same.

Rules: whitespace before a call is no content if nothing else stands there; a possible marker is held back until it is
decided; reasoning is only looked for before the first content; a call's marker inside unclosed reasoning ends the
reasoning; a call that is unfinished at the end keeps its arguments so far, one without a name so far is dropped.
"""

from collections.abc import Sequence

from appliance.chat.format.declaration import BodyReader, Function, OutputFormat
from appliance.chat.format.events import CallArguments, CallBroken, CallStart, Content, Event, ReasoningText


def _undecided(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of the text that may still become one of the markers."""
    longest = max(map(len, markers), default=0) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0


def _first(text: str, markers: Sequence[str]) -> tuple[int, str] | None:
    """Place and name of the marker that occurs first."""
    found = [(place, marker) for marker in markers if (place := text.find(marker)) >= 0]
    return min(found, default=None)


class ReplyReader:
    """Reads one reply. `reasons`: the prompt opened the reasoning already. `functions` are given to the call bodies;
    `one_call` drops all calls but the first."""

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
        self._functions = functions
        self._one_call = one_call
        self._state = self._in_reasoning if reasons and self._reasoning else self._in_content
        self._may_reason = self._reasoning is not None and not reasons
        self._pads = ""  # characters to leave out before the next text of the present part
        self._text = ""  # not yet decided
        self._blank = ""  # whitespace that is content only if content follows
        self._has_content = False
        self._count = 0
        self._body: BodyReader | None = None
        self._raw = ""  # the present call as written
        if reasons and self._reasoning:
            self._pads = self._reasoning.trim

    @property
    def is_reasoning(self) -> bool:
        return self._state == self._in_reasoning

    def feed(self, text: str) -> list[Event]:
        self._text += text
        events: list[Event] = []
        while self._text and self._state(events):
            pass
        return self._kept(events)

    def finish(self) -> list[Event]:
        """What was held back, at the end of the reply."""
        events: list[Event] = []
        text, self._text = self._text, ""
        if self._state == self._in_reasoning:
            self._reason(text, events, final=True)
        elif self._state == self._in_content:
            self._say(text, events)
            if self._blank and not self._count and not self._has_content:
                events.append(Content(self._blank))
        elif self._state == self._in_broken:
            events.append(CallBroken(self._count - 1, self._raw + text))
        return self._kept(events)

    def _kept(self, events: list[Event]) -> list[Event]:
        if not self._one_call:
            return events
        return [
            event
            for event in events
            if not (isinstance(event, CallStart | CallArguments | CallBroken) and event.index > 0)
        ]

    # Each state takes from the front of `_text` what is decided and tells whether to go on.

    def _in_reasoning(self, events: list[Event]) -> bool:
        assert self._reasoning is not None, "only a format with reasoning enters this state"
        markers = [self._reasoning.end, *([self._calls.begin] if self._calls and self._calls.begin else [])]
        found = _first(self._text, markers)
        if found is None:
            keep = _undecided(self._text, markers)
            ready, self._text = self._text[: len(self._text) - keep], self._text[len(self._text) - keep :]
            self._reason(ready, events, final=False)
            return False
        place, marker = found
        self._reason(self._text[:place], events, final=True)
        self._text = self._text[place + len(marker) :]
        self._pads = self._reasoning.trim
        if marker == self._reasoning.end:
            self._state = self._in_content
        else:
            self._begin_call(marker)
        return True

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
        if self._calls and not self._calls.begin:
            return self._before_bare_call()
        markers = [self._calls.begin] if self._calls else []
        if self._reasoning and self._may_reason:
            markers.append(self._reasoning.start)
        found = _first(self._text, markers)
        keep = _undecided(self._text, markers) if found is None else 0
        place = len(self._text) - keep if found is None else found[0]
        self._say(self._text[:place], events)
        if found is None:
            self._text = self._text[place:]
            return False
        self._text = self._text[place + len(found[1]) :]
        if self._calls and found[1] == self._calls.begin:
            self._begin_call(found[1])
        elif self._may_reason:
            self._may_reason, self._blank = False, ""
            assert self._reasoning is not None, "a reasoning marker was looked for"
            self._pads, self._state = self._reasoning.trim, self._in_reasoning
        else:  # content came before the marker, so it is content itself
            self._say(found[1], events)
        return True

    def _before_bare_call(self) -> bool:
        """All of the reply is one call: only whitespace and reasoning may come before it."""
        self._text = self._text.lstrip()
        start = self._reasoning.start if self._reasoning and self._may_reason else ""
        if start and self._text.startswith(start):
            assert self._reasoning is not None, "its marker was found"
            self._text, self._may_reason = self._text[len(start) :], False
            self._pads, self._state = self._reasoning.trim, self._in_reasoning
            return True
        if not self._text or (start and start.startswith(self._text)):
            return False
        self._begin_call("")
        return True

    def _say(self, text: str, events: list[Event]) -> None:
        if self._pads:
            text = text.lstrip(self._pads)
            if not text:
                return
            self._pads = ""
        if self._reasoning is None and self._calls is None:
            events.extend([Content(text)] if text else [])
            return
        if not self._has_content and (not text or text.isspace()):
            self._blank += text
            return
        if text:
            self._may_reason = False
            events.append(Content(self._blank + text))
            self._blank, self._has_content = "", True

    def _begin_call(self, marker: str) -> None:
        assert self._calls is not None, "only a format with calls begins one"
        self._body = self._calls.body.reader(self._count, self._functions)
        self._raw, self._blank, self._pads = marker, "", ""
        self._state = self._in_call

    def _in_call(self, events: list[Event]) -> bool:
        assert self._body is not None, "a call has a body"
        started = self._body.started
        found, used = self._body.feed(self._text)
        events += found
        self._raw += self._text[:used]
        self._text = self._text[used:]
        self._count += self._body.started and not started
        if self._body.status == "done":
            self._state = self._after_call
        elif self._body.status == "broken" and self._body.started:
            self._state = self._in_broken
        elif self._body.status == "broken":
            self._has_content, self._may_reason, self._state = True, False, self._in_content
            if self._raw:
                events.append(Content(self._raw))
            if self._calls and not self._calls.begin:
                self._calls = None  # the bare call that all of the reply was to be is none: the rest is text
        return self._body.status != "open"

    def _after_call(self, events: list[Event]) -> bool:
        """What stands between the body and the end marker is dropped."""
        assert self._calls is not None, "a call was read"
        if not self._calls.end:
            if not self._calls.begin:
                self._text = ""
                return False
            self._left_call()
            return True
        found = _first(self._text, [self._calls.end, self._calls.begin])
        if found is None:
            keep = _undecided(self._text, [self._calls.end, self._calls.begin])
            self._text = self._text[len(self._text) - keep :]
            return False
        self._text = self._text[found[0] + len(found[1]) :]
        if found[1] == self._calls.end:
            self._left_call()
        else:
            self._begin_call(found[1])
        return True

    def _in_broken(self, events: list[Event]) -> bool:
        assert self._calls is not None, "a call was read"
        end = self._calls.end
        place = self._text.find(end) if end else -1
        if place < 0:
            keep = _undecided(self._text, [end]) if end else 0
            self._raw += self._text[: len(self._text) - keep]
            self._text = self._text[len(self._text) - keep :]
            return False
        events.append(CallBroken(self._count - 1, self._raw + self._text[: place + len(end)]))
        self._text = self._text[place + len(end) :]
        self._left_call()
        return True

    def _left_call(self) -> None:
        self._body, self._raw = None, ""
        self._has_content, self._blank = False, ""
        self._state = self._in_content
