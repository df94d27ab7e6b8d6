"""Unquoted YAML scalars by the 1.2 core schema, and spellings that YAML 1.1 reads differently."""

import re
from typing import Any

MAX_DIGITS = 100  # maximum length of a number, in any notation
_DIGITS = re.compile(r"[-+]?(0[xX][0-9a-fA-F_]+|0[ob][0-9_]+|[0-9.][0-9_.:]*([eE][-+]?[0-9]+)?)")
_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(0|[1-9][0-9]*|(?=\.))(\.[0-9]*)?([eE][-+][0-9]+)?")
_EXPONENT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]+(\.[0-9]*)?")
_BASED = re.compile(r"[-+]?0[xob][0-9a-fA-F_]+")
_GROUPED = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?")
_SEXAGESIMAL = re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?")
_DATE = re.compile(r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([Tt \t].*)?")
_NO_NUMBER = re.compile(r"[-+]?\.(inf|Inf|INF|nan|NaN|NAN)")
_WORDS = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}


def read_plain(text: str) -> tuple[Any, str, tuple[tuple[str, str], ...]]:
    """Read an unquoted scalar.

    Return its value and, if it is ambiguous, the reason and unambiguous spellings (otherwise both are empty).
    """
    if text in ("", "~", "null", "Null", "NULL"):
        return None, "", ()
    if text in ("true", "True", "TRUE", "false", "False", "FALSE"):
        return text.lower() == "true", "", ()
    if len(text) > MAX_DIGITS and _DIGITS.fullmatch(text):
        return None, f"a number of {len(text):,} characters; the limit is {MAX_DIGITS}", ()
    if _INT.fullmatch(text):
        return int(text), "", ()
    reason, readings = _trap(text)
    if reason:
        return text, reason, (*readings, ("string", f'"{text}"'))
    if _FLOAT.fullmatch(text) and any(c.isdigit() for c in text):
        return float(text), "", ()
    return text, "", ()


def _trap(text: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    if word := _WORDS.get(text.lower()):
        return f"YAML 1.1 reads an unquoted {text} as {word}, YAML 1.2 as text", (("boolean", word),)
    if _LEADING_ZERO.fullmatch(text):
        number = text.lstrip("-+").lstrip("0") or "0"
        sign = "-" if text[0] == "-" else ""
        number = f"0{number}" if number.startswith(".") else number
        kind = "number" if "." in number else "integer"
        return "a leading zero makes it octal for YAML 1.1, decimal for YAML 1.2", ((kind, sign + number),)
    if _BASED.fullmatch(text):
        return "numbers are written in decimal", _whole(text.replace("_", ""), 0)
    if "_" in text and _GROUPED.fullmatch(text):
        return "YAML 1.1 reads it as a number, YAML 1.2 as text", (("integer", text.replace("_", "")),)
    if _SEXAGESIMAL.fullmatch(text):
        return "YAML 1.1 reads it as a number in base 60, YAML 1.2 as text", ()
    if _DATE.fullmatch(text):
        return "YAML 1.1 reads it as a date, YAML 1.2 as text", ()
    if _NO_NUMBER.fullmatch(text):
        return "no key accepts infinity or NaN", ()
    if _EXPONENT.fullmatch(text) and not re.fullmatch(r"[-+]?[0-9]+\.[0-9]*[eE][-+][0-9]+", text):
        value = float(text)
        if abs(value) >= 1e15:
            return "YAML 1.1 reads it as text, YAML 1.2 as a number", ()
        whole = value.is_integer()
        plain = str(int(value)) if whole else format(value, ".15f").rstrip("0")
        return "YAML 1.1 reads it as text, YAML 1.2 as a number", (("integer" if whole else "number", plain),)
    if text in ("=", "<<"):
        return f"{text} has a special meaning in YAML 1.1", ()
    return "", ()


def _whole(text: str, base: int) -> tuple[tuple[str, str], ...]:
    try:
        return (("integer", str(int(text, base))),)
    except ValueError:
        return ()
