"""Text of a value as in a manifest. The gateway imports this module without the schema of the manifest."""

from typing import Any

_SIZES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_FLAGS = frozenset(("yes", "no", "on", "off", "true", "false"))
_MARKS = frozenset("*&!%@`?|>")  # characters with a special meaning at the start of a YAML scalar


def spell(value: Any, form: str = "") -> str:
    """Format a value in YAML flow style: 32MiB, 15s, true, [a, b]."""
    match value:
        case None:
            return "none"
        case bool():
            return "true" if value else "false"
        case int() if form == "size":
            for size, unit in _SIZES:
                if value >= size and value % size == 0:
                    return f"{value // size}{unit}"
            return f"{value}B"
        case int() | float() if form == "duration":
            for span, unit in ((3600, "h"), (60, "m")):
                if value >= span and value % span == 0:
                    return f"{value / span:g}{unit}"
            return f"{value:g}s"
        case list() | tuple():
            return f"[{', '.join(_item(item) for item in value)}]"
        case dict():
            return "{" + ", ".join(f"{key}: {spell(item)}" for key, item in value.items()) + "}"
        case str() if value[:1] in _MARKS:
            return f'"{value}"'
        case _:
            return str(value)


def _item(value: Any) -> str:
    """Format an item of a list. Words that YAML would read as a boolean are quoted."""
    return f'"{value}"' if isinstance(value, str) and value.lower() in _FLAGS else spell(value)
