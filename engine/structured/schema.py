"""Conversion of JSON Schema to the subset that masks enforce: keywords are rewritten, refused or dropped.

llguidance enforces many but not all keywords of drafts 7 and 2020-12. A strict schema is enforced completely or refused
with the keyword and its place. In a schema that is not strict, unsupported keywords are dropped. The treatment of each
keyword is defined by the tables here; docs/structured-output.md shows it with the results of the official test suite.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from engine.api.errors import RequestError
from engine.structured.disjoint import Disjointness, resolved
from engine.structured.formats import PATTERNS

Schema = dict[str, Any]

_MAPS: Final = ("properties", "patternProperties", "$defs", "definitions")
_LISTS: Final = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLES: Final = ("items", "additionalItems", "additionalProperties")
_COUNTS: Final = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
# Keywords that apply to the same instance: with them, `unevaluated…` differs from `additional…`.
_IN_PLACE: Final = ("allOf", "anyOf", "oneOf", "not", "if", "dependentSchemas", "dependencies", "$ref", "$dynamicRef")

REFUSED: Final = {
    "not": "a negation cannot be compiled to a token mask",
    "if": "conditions are not compiled; write the cases as anyOf",
    "contains": "matching items are not counted",
    "minContains": "matching items are not counted",
    "maxContains": "matching items are not counted",
    "uniqueItems": "items are not compared with earlier ones",
    "propertyNames": "names are constrained only by properties and patternProperties",
    "dependentRequired": "dependencies between properties are not compiled; write the cases as anyOf",
    "dependentSchemas": "dependencies between properties are not compiled; write the cases as anyOf",
    "dependencies": "dependencies between properties are not compiled; write the cases as anyOf",
    "unevaluatedItems": "not compiled together with allOf, anyOf, oneOf, $ref or contains; use items",
    "unevaluatedProperties": "not compiled together with allOf, anyOf, oneOf or $ref; use additionalProperties",
    "$ref": "the reference is circular and allows nothing",
    "$dynamicRef": "dynamic references are not compiled; use $ref",
    "$recursiveRef": "dynamic references are not compiled; use $ref",
    "format": "this format is not compiled; use pattern",
    "oneOf": "its branches may overlap: give them different types, or a required property with "
    "another const in each; or use anyOf",
}
# Formats of JSON Schema that cannot be enforced. Formats that JSON Schema does not define are annotations.
_OPEN_FORMATS: Final = frozenset(
    ("idn-email", "idn-hostname", "iri", "iri-reference", "json-pointer", "regex", "relative-json-pointer")
    + ("uri-reference", "uri-template")
)
_BRANCHES: Final = ("then", "else")
_OLD_DRAFTS: Final = ("draft-04", "draft-05", "draft-06", "draft-07")


@dataclass(frozen=True)
class Enforced:
    """The schema to compile."""

    schema: Schema | bool
    dropped: tuple[str, ...] = ()  # places of keywords that were dropped


def enforce(schema: Schema | bool, *, strict: bool, param: str) -> Enforced:
    """Rewrite a schema to keywords that masks enforce. With `strict`, raises RequestError for the first keyword that
    cannot be enforced. The nesting must not exceed the interpreter's recursion limit."""
    if isinstance(schema, bool):
        return Enforced(schema)
    old = any(draft in str(schema.get("$schema", "")) for draft in _OLD_DRAFTS)
    rewriting = _Rewriting(schema, Disjointness(schema), strict, param, old, [])
    return Enforced(rewriting.subschema(schema, "$"), tuple(rewriting.dropped))


