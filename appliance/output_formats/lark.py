"""Pieces of Lark grammars in llguidance's dialect."""

import json
import re
from collections.abc import Mapping
from typing import Any

from engine.structured.definition import json_expression

ANY_TEXT = "/(?s:.*)/"


def literal(text: str) -> str:
    """Exactly this text."""
    return json.dumps(text, ensure_ascii=False)


def json_schema(schema: Mapping[str, Any]) -> str:
    """JSON that the schema allows; a function without parameters takes an empty object."""
    return json_expression(dict(schema) or {"type": "object", "properties": {}})


def without(marker: str) -> str:
    """Any text in which the marker does not occur."""
    return f"{ANY_TEXT} & ~/(?s:.*){pattern(marker)}(?s:.*)/"


def pattern(text: str) -> str:
    """Exactly this text, inside a regular expression."""
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")
