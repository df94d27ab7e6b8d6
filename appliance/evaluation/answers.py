"""Answers in replies of models: the final number, the letter of a choice, a text.

The rules accept what models write: `#### 1,234`, `\\boxed{1234}`, `The answer is (B).`, `**B**`.
"""

import re
import unicodedata
from decimal import Decimal

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_NUMBERS = re.compile(r"(?<![\w.,])-?\$?(?=\.?\d)(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:\.\d+)?")
_MARKED = re.compile(r"####\s*(.*)|\\boxed\{([^{}]*)\}")
_VERBS = r"is\b|because\b|since\b"
_ARTICLE = rf"(?!\s+(?!{_VERBS}|or\b|and\b|nor\b|but\b)[a-z])"  # "A capital city" does not choose A
_SAID = r"(?:answer|choice|option)\b[\s*_]*(?:is|:)?[\s*_]*(?::|is)?[\s*_]*"


def final_number(text: str) -> Decimal | None:
    """Return the number after the last `####` or in the last `\\boxed{…}`, else the last number of the text, else
    None."""
    for first, second in reversed(_MARKED.findall(text)):
        if numbers := _numbers(first or second):
            return numbers[0]
    numbers = _numbers(text)
    return numbers[-1] if numbers else None


def _numbers(text: str) -> list[Decimal]:
    plain = text.replace("\u2212", "-")
    return [Decimal(found[0].replace(",", "").replace("$", "")) for found in _NUMBERS.finditer(plain)]


def chosen_letter(text: str, count: int) -> str | None:
    """Return the letter of the chosen one of `count` choices, or None if the text names none or is ambiguous.

    In this order: a reply that begins with a letter alone (`B`, `(B)`, `B. Paris`), the last statement such as
    `the answer is B`, the only letter that is a word of its own.
    """
    letters = LETTERS[:count]
    one = rf"[(\[*_`\"'$]*(?:\\boxed\{{|\\text\{{)*([{letters}])(?![\w'’])"
    if found := re.match(rf"\s*{one}(?!\s+(?!{_VERBS})[a-z])", text):
        return found[1]
    said = re.findall(rf"(?i:{_SAID}){one}", text) or re.findall(rf"\\boxed\{{\s*(?:\\text\{{)?([{letters}])\b", text)
    if said:
        return str(said[-1])
    alone = {each[1] for each in re.finditer(rf"(?<![\w'’])([{letters}])(?![\w'’]){_ARTICLE}", text)}
    return alone.pop() if len(alone) == 1 else None


def normalized(text: str) -> str:
    """Return the text for an exact comparison: NFKC, lower case, single spaces, without a final period."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split()).rstrip(".").rstrip()


def extracted(text: str, pattern: re.Pattern[str]) -> str | None:
    """Return the last match of the pattern, or its first group that took part. Return None if nothing matches."""
    found = list(pattern.finditer(text))
    if not found:
        return None
    last = found[-1]
    return next((group for group in last.groups() if group is not None), last[0])
