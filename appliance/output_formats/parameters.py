"""Named arguments in a grammar: in the order of the schema; those that are not required are optional."""

from collections.abc import Mapping
from typing import Any

from appliance.output_formats.declaration import Writer

ANY_NAME = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"

MOST_ANY = 16  # limit of arguments for a schema that names none


def takes_any(parameters: Mapping[str, Any]) -> bool:
    """Return whether the schema neither names nor forbids arguments. An empty schema allows none."""
    named = parameters.get("properties") or parameters.get("allOf")
    return bool(parameters) and not named and parameters.get("additionalProperties", True) is not False


def required(parameters: Mapping[str, Any]) -> frozenset[str]:
    found = set(parameters.get("required") or ())
    for part in parameters.get("allOf") or ():
        if isinstance(part, Mapping):
            found |= set(part.get("required") or ())
    return frozenset(name for name in found if isinstance(name, str))


def in_order(pairs: Mapping[str, str], parameters: Mapping[str, Any], writer: Writer, separator: str) -> str:
    """Return the expressions in order, with a separator between those that are present."""
    needed = required(parameters)
    comma = writer.text(separator)
    # Built from the last one backwards: the expression from here on, as the first argument and after another one.
    leading, following = '""', '""'
    for name, expression in reversed(list(pairs.items())):
        one = writer.rule(expression)
        if name in needed:
            leading, following = writer.rule(f"{one} {following}"), writer.rule(f"{comma} {one} {following}")
        else:
            leading = writer.rule(f"{one} {following} | {leading}")
            following = writer.rule(f"({comma} {one})? {following}")
    return leading
