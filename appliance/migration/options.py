"""Options of a command line: words, divided by the rules of their server into names and values."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from appliance.config.document import HIDDEN, masked
from appliance.config.keys import find
from appliance.migration.rules import Key, Keys, Missing, Rule, Server, Unneeded
from appliance.migration.words import Unreadable, Word

_SECRET = re.compile(r"(api|auth|access|secret|hf|hub)[-_]?(key|token)|token$|password|secret|_KEY$", re.IGNORECASE)
_NUMBER = re.compile(r"-\d+(\.\d+)?")
_SWITCHES = ("true", "false", "on", "off", "auto", "0", "1")
CONTAINER = "option of the container runtime; it applies to Slipway's image, too"


@dataclass(frozen=True)
class Setting:
    """An option as it was written."""

    shown: str
    """Text for messages, without secrets."""
    place: str
    rule: Rule | None
    """Rule of the option; unknown options have none."""
    values: tuple[str, ...] = ()
    enabled: bool = True
    """False for the form --no-X of a flag."""


def setting(
    server: Server, written: str, name: str, values: Sequence[str], place: str, *, enabled: bool = True
) -> Setting:
    """Return the setting of an option. written: the option as in the source; name: its name without dashes."""
    rule = server.rule(name)
    secret = isinstance(rule, Keys | Missing) and rule.secret
    secret = secret or bool(_SECRET.search(name)) and not isinstance(rule, Key)
    shown = [HIDDEN] * bool(values) if secret else [_short(value) for value in values]
    return Setting(" ".join([written, *shown]), place, rule, tuple(values), enabled)


def _short(value: str) -> str:
    flat = " ".join(masked(value).split())
    return flat if len(flat) <= 60 else flat[:57] + "..."


def plain(written: str, place: str, rule: Rule | None) -> Setting:
    """Return a setting that has only a reason."""
    return Setting(_short(written), place, rule)


def options(server: Server, words: Sequence[Word]) -> list[Setting]:
    """Divide the words after the name of a command. Raise Unreadable for an option without its value."""
    found: list[Setting] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.text.startswith("-") or word.text == "-" or _NUMBER.fullmatch(word.text):
            found.append(_positional(server, word, found))
            continue
        written, equals, value = word.text.partition("=")
        if value and "." in written:  # --speculative-config.method=ngram
            written = written.split(".")[0]
        name, enabled = _name(server, written)
        rule = server.rule(name)
        values = [value] if equals else _values(rule, rest, written, word.place)
        found.append(setting(server, written, name, values, word.place, enabled=enabled))
    return found


def _positional(server: Server, word: Word, before: Sequence[Setting]) -> Setting:
    first = server.positional and not any(one.rule == server.rule(server.positional) for one in before)
    if first:
        return setting(server, "MODEL", server.positional, [word.text], word.place)
    return plain(word.text, word.place, None)


def _name(server: Server, written: str) -> tuple[str, bool]:
    """Return the name of an option without dashes, and False for the form --no-X of a known flag."""
    if written in server.short:
        return server.short[written], True
    name = written.lstrip("-")
    if server.rule(name) is None and name[:3] in ("no-", "no_") and server.negatable and server.rule(name[3:]):
        return name[3:], False
    return name, True


def _values(rule: Rule | None, rest: list[Word], written: str, place: str) -> list[str]:
    """Remove the values of an option from the words after it, and return them."""

    def is_value(word: Word) -> bool:
        return not word.text.startswith("-") or word.text == "-" or bool(_NUMBER.fullmatch(word.text))

    number = _most(rule)
    if number == 0:
        words = _SWITCHES if is_boolean(rule) or isinstance(rule, Unneeded) and rule.optional else ()
        return [rest.pop(0).text] if rest and rest[0].text.lower() in words else []
    taken: list[str] = []
    while rest and is_value(rest[0]) and (number is None or len(taken) < number):
        taken.append(rest.pop(0).text)
    if not taken and rule is not None:
        raise Unreadable(f"{place}: {written} has no value")
    return taken


def is_boolean(rule: Rule | None) -> bool:
    """Return whether an option can be written with and without a value, true or false."""
    return isinstance(rule, Key) and not rule.flag and rule.convert is None and _types(rule) <= {"boolean", "null"}


def _types(rule: Key) -> frozenset[str]:
    key = find(tuple(rule.key.split(".")))
    assert key is not None, rule.key
    return key.types


def _most(rule: Rule | None) -> int | None:
    """Return the maximum number of values of an option, None if it is not limited."""
    match rule:
        case None:
            return 1
        case Key() if rule.flag or is_boolean(rule):
            return 0
        case Key() if rule.convert is None and "array" in _types(rule):
            return None
        case Keys(many=True) | Missing(many=True):
            return None
        case Missing(flag=True) | Unneeded(flag=True) | Unneeded(optional=True):
            return 0
        case _:
            return 1
