"""Words of a command line, as a POSIX shell divides it, each with its position for messages."""

import re
from dataclasses import dataclass


class Unreadable(Exception):
    """Raised if the text or file of another server cannot be converted. The message names the position."""


@dataclass(frozen=True)
class Word:
    """One word of a command line."""

    text: str
    place: str


_OPERATORS = ("&&", "||", ";", "|", "&", "<")
_REDIRECTION = re.compile(r"(?:\d|&)?>>?(?P<target>.*)", re.DOTALL)


def split(line: str, place: str = "") -> list[Word]:
    """Divide a command line at spaces outside of quotes. `place` precedes the character number of each word.

    Comments, `\\` at the end of a line, redirections of the output and a `&` at the end are removed. Raise Unreadable
    for an open quote and for other operators of a shell.
    """
    words: list[Word] = []
    position, is_target = 0, False
    while position < len(line):
        if line[position].isspace() or line.startswith(("\\\n", "\\\r\n"), position):
            position += 1 if line[position] != "\\" else line.index("\n", position) - position + 1
        elif line[position] == "#":
            position = (line.find("\n", position) + 1) or len(line)
        else:
            text, after = _word(line, position, place)
            where = f"{place}character {position + 1}"
            is_plain = line[position:after] == text
            redirection = _REDIRECTION.fullmatch(line[position:after])
            if is_target:
                is_target = False
            elif redirection is not None:
                is_target = not redirection["target"]
            elif text in _OPERATORS and is_plain and not (text == "&" and not line[after:].strip()):
                raise Unreadable(f"{where}: {text} is an operator of the shell; write the command of one server")
            elif text != "&" or not is_plain:
                words.append(Word(text, where))
            position = after
    return words


def _word(line: str, start: int, place: str) -> tuple[str, int]:
    """Return the word that starts at a position, without its quotes, and the position after it."""
    text, position, quote, opened = "", start, "", start
    while position < len(line):
        char = line[position]
        if quote == "'":
            quote, text = ("", text) if char == "'" else (quote, text + char)
        elif char == "\\" and position + 1 < len(line):
            position += 1
            after = line[position]
            kept = quote == '"' and after not in '"\\$`\n'
            text += "" if after == "\n" else ("\\" if kept else "") + after
        elif char == '"' and quote:
            quote = ""
        elif char in "\"'" and not quote:
            quote, opened = char, position
        elif char.isspace() and not quote:
            break
        else:
            text += char
        position += 1
    if quote:
        raise Unreadable(f"{place}character {opened + 1}: the quote {quote} is not closed")
    return text, position
