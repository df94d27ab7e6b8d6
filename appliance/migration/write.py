"""Text of the manifest of a conversion, and the report for the terminal."""

import re
import textwrap
from collections.abc import Iterator
from typing import Any

import msgspec

from appliance.config.keys import find, keys
from appliance.config.manifest import API_VERSION
from appliance.config.spelling import spell
from appliance.migration.convert import Migration

_WIDTH = 120
_COLUMN = 34  # of the comments
_AMBIGUOUS = ("true", "false", "null", "yes", "no", "on", "off", "y", "n")
_REMINDER = "`slipway explain KEY` describes a key; `slipway plan` prints all other values."


def manifest(made: Migration, schema: str | None) -> str:
    """Return the text of the manifest. schema: file of the JSON Schema for editors."""
    lines = [f"# Converted by `slipway init --from` from {made.kind}.", f"# {_REMINDER}"]
    for title, rows in _sections(made):
        lines += ["#", f"# {title}", *(line for row in rows for line in _wrapped(row))]
    if schema:
        lines.append(f"# yaml-language-server: $schema={schema}")
    return "\n".join([*lines, f"apiVersion: {API_VERSION}", *_values(made)]) + "\n"


def report(made: Migration) -> Iterator[str]:
    """Yield the lines for the terminal."""
    for title, rows in _sections(made):
        yield title
        yield from (f"  {option}: {reason}" for option, reason in rows)


def _sections(made: Migration) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    if made.missing:
        yield "No equivalent:", made.missing
    if made.unneeded:
        yield "Nothing to set:", made.unneeded


def _wrapped(row: tuple[str, str]) -> list[str]:
    form = {"initial_indent": "#   ", "subsequent_indent": "#       ", "break_on_hyphens": False}
    return textwrap.wrap(f"{row[0]}: {row[1]}", _WIDTH, **form)  # type: ignore[arg-type]


def _comment(text: str) -> str:
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 2].rstrip()} …"


def _values(made: Migration) -> Iterator[str]:
    """Yield YAML in the order of the schema."""
    order = [".".join(path) for path in keys()]
    opened: tuple[str, ...] = ()
    for name in sorted(made.values, key=lambda name: (_rank(name, order), name)):
        path = tuple(name.split("."))
        for depth, section in enumerate(path[:-1]):
            if opened[: depth + 1] != path[: depth + 1]:
                yield from [""] if depth == 0 else []
                yield f"{'  ' * depth}{section}:"
        opened = path[:-1]
        text = f"{'  ' * len(opened)}{path[-1]}: {_spelled(name, made.values[name].value)}"
        one = made.values[name]
        origin = "; ".join(filter(None, (one.origin, one.note)))
        comment = f"# {' '.join(origin.split())}"
        if len(text) > _WIDTH // 2:  # a value is never shortened
            yield from (_comment(f"{'  ' * len(opened)}{comment}"), text)
        else:
            yield _comment(f"{text:<{_COLUMN}}  {comment}")


def _rank(name: str, order: list[str]) -> int:
    key = find(tuple(name.split(".")))
    return order.index(key.name) if key is not None else len(order)


def _spelled(name: str, value: Any) -> str:
    key = find(tuple(name.split(".")))
    if isinstance(value, list):
        return f"[{', '.join(_item(one) for one in value)}]"
    return _text(value) if isinstance(value, str) else spell(value, key.form if key else "")


def _item(item: Any) -> str:
    """Return an item of a list: a text, or a mapping of texts."""
    if isinstance(item, dict):
        return f"{{{', '.join(f'{key}: {_text(str(value))}' for key, value in item.items())}}}"
    return _text(str(item))


def _text(text: str) -> str:
    """Return the text unquoted if every YAML parser reads it as a string, else quoted."""
    plain = re.fullmatch(r"(/|\.\.?/)?[A-Za-z_][\w./+-]*", text, re.ASCII) and text.lower() not in _AMBIGUOUS
    return text if plain else msgspec.json.encode(text).decode()
