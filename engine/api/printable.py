"""Make text from outside, such as request paths, file names and model output, safe to write to a terminal or a log."""

from typing import Any


def printable(text: str, *, keep: str = "") -> str:
    """Replace each character that is not printable by its escape: control characters, DEL, bidirectional marks, line
    separators, lone surrogates. `keep`: characters that stay, such as a newline."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each in keep else each.encode("unicode_escape").decode() for each in text
    )


def printable_json(value: Any) -> Any:
    """Return a JSON value whose texts and keys are printable. Line breaks stay, since JSON escapes them."""
    if isinstance(value, str):
        return printable(value, keep="\n")
    if isinstance(value, dict):
        return {printable_json(key): printable_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [printable_json(each) for each in value]
    return value
