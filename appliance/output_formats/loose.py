"""Streaming conversion to JSON of arguments in similar syntaxes: Python's keyword arguments, and Gemma's objects with
bare keys and strings between markers."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from appliance.output_formats.declaration import Status
from appliance.output_formats.marks import SPACE, undecided

JSON_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_WORDS = {"true": "true", "false": "false", "True": "true", "False": "false", "null": "null", "None": "null"}
_CLOSERS = {"[": "]", "{": "}", "(": ")"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_ESCAPES |= {character: character for character in "\\'\"/"}
_DIGITS = {"x": 2, "u": 4, "U": 8}
_HEX = re.compile(r"[0-9a-fA-F]+")
_KEY = re.compile(r"[^\W\d]|[0-9]")
_KEY_REST = re.compile(r"[\w.\-]+")
_TEXT_KEY = re.compile(r"[^\s:=,{}()\[\]\"'<>]+")
_SCALAR = re.compile(r"[-+.\w]+")
_BARE = re.compile(r"[^,{}\[\]<>\"]+")


@dataclass(frozen=True)
class Syntax:
    """Syntax of arguments."""

    quotes: Mapping[str, bool]  # delimiters of strings, with whether a backslash escapes inside
    sign: Literal["=", ":"]  # between a name and its value at the top level
    close: Literal[")", "}"]  # end of the arguments
    bare: bool = False  # whether strings may be unquoted


PYTHON = Syntax({"'": True, '"': True}, "=", ")")


@dataclass
class _Frame:
    closer: str
    sign: str  # "" for a list
    count: int = 0


class LooseArguments:
    """Parser of arguments after the opening bracket. `feed` returns JSON text and how much was consumed. `begun` says
    that the first name or the end has arrived, so that these are arguments."""

    def __init__(self, syntax: Syntax) -> None:
        self.status: Status = "open"
        self.begun = False
        self._syntax = syntax
        self._frames = [_Frame(syntax.close, syntax.sign)]
        self._expects: Literal["item", "sign", "value", "next"] = "item"
        self._quote = ""  # of the string being read
        self._is_key = False
        self._word = ""  # a key or scalar without quotes
        self._json = "{"

    def feed(self, text: str) -> tuple[str, int]:
        at = 0
        while at < len(text) and self.status == "open":
            after = self._step(text, at)
            if after is None:
                break
            at = after
        if not self.begun:
            return "", at
        ready, self._json = self._json, ""
        return ready, at

    def _step(self, text: str, at: int) -> int | None:
        """Return the position after the next element, None if more text is needed."""
        if self._quote:
            return self._in_string(text, at)
        if self._word:
            return self._in_word(text, at)
        if text[at] in SPACE:
            return at + 1
        if self._expects == "item" and text[at] == self._frames[-1].closer:
            return self._end(at)
        if self._expects == "next":
            return self._next(text, at)
        if self._expects == "sign":
            return self._signed(text, at)
        return self._begin(text, at)

    def _broken(self, at: int) -> int:
        self.status = "broken"
        return at

    def _next(self, text: str, at: int) -> int:
        if text[at] == ",":
            self._expects = "item"
            return at + 1
        return self._end(at) if text[at] == self._frames[-1].closer else self._broken(at)

    def _signed(self, text: str, at: int) -> int:
        if text[at] != self._frames[-1].sign:
            return self._broken(at)
        self._json += ": "
        self._expects, self.begun = "value", True
        return at + 1

    def _end(self, at: int) -> int:
        frame = self._frames.pop()
        self._json += "}" if frame.sign else "]"
        self._expects, self.begun = "next", True
        if not self._frames:
            self.status = "done"
        return at + 1

    def _begin(self, text: str, at: int) -> int | None:
        """Begin a key, an element or a value."""
        frame = self._frames[-1]
        self._is_key = self._expects == "item" and bool(frame.sign)
        quote = self._quote_at(text, at)
        if quote is None:
            return None
        names_top = self._is_key and len(self._frames) == 1 and self._syntax.sign == "="
        if (quote and names_top) or (self._is_key and text[at] in _CLOSERS):
            return self._broken(at)
        if not quote and text[at] not in _CLOSERS and self._pattern().match(text[at]) is None:
            return self._broken(at)
        if self._expects == "item":
            self._json += ", " if frame.count else ""
            frame.count += 1
        if quote:
            self._quote = quote
            self._json += '"'
            return at + len(quote)
        if text[at] in _CLOSERS:
            is_object = text[at] == "{"
            self._json += "{" if is_object else "["
            self._frames.append(_Frame(_CLOSERS[text[at]], ":" if is_object else ""))
            self._expects = "item"
            return at + 1
        self._word = text[at]
        return at + 1

    def _quote_at(self, text: str, at: int) -> str | None:
        """Return the quote that begins here, "" if there is none, None if more text is needed."""
        for quote in self._syntax.quotes:
            if text.startswith(quote, at):
                return quote
            if quote.startswith(text[at:]):
                return None
        return ""

    def _pattern(self) -> re.Pattern[str]:
        if self._is_key:
            return _KEY if self._syntax.sign == "=" else _TEXT_KEY
        return _BARE if self._syntax.bare else _SCALAR

    def _in_word(self, text: str, at: int) -> int:
        pattern = self._pattern()
        more = (_KEY_REST if pattern is _KEY else pattern).match(text, at)
        if more is not None:
            self._word += more[0]
            return more.end()
        word, self._word = self._word.strip(), ""
        if self._is_key:
            self._json += _quoted(word)
            self._expects = "sign"
            return at
        value = scalar(word)
        if value is None and not self._syntax.bare:
            return self._broken(at)
        self._json += value or _quoted(word)
        self._expects = "next"
        return at

    def _in_string(self, text: str, at: int) -> int | None:
        escapes = self._syntax.quotes[self._quote]
        ends = [place for mark in (self._quote, *("\\" * escapes)) if (place := text.find(mark, at)) >= 0]
        if not ends:
            end = len(text) - undecided(text[at:], [self._quote])
            self._json += _inside(text[at:end])
            return end if end > at else None
        end = min(ends)
        self._json += _inside(text[at:end])
        if escapes and text[end] == "\\":
            return self._escape(text, end) if self._complete(text, end) else (end if end > at else None)
        self._json += '"'
        after = end + len(self._quote)
        self._quote, self._expects = "", "sign" if self._is_key else "next"
        return after

    def _complete(self, text: str, at: int) -> bool:
        """Return whether the escape at this position is complete."""
        return len(text) > at + 1 and len(text) >= at + 2 + _DIGITS.get(text[at + 1], 0)

    def _escape(self, text: str, at: int) -> int:
        """Decode an escape; text that is not an escape is kept unchanged."""
        letter = text[at + 1]
        width = _DIGITS.get(letter)
        if width is None:
            self._json += _inside(_ESCAPES.get(letter, "\\" + letter))
            return at + 2
        digits = text[at + 2 : at + 2 + width]
        code = int(digits, 16) if _HEX.fullmatch(digits) else -1
        if not 0 <= code <= 0x10FFFF:
            self._json += _inside("\\" + letter)
            return at + 2
        # Half of a surrogate pair is not a character; it is written as a JSON escape.
        self._json += f"\\u{code:04x}" if 0xD800 <= code <= 0xDFFF else _inside(chr(code))
        return at + 2 + width


def scalar(word: str) -> str | None:
    """Return a word or number of Python or JSON as JSON; None for anything else."""
    if word in _WORDS or JSON_NUMBER.fullmatch(word):
        return _WORDS.get(word, word)
    try:
        return str(int(word, 0))
    except ValueError:
        pass
    try:
        value = float(word)
    except ValueError:
        return None
    return json.dumps(value) if math.isfinite(value) else None


def python_value(text: str) -> str | None:
    """Return a list or dict in Python syntax as JSON; None if it is not one."""
    reader = LooseArguments(PYTHON)
    written, used = reader.feed(f"x={text})")
    if reader.status != "done" or used < len(text) + 3:
        return None
    return written.removeprefix('{"x": ')[:-1]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _inside(text: str) -> str:
    return _quoted(text)[1:-1]
