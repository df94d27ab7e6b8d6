"""Conversion of plain-text values to JSON by the schema of their parameter (TC-04)."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from appliance.output_formats.loose import JSON_NUMBER, python_value

_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")
_WHOLE = re.compile(r"(-?(?:0|[1-9][0-9]*))\.0*")
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array"}
_WORDS = {"boolean": {"true": "true", "false": "false"}, "null": {"null": "null", "none": "null"}}
_MOST_REFERENCES = 16


def resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema that a `$ref` within `root` refers to; {} if it is not found."""
    for _ in range(_MOST_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if reference is None:
            return schema if isinstance(schema, Mapping) else {}
        schema = root
        for part in str(reference).removeprefix("#").split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            schema = schema.get(part) if isinstance(schema, Mapping) else None
    return {}


def kinds(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """Return the JSON types that the schema allows; empty if it does not restrict them."""
    schema = resolved(schema, root)
    if depth > _MOST_REFERENCES:
        return frozenset()
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset((named,))
    if isinstance(named, list):
        return frozenset(name for name in named if isinstance(name, str))
    if "const" in schema or isinstance(schema.get("enum"), list):
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return frozenset(_TYPES.get(type(value), "object") for value in values)
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            found = [kinds(option, root, depth + 1) for option in schema[key]]
            return frozenset().union(*found) if all(found) else frozenset()
    if isinstance(schema.get("allOf"), list):
        parts = [part for option in schema["allOf"] if (part := kinds(option, root, depth + 1))]
        return frozenset.intersection(*parts) if parts else frozenset()
    if "properties" in schema:
        return frozenset(("object",))
    return frozenset(("array",)) if "items" in schema else frozenset()


def properties(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schemas of a function's parameters by name, in order."""
    found: dict[str, Any] = {}
    for part in (parameters, *(parameters.get("allOf") or ())):
        part = resolved(part, parameters)
        if isinstance(part.get("properties"), Mapping):
            found |= part["properties"]
    return found


def parameter(parameters: Mapping[str, Any], name: str) -> Any:
    """Return the schema of one parameter; {} for an unknown one."""
    known = properties(parameters)
    if name in known:
        return known[name]
    more = parameters.get("additionalProperties")
    return more if isinstance(more, Mapping) else {}


def quoted(text: str) -> str:
    """Return the text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def inside(text: str) -> str:
    """Return the text as part of a JSON string, without quotes."""
    return quoted(text)[1:-1]


def is_text(allowed: frozenset[str]) -> bool:
    """Return whether a value of these types is used as written."""
    return allowed in (frozenset(), frozenset(("string",)))


def as_json(text: str, allowed: frozenset[str]) -> str:
    """Return the value as JSON text: as the first of the allowed types that fits, else as a string. Without types it is
    a string."""
    if is_text(allowed):
        return quoted(text)
    bare = text.strip()
    for kind in ("null", "boolean"):
        if kind in allowed and (word := _WORDS[kind].get(bare.lower())):
            return word
    number = _number(bare, allowed)
    if number is not None:
        return number
    if allowed & {"array", "object"} and (found := _container(bare, allowed)) is not None:
        return found
    if "string" not in allowed and JSON_NUMBER.fullmatch(bare):
        return bare
    return quoted(text)


def json_or_text(text: str) -> str:
    """Return valid JSON unchanged, anything else as a JSON string."""
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return quoted(text)
    return text.strip()


def _refuse(word: str) -> None:
    raise ValueError(word)


def _number(text: str, allowed: frozenset[str]) -> str | None:
    if "number" in allowed or "integer" in allowed:
        if _INTEGER.fullmatch(text):
            return text
        whole = _WHOLE.fullmatch(text)
        if whole is not None and "number" not in allowed:
            return whole[1]
    if "number" not in allowed:
        return None
    if JSON_NUMBER.fullmatch(text):
        return text
    try:
        value = float(text)
    except ValueError:
        return None
    return json.dumps(value) if math.isfinite(value) else None


def _container(text: str, allowed: frozenset[str]) -> str | None:
    """Return a list or an object, in JSON or Python syntax, as JSON; None if it is neither."""
    shape = {"[": "array", "{": "object"}.get(text[:1])
    if shape not in allowed:
        return None
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return python_value(text)
    return text
