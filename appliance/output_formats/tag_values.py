"""Values between tags: read up to the closing tag and converted to JSON by the types that their schema allows."""

from typing import Protocol

from appliance.output_formats.json_text import JsonValue
from appliance.output_formats.marks import first, skip_space, undecided
from appliance.output_formats.typed import as_json, inside, json_or_text


class Value(Protocol):
    """Parser of a value and its closing tag. `feed` returns JSON text, how much was consumed, and whether the tag was
    read."""

    def feed(self, text: str) -> tuple[str, int, bool]: ...


class Plain:
    """A value that is converted when it is complete."""

    def __init__(self, end: str, allowed: frozenset[str], trim: str = "") -> None:
        self._end, self._allowed, self._trim = end, allowed, trim
        self._text = ""

    def feed(self, text: str) -> tuple[str, int, bool]:
        found = text.find(self._end)
        if found < 0:
            used = len(text) - undecided(text, [self._end])
            self._text += text[:used]
            return "", used, False
        self._text += text[:found]
        if self._trim:
            self._text = self._text.removeprefix(self._trim).removesuffix(self._trim)
        return as_json(self._text, self._allowed), found + len(self._end), True


class Streamed:
    """A string that is escaped and streamed. With `trim`, one line break next to each tag belongs to the tag."""

    def __init__(self, end: str, trim: str) -> None:
        self._end, self._trim = end, trim
        self._begun = False

    def feed(self, text: str) -> tuple[str, int, bool]:
        at, piece = 0, ""
        if not self._begun:
            at = len(self._trim) if self._trim and text.startswith(self._trim) else 0
            self._begun, piece = True, '"'
        ends = [self._end, *([self._trim + self._end] if self._trim else [])]
        found = first(text[at:], ends)
        if found is None:
            used = len(text) - undecided(text[at:], ends)
            return piece + inside(text[at:used]), used, False
        end = at + found[0]
        return f'{piece}{inside(text[at:end])}"', end + len(found[1]), True


class Json:
    """A value in JSON, which ends where its JSON ends. If it turns out to be invalid JSON, it ends at the closing
    tag."""

    def __init__(self, end: str, allowed: frozenset[str] | None = None) -> None:
        self._end, self._allowed = end, allowed
        self._value: JsonValue | None = JsonValue()
        self._text = ""
        self._read = 0  # offset before which the closing tag cannot begin

    def feed(self, text: str) -> tuple[str, int, bool]:
        taken = len(self._text)
        whole = self._text + text
        if self._value is not None and not self._json(self._value, whole):
            # If this turns out to be invalid JSON, it ends at the first closing tag: consume nothing after that.
            tag = whole.find(self._end, taken)
            self._text = whole[: tag if tag >= 0 else len(whole) - undecided(text, [self._end])]
            return "", len(self._text) - taken, False
        place = whole.find(self._end, self._read)
        if place < 0:
            self._text, self._read = whole, max(self._read, len(whole) - len(self._end) + 1)
            return "", len(text), False
        value = whole[:place]
        written = json_or_text(value) if self._allowed is None else as_json(value, self._allowed)
        return written, place + len(self._end) - taken, True

    def _json(self, value: JsonValue, text: str) -> bool:
        """Return whether to look for the closing tag: after a complete container or string, at once for any other
        value."""
        if not self._read:
            start = skip_space(text)
            if start == len(text):
                return False
            if text[start] not in '{["':
                self._value = None
                return True
        self._read = value.feed(text, self._read)
        if value.status == "broken":
            self._read = 0
        if value.status != "open":
            self._value = None
        return value.status != "open"
