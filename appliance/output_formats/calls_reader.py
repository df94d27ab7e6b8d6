"""Streaming parser of a section of tool calls, from its opening marker to its closing marker.

If the text turns out not to be a call before a function name was emitted, it becomes content, including the marker.
After a call, other text before a required marker is dropped.
"""

from collections.abc import Sequence

from appliance.output_formats.declaration import BodyReader, Calls, Function, Status, pieces
from appliance.output_formats.events import CallBroken, Content, Event
from appliance.output_formats.marks import at_front, first, skip_space, undecided


class CallsReader:
    """Reads one section of calls, starting after the opening marker `opened` ("" if the reply begins with bare calls).
    `count` is the number of earlier calls. With `body_begun` the marker is part of the first body. If `status` is
    "broken", no call was found, and `raw` is the text that was consumed."""

    def __init__(
        self, calls: Calls, functions: Sequence[Function], opened: str, count: int, *, body_begun: bool = False
    ) -> None:
        self.status: Status = "open"
        self.count = count
        self.raw = "" if body_begun else opened
        self._calls, self._functions = calls, functions
        self._first = count
        self._begin, self._end = calls.begin.strip(), calls.end.strip()
        self._close = "" if body_begun else calls.openings.get(opened, calls.close.strip())
        self._marked = body_begun or any(mark for _, mark in pieces(opened))  # plain words mark nothing
        self._may_close = bool(opened) or not calls.bare  # bare calls need not be closed
        self._listed = calls.listed
        self._body: BodyReader | None = None
        self._needs_end = False
        self._names = True  # whether the broken call was emitted
        self._behind = [mark for mark in dict.fromkeys((self._end, self._close)) if mark]
        begun = body_begun or bool(self._begin and opened and (opened == self._begin or not calls.open))
        self._state = self._open
        if begun:
            self._start_body(marked=not body_begun)

    def feed(self, text: str) -> tuple[list[Event], int]:
        events: list[Event] = []
        at = 0
        while self.status == "open":
            used = self._state(text[at:], events)
            if used is None:
                break
            self.raw += text[at : at + used]
            at += used
        return events, at

    def finish(self, rest: str) -> list[Event]:
        """Return the events at the end of the reply; `rest` is the unconsumed text. A call without a name is dropped,
        unless no marker announced it."""
        if self._state == self._in_broken:
            return [self._lost_call(self.raw + rest)]
        if self.count == self._first and not self._marked and (self.raw + rest):
            return [Content(self.raw + rest)]
        return []

    # Each state returns how much of the text it consumed, None if it needs more text or has reached the end.

    def _open(self, text: str, events: list[Event]) -> int | None:
        start = skip_space(text)
        if start == len(text):
            return start or None
        if not self._listed:
            self._state = self._item
            return start
        self._state = self._item
        if text[start] != "[":
            self._listed = False  # a single call without its list
            return start
        return start + 1

    def _item(self, text: str, events: list[Event]) -> int | None:
        """Read a call, or the end of all calls."""
        start = skip_space(text)
        if start or not text:
            return start or None
        marks = [self._begin, self._close, *self._calls.starts, *(["]"] if self._listed else [])]
        found = at_front(text, [mark for mark in marks if mark])
        if found is None:
            return None
        if found and found == self._begin:
            self._start_body(marked=True)
            return len(found)
        if found == "]" and self._listed:
            self._state = self._listed_all
            return 1
        if found and found == self._close:
            return self._closed(len(found))
        if self._begin and found not in self._calls.starts:
            return self._none(events, 0)
        self._start_body(marked=False)
        return 0

    def _start_body(self, *, marked: bool) -> None:
        self._needs_end = marked or not self._begin
        ends = [mark for mark in (self._end, self._close, self._begin) if mark]
        self._body = self._calls.body.reader(self.count, self._functions, ends)
        if self.count > self._first:
            self.raw = ""
        self._state = self._in_body

    def _in_body(self, text: str, events: list[Event]) -> int | None:
        body = self._body
        assert body is not None, "a call has a body"
        started = body.started
        found, used = body.feed(text)
        events += found
        self.count += body.started and not started
        if body.status == "done":
            self._state = self._ended
        elif body.status == "broken":
            if body.started:
                self._state, self._names = self._in_broken, True
            else:
                return self._none(events, used, text)
        elif not used:
            return None
        return used

    def _none(self, events: list[Event], used: int, text: str = "") -> int:
        """Handle text that was expected to be a call and is not one."""
        if self.count == self._first:
            self.status = "broken"
        elif self._close and self._may_close:
            self._state, self._names = self._in_broken, False
        else:
            said = self.raw + text[:used]
            events += [Content(said)] if said else []
            self.status = "done"
        return used

    def _ended(self, text: str, events: list[Event]) -> int | None:
        """Skip to the marker that ends the call, after its body."""
        if not self._end:
            self._state = self._between
            return 0
        marks = [mark for mark in (self._end, self._begin, self._close) if mark]
        if not self._needs_end:  # a body without a begin marker may also lack the end marker
            start = skip_space(text)
            found = at_front(text[start:], marks)
            if found is None:
                return None
            self._state = self._between
            return start + len(found) if found and found == self._end else 0
        place = first(text, marks)
        if place is None:
            return (len(text) - undecided(text, marks)) or None
        at, mark = place
        self._state = self._between
        return at + (len(mark) if mark == self._end else 0)

    def _between(self, text: str, events: list[Event]) -> int | None:
        separator = "," if self._listed else self._calls.separator.strip()
        again = [self._begin] if self._begin and (self._close or separator or not self._calls.openings) else []
        marks = [separator, self._close, *(["]"] if self._listed else []), *again]
        marks += self._calls.starts if self._close else []
        marks = [mark for mark in marks if mark]
        if not marks and not self._calls.only:
            self.status = "done"
            return 0
        start = skip_space(text)
        if start == len(text):
            return None
        found = at_front(text[start:], marks)
        if found is None:
            return None
        if found and found == self._close:
            return self._closed(start + len(found))
        if found == "]" and self._listed:
            self._state = self._listed_all
            return start + 1
        if found and found == separator:
            self._state = self._item
            return start + len(found)
        if found:
            self._state = self._item
            return start
        return self._astray(text, start)

    def _astray(self, text: str, start: int) -> int | None:
        """Handle text after a call that is not a call: it is another body if calls have no markers; if a marker must
        follow, it is dropped up to that marker."""
        if self._close and self._may_close:
            if not self._begin and not self._listed and not self._calls.separator.strip():
                self._state = self._item
                return start
            self._state = self._lost
            return start
        self.status = "done"
        return 0

    def _lost(self, text: str, events: list[Event]) -> int | None:
        marks = [mark for mark in (self._close, self._begin) if mark]
        place = first(text, marks)
        if place is None:
            return (len(text) - undecided(text, marks)) or None
        if place[1] == self._close:
            return self._closed(place[0] + len(self._close))
        self._state = self._item
        return place[0]

    def _listed_all(self, text: str, events: list[Event]) -> int | None:
        """Read the end of the section after the list."""
        if not self._close:
            self.status = "done"
            return 0
        start = skip_space(text)
        found = at_front(text[start:], [self._close])
        if found is None:
            return None
        if found:
            return self._closed(start + len(found))
        if self._may_close:
            self._state = self._lost
            return start
        self.status = "done"
        return 0

    def _closed(self, used: int) -> int:
        """Finish the section. If it contained no call, its markers are dropped."""
        self.status = "done"
        return used

    def _in_broken(self, text: str, events: list[Event]) -> int | None:
        place = first(text, self._behind) if self._behind else None
        if place is None:
            return (len(text) - undecided(text, self._behind)) or None
        at, mark = place
        after = at + len(mark)
        events.append(self._lost_call(self.raw + text[:after]))
        if mark == self._close:
            self.status = "done"
        else:
            self._state = self._between
        return after

    def _lost_call(self, text: str) -> Event:
        return CallBroken(self.count - 1, text) if self._names else Content(text)
