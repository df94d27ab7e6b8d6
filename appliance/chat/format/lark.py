"""Pieces of Lark grammars in llguidance's dialect."""

import json
import re
from collections.abc import Mapping
from typing import Any


def literal(text: str) -> str:
    """Exactly this text."""
    return json.dumps(text, ensure_ascii=False)


def json_schema(schema: Mapping[str, Any]) -> str:
    """JSON that the schema allows; a function without parameters takes an empty object."""
    return "%json " + json.dumps(schema or {"type": "object", "properties": {}}, ensure_ascii=False)


def without(*markers: str) -> str:
    """A terminal: any text in which none of the markers occurs."""
    anything = r"/(?s:.*)/"
    banned = [f"~/(?s:.*){_pattern(marker)}(?s:.*)/" for marker in markers]
    return " & ".join([anything, *banned])


def _pattern(text: str) -> str:
    return re.escape(text).replace("/", r"\/").replace("\n", r"\n")
