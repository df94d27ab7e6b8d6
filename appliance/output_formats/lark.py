"""Helpers for Lark grammars in llguidance's dialect."""

import json
import re
from collections.abc import Mapping
from typing import Any

from engine.structured.definition import json_expression

ANY_TEXT = "/(?s:.*)/"


def literal(text: str) -> str:
    """Return an expression of exactly this text."""
    return json.dumps(text, ensure_ascii=False)


def json_schema(schema: Mapping[str, Any]) -> str:
    """Return an expression of JSON that the schema allows. A function without parameters takes an empty object."""
    return json_expression(dict(schema) or {"type": "object", "properties": {}})


def without(marker: str) -> str:
    """Return an expression of any text without the marker."""
    return f"{ANY_TEXT} & ~/(?s:.*){pattern(marker)}(?s:.*)/"


def pattern(text: str) -> str:
    """Return a regular expression of exactly this text."""
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")
