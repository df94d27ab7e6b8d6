"""Values that a model writes as plain text, made JSON by the schema of their parameter (TC-04)."""

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
    """The schema that a `$ref` within `root` names; {} for one that cannot be found."""
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
    """The JSON types that the schema allows, as far as it says; empty where it says nothing."""
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
    """The schemas of a function's parameters by their names, in order."""
    found: dict[str, Any] = {}
    for part in (parameters, *(parameters.get("allOf") or ())):
        part = resolved(part, parameters)
        if isinstance(part.get("properties"), Mapping):
            found |= part["properties"]
    return found


def parameter(parameters: Mapping[str, Any], name: str) -> Any:
    """The schema of one parameter; {} for an unknown one."""
    known = properties(parameters)
    if name in known:
        return known[name]
    more = parameters.get("additionalProperties")
    return more if isinstance(more, Mapping) else {}


def quoted(text: str) -> str:
    """The text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def inside(text: str) -> str:
    """The text as a part of a JSON string."""
    return quoted(text)[1:-1]


def is_text(allowed: frozenset[str]) -> bool:
    """Whether a value of these types is taken as it is written."""
    return allowed in (frozenset(), frozenset(("string",)))


def as_json(text: str, allowed: frozenset[str]) -> str:
    """The value as JSON text: the first of the allowed types that it can be, else a string. With no types named it is
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
    """What is JSON as it stands, anything else as a string."""
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
    """A list or an object as JSON, or as Python writes it."""
    shape = {"[": "array", "{": "object"}.get(text[:1])
    if shape not in allowed:
        return None
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return python_value(text)
    return text
