"""Decide whether two JSON schemas have no common value. Sound but incomplete: False means unknown."""

import json
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import unquote

_TYPES: Final = frozenset(("null", "boolean", "integer", "fraction", "string", "array", "object"))
_DEPTH: Final = 8  # maximum depth of references and properties
COMPARISONS: Final = 20_000  # limit for all comparisons, because a hostile schema could need arbitrarily many


class Disjointness:
    """Comparisons within one document, `root`, to which references point."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._left = COMPARISONS

    def holds(self, one: Any, other: Any, depth: int = _DEPTH) -> bool:
        """Return whether it is known that no value is accepted by both."""
        if one is False or other is False:
            return True
        self._left -= 1
        if depth == 0 or self._left < 0 or not isinstance(one, dict) or not isinstance(other, dict):
            return False
        for schema, against in ((one, other), (other, one)):
            if any(self.holds(part, against, depth - 1) for part in _parts(schema, self._root)):
                return True
            choices = schema.get("anyOf") or schema.get("oneOf")
            if isinstance(choices, list) and all(self.holds(each, against, depth - 1) for each in choices):
                return True
        common = _types(one) & _types(other)
        for schema, against in ((one, other), (other, one)):
            values = _values(schema)
            if values is not None and not any(_may_accept(against, value) for value in values):
                return True
        return not common or (common == {"object"} and self._objects(one, other, depth))

    def _objects(self, one: Mapping[str, Any], other: Mapping[str, Any], depth: int) -> bool:
        for schema, against in ((one, other), (other, one)):
            closed = against.get("additionalProperties") is False and not against.get("patternProperties")
            own, theirs = _map(schema.get("properties")), _map(against.get("properties"))
            for name in schema.get("required") or ():
                if closed and name not in theirs:
                    return True
                if name in own and name in theirs and self.holds(own[name], theirs[name], depth - 1):
                    return True
        return False


def _parts(schema: Mapping[str, Any], root: Mapping[str, Any]) -> list[Any]:
    """Return schemas that every value of this schema satisfies."""
    parts = schema.get("allOf")
    found = list(parts) if isinstance(parts, list) else []
    if isinstance(schema.get("$ref"), str):
        found.append(resolved(schema["$ref"], root))
    return found


def resolved(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the value at a JSON pointer into the document, or None for any other reference."""
    if not reference.startswith("#/"):
        return None
    value: Any = root
    for part in reference[2:].split("/"):
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if not isinstance(value, dict) or name not in value:
            return None
        value = value[name]
    return value


def _map(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _types(schema: Mapping[str, Any]) -> frozenset[str]:
    named = schema.get("type")
    names = [named] if isinstance(named, str) else named if isinstance(named, list) else None
    types = _TYPES if names is None else frozenset(kind for name in names for kind in _kinds(str(name)))
    values = _values(schema)
    return types if values is None else types & frozenset(_type_of(value) for value in values)


def _kinds(name: str) -> tuple[str, ...]:
    return ("integer", "fraction") if name == "number" else (name,)


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the allowed values if the schema lists them."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _may_accept(schema: Mapping[str, Any], value: Any) -> bool:
    values = _values(schema)
    if values is not None and _key(value) not in map(_key, values):
        return False
    return _type_of(value) in _types(schema)


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "fraction"
        case str():
            return "string"
    return "array" if isinstance(value, list) else "object"


def _key(value: Any) -> str:
    """Return a key that is equal for values that are equal in JSON: 1 and 1.0 are, 1 and true are not."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, list):
        return "[" + ",".join(map(_key, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(sorted(json.dumps(name) + ":" + _key(each) for name, each in value.items())) + "}"
    return json.dumps(value)
