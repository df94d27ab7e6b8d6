"""Calls of functions that the request did not offer. Their text becomes content."""

import json
from collections.abc import Iterable
from dataclasses import replace

from appliance.output_formats.events import CallArguments, CallBroken, CallStart, Content, Event


class OfferedCalls:
    """Filter for the events of one reply.

    The call of a function that was not offered becomes text: a JSON object with its name and arguments. The indexes of
    later calls are decremented.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self._other: CallStart | None = None
        self._arguments = ""
        self._left_out = 0

    def take(self, events: list[Event], *, final: bool) -> list[Event]:
        """Return the filtered events. With `final`, the reply ends with these events."""
        if self._other is None and not any(isinstance(event, CallStart) for event in events):
            return [self._moved(event) for event in events] if self._left_out else events
        passed: list[Event] = []
        for event in events:
            self._take(event, passed)
        if final:
            self._say(passed)
        return passed

    def _take(self, event: Event, passed: list[Event]) -> None:
        if isinstance(event, CallStart):
            self._say(passed)
            if event.name in self._names:
                passed.append(self._moved(event))
            else:
                self._other, self._arguments = event, ""
                self._left_out += 1
        elif self._other is not None and isinstance(event, CallArguments):
            self._arguments += event.text
        elif self._other is not None and isinstance(event, CallBroken):
            self._other = None
            passed.append(Content(event.text))
        else:
            self._say(passed)
            passed.append(self._moved(event))

    def _say(self, passed: list[Event]) -> None:
        if self._other is not None:
            name = json.dumps(self._other.name, ensure_ascii=False)
            passed.append(Content(f'{{"name": {name}, "arguments": {self._arguments or "{}"}}}'))
            self._other = None

    def _moved(self, event: Event) -> Event:
        if self._left_out and isinstance(event, CallStart | CallArguments | CallBroken):
            return replace(event, index=event.index - self._left_out)
        return event
