"""Streaming JSON scanner (RFC 8259) that finds the end of one value, or the first character that is not valid JSON."""

import re
from typing import Literal

_SPACE = re.compile(r"[ \t\n\r]+")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SCALAR = re.compile(r"[-+.0-9A-Za-z]+")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_WORDS = ("true", "false", "null")
# Every prefix of a number, so that a wrong character is detected at once.
_NUMBER_START = re.compile(
    r"-?(0|[1-9][0-9]*)?|-?(0|[1-9][0-9]*)(\.[0-9]*)?|-?(0|[1-9][0-9]*)(\.[0-9]+)?[eE][-+]?[0-9]*"
)

Status = Literal["open", "done", "broken"]


class JsonValue:
    """Scanner of one value. `status` says whether the value is open, done or broken. The end of a top-level number is
    known only from the next character."""

    def __init__(self) -> None:
        self.status: Status = "open"
        self._closers: list[str] = []
        self._expects = "value"  # value, first_value, key, first_key, colon, next
        self._string: Literal["", "text", "escape"] = ""
        self._hex = 0
        self._scalar = ""

    def feed(self, text: str, at: int = 0) -> int:
        """Read from `at` on. Return the position after the part that belongs to the value."""
        while at < len(text) and self.status == "open":
            if self._string:
                at = self._in_string(text, at)
            elif self._scalar:
                at = self._in_scalar(text, at)
            elif (space := _SPACE.match(text, at)) is not None:
                at = space.end()
            else:
                at = self._token(text, at)
        return at

    def _in_string(self, text: str, at: int) -> int:
        if self._hex:
            return self._step(at, text[at] in "0123456789abcdefABCDEF", self._hex_digit)
        if self._string == "escape":
            self._string = "text"
            if text[at] == "u":
                self._hex = 4
            return self._step(at, text[at] in '"\\/bfnrtu')
        if (plain := _PLAIN.match(text, at)) is not None:
            return plain.end()
        if text[at] == '"':
            self._string = ""
            self._ended()
        elif text[at] == "\\":
            self._string = "escape"
        else:
            self.status = "broken"
            return at
        return at + 1

    def _hex_digit(self) -> None:
        self._hex -= 1

    def _step(self, at: int, fits: bool, then: object = None) -> int:
        if not fits:
            self.status = "broken"
            return at
        if callable(then):
            then()
        return at + 1

    def _in_scalar(self, text: str, at: int) -> int:
        more = _SCALAR.match(text, at)
        if more is None:
            whole = self._scalar in _WORDS or _NUMBER.fullmatch(self._scalar) is not None
            self._scalar = ""
            if whole:
                self._ended()
            else:
                self.status = "broken"
            return at
        for character in more[0]:
            grown = self._scalar + character
            if not (_NUMBER_START.fullmatch(grown) or any(word.startswith(grown) for word in _WORDS)):
                self.status = "broken"
                return at
            self._scalar, at = grown, at + 1
        if self._scalar in _WORDS:
            self._scalar = ""
            self._ended()
        return at

    def _token(self, text: str, at: int) -> int:
        character = text[at]
        if self._expects in ("value", "first_value") and character not in "}]":
            return self._begin_value(character, at)
        if self._expects in ("key", "first_key") and character == '"':
            self._string = "text"
        elif self._expects == "colon" and character == ":":
            self._expects = "value"
        elif self._expects == "next" and character == ",":
            self._expects = "key" if self._closers[-1] == "}" else "value"
        elif self._expects in ("next", f"first_{'key' if self._closers[-1:] == ['}'] else 'value'}") and (
            self._closers[-1:] == [character]
        ):
            self._closers.pop()
            self._expects = "value"
            self._ended()
        else:
            self.status = "broken"
            return at
        return at + 1

    def _begin_value(self, character: str, at: int) -> int:
        if character == '"':
            self._expects, self._string = "value", "text"
        elif character == "{":
            self._closers.append("}")
            self._expects = "first_key"
        elif character == "[":
            self._closers.append("]")
            self._expects = "first_value"
        elif character in "-0123456789tfn":
            self._expects, self._scalar = "value", character
        else:
            self.status = "broken"
            return at
        return at + 1

    def _ended(self) -> None:
        """Update the state after a complete string, scalar or container."""
        if self._expects in ("key", "first_key"):
            self._expects = "colon"
        elif self._closers:
            self._expects = "next"
        else:
            self.status = "done"