@dataclass(frozen=True)
class _Rewriting:
    root: Schema
    apart: Disjointness
    strict: bool
    param: str
    old: bool  # up to draft 7, keywords next to a $ref are ignored
    dropped: list[str]

    def subschema(self, value: Any, place: str) -> Any:
        if not isinstance(value, dict):
            return value  # true and false; the compiler refuses anything else
        out = {name: each for name, each in value.items() if name != "x-guidance"}
        if self.old and isinstance(out.get("$ref"), str):
            out = {name: each for name, each in out.items() if name in ("$ref", "$schema", "$defs", "definitions")}
        for rewrite in _REWRITES:
            rewrite(out)
        for name in [name for name in out if self._is_out_of_reach(name, out[name])]:
            self._leave_out(name, place)
            for each in (name, *(_BRANCHES if name == "if" else ())):
                out.pop(each, None)
        self._one_of(out, place)
        for name, each in out.items():
            out[name] = self._parts(name, each, f"{place}.{name}")
        return out

    def _parts(self, name: str, value: Any, place: str) -> Any:
        if name in _MAPS and isinstance(value, dict):
            return {key: self.subschema(each, f"{place}.{key}") for key, each in value.items()}
        if name in _LISTS and isinstance(value, list):
            return [self.subschema(each, f"{place}.{number}") for number, each in enumerate(value)]
        return self.subschema(value, place) if name in _SINGLES else value

    def _is_out_of_reach(self, name: str, value: Any) -> bool:
        if name == "format":
            return value in _OPEN_FORMATS if isinstance(value, str) else False
        if name == "$ref":
            return isinstance(value, str) and self._is_circle(value)
        return name in REFUSED and name != "oneOf"

    def _is_circle(self, reference: str) -> bool:
        """Return whether a reference leads only to references, in a cycle. The compiler would accept such a schema, but
        no reply can satisfy it."""
        seen = set[str]()
        value: Any = {"$ref": reference}
        while isinstance(value, dict) and isinstance(value.get("$ref"), str):
            if value["$ref"] in seen:
                return True
            seen.add(value["$ref"])
            value = resolved(value["$ref"], self.root)
        return False

    def _leave_out(self, name: str, place: str) -> None:
        if self.strict:
            raise RequestError(f"{self.param}: {name} at {place} cannot be enforced: {REFUSED[name]}", self.param)
        self.dropped.append(f"{place}.{name}")

    def _one_of(self, schema: Schema, place: str) -> None:
        """Replace oneOf by anyOf, which is equivalent if no two branches accept the same value."""
        branches = schema.get("oneOf")
        if not isinstance(branches, list) or not branches:
            return
        if not all(self.apart.holds(one, other) for one, other in _pairs(branches)):
            self._leave_out("oneOf", place)
        del schema["oneOf"]
        if "anyOf" in schema:
            schema["allOf"] = [*schema.get("allOf", ()), {"anyOf": branches}]
        else:
            schema["anyOf"] = branches


def _pairs(branches: list[Any]) -> Iterator[tuple[Any, Any]]:
    return ((one, other) for at, one in enumerate(branches) for other in branches[:at])


# Rewrites that preserve the meaning exactly, in order

_NOTHING: Final = {
    "not": ("false",),
    "uniqueItems": ("false",),
    "propertyNames": ("true", "{}"),
    "dependentRequired": ("{}",),
    "dependentSchemas": ("{}",),
    "dependencies": ("{}",),
    "unevaluatedItems": ("true", "{}"),
    "unevaluatedProperties": ("true", "{}"),
}


def _without_effect(schema: Schema) -> None:
    """Remove keywords that have no effect."""
    if "if" not in schema or not schema.keys() & set(_BRANCHES):
        for name in ("if", *_BRANCHES):
            schema.pop(name, None)
    if "contains" not in schema:
        for name in ("minContains", "maxContains"):
            schema.pop(name, None)
    for name, nothing in _NOTHING.items():
        value = schema.get(name)
        if (isinstance(value, bool) or value == {}) and json.dumps(value) in nothing:
            del schema[name]
    schema.pop("$recursiveAnchor", None)
    anchor = schema.pop("$dynamicAnchor", None)
    if anchor is not None:
        schema.setdefault("$anchor", anchor)


def _unevaluated(schema: Schema) -> None:
    """Replace unevaluated… by additional… if no keyword applies to the same instance."""
    if any(name in schema for name in _IN_PLACE):
        return
    if "unevaluatedProperties" in schema:
        rest = schema.pop("unevaluatedProperties")
        schema.setdefault("additionalProperties", rest)
    if "unevaluatedItems" in schema and "contains" not in schema:
        rest = schema.pop("unevaluatedItems")
        schema.setdefault("items", rest)


def _whole_counts(schema: Schema) -> None:
    """Convert counts such as 2.0 to integers."""
    for name in _COUNTS:
        value = schema.get(name)
        if isinstance(value, float) and value.is_integer():
            schema[name] = int(value)


def _formats(schema: Schema) -> None:
    """Replace formats by exact regular expressions, including the calendar. Unknown formats are annotations."""
    name = schema.get("format")
    if not isinstance(name, str) or name in _OPEN_FORMATS or name in COMPILED_FORMATS:
        return
    del schema["format"]
    if name in PATTERNS:
        schema["allOf"] = [*schema.get("allOf", ()), {"pattern": f"^({PATTERNS[name]})$"}]


COMPILED_FORMATS: Final = frozenset(("duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"))
_REWRITES: Final[tuple[Callable[[Schema], None], ...]] = (_unevaluated, _without_effect, _whole_counts, _formats)
