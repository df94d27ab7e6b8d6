"""Lists and objects as nested tags (MiniMax M3): an object has a tag for each field, a list an `item` tag for each
element. Every tag begins with a marker of the model, so text may contain any other tags."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from appliance.output_formats.declaration import Writer
from appliance.output_formats.marks import first, skip_space, undecided
from appliance.output_formats.parameters import required
from appliance.output_formats.typed import as_json, kinds, parameter, properties, quoted, resolved

ITEM = "item"
_CONTAINERS = frozenset(("array", "object"))
_DEEPEST = 16
_TAG = re.compile(r"<([^\s<>/]+)>")
_NAME = re.compile(r"[A-Za-z_][\w.\-]*")
# Schema keywords that a grammar of tags cannot enforce: such a value is written in JSON.
_BEYOND = frozenset(("const", "enum", "allOf", "anyOf", "oneOf", "not", "if", "contains", "uniqueItems", "prefixItems"))
_BEYOND |= {"patternProperties", "propertyNames", "minProperties", "maxProperties", "dependentRequired"}
_BEYOND |= {"dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems", "additionalItems"}


class Nested:
    """Parser of a value up to the closing tag of its own name. It is converted when it is complete."""

    def __init__(self, mark: str, name: str, schema: Any, root: Mapping[str, Any]) -> None:
        self._mark, self._schema, self._root = mark, schema, root
        self._tags = (f"{mark}<{name}>", f"{mark}</{name}>")
        self._text = ""
        self._depth = 0

    def feed(self, text: str) -> tuple[str, int, bool]:
        at = 0
        while (found := first(text[at:], self._tags)) is not None:
            end = at + found[0] + len(found[1])
            self._text += text[at:end]
            at = end
            if found[1] == self._tags[0]:
                self._depth += 1
            elif self._depth:
                self._depth -= 1
            else:
                value = self._text.removesuffix(self._tags[1])
                return as_nested(value, self._mark, self._schema, self._root), at, True
        used = len(text) - undecided(text[at:], self._tags)
        self._text += text[at:used]
        return "", used, False


def as_nested(text: str, mark: str, schema: Any, root: Mapping[str, Any], depth: int = 0) -> str:
    """Return the value as JSON text, with each part converted by its own schema."""
    schema = resolved(schema, root)
    allowed = kinds(schema, root)
    if allowed and not allowed & _CONTAINERS or depth > _DEEPEST:
        return as_json(text, allowed)
    parts = _parts(text, mark)
    if parts is None:
        if allowed and not text.strip() and not allowed & {"string", "null"}:
            return "[]" if "array" in allowed else "{}"
        return as_json(text, allowed)
    if "object" not in allowed and ("array" in allowed or all(name == ITEM for name, _ in parts)):
        items = _part(schema, root, "array").get("items")
        return f"[{', '.join(as_nested(value, mark, items, root, depth + 1) for _, value in parts)}]"
    fields: dict[str, list[str]] = {}
    shape = _part(schema, root, "object")
    for name, value in parts:
        fields.setdefault(name, []).append(as_nested(value, mark, parameter(shape, name), root, depth + 1))
    joined = {name: values[0] if len(values) == 1 else f"[{', '.join(values)}]" for name, values in fields.items()}
    return "{" + ", ".join(f"{quoted(name)}: {value}" for name, value in joined.items()) + "}"


def _part(schema: Mapping[str, Any], root: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """Return the alternative of a schema that allows this type, or the schema itself."""
    for key in ("anyOf", "oneOf"):
        for option in schema.get(key) or ():
            if kind in kinds(option, root):
                return resolved(option, root)
    return schema


def _parts(text: str, mark: str) -> list[tuple[str, str]] | None:
    """Return names and texts of the tags that the text consists of; None if it contains anything else."""
    parts: list[tuple[str, str]] = []
    at = skip_space(text)
    while at < len(text):
        match = _TAG.match(text, at + len(mark)) if text.startswith(mark, at) else None
        if match is None:
            return None
        opening, closing = f"{mark}<{match[1]}>", f"{mark}</{match[1]}>"
        end, depth = match.end(), 0
        while (found := first(text[end:], (opening, closing))) is not None:
            end += found[0] + len(found[1])
            depth += 1 if found[1] == opening else -1
            if depth < 0:
                break
        if depth >= 0:
            return None
        parts.append((match[1], text[match.end() : end - len(closing)]))
        at = skip_space(text, end)
    return parts or None


Leaf = Callable[[Mapping[str, Any], Mapping[str, Any], str, Writer], str]


def nested_grammar(
    schema: Any, root: Mapping[str, Any], closing: str, mark: str, writer: Writer, leaf: Leaf, depth: int = 0
) -> str:
    """Return a Lark expression of a value and its closing tag. `leaf` builds the expression of values that are neither
    list nor object, and of schemas that tags cannot enforce."""
    schema = resolved(schema, root)
    allowed = kinds(schema, root)
    plain = depth < _DEEPEST and not _BEYOND & schema.keys()

    def tag(name: str, part: Any) -> str:
        value = nested_grammar(part, root, f"{mark}</{name}>", mark, writer, leaf, depth + 1)
        return writer.rule(f"{writer.text(f'{mark}<{name}>')} {value}")

    if plain and allowed == {"object"} and _fields(schema):
        needed = required(schema)
        fields = [tag(name, part) + ("" if name in needed else "?") for name, part in properties(schema).items()]
        return " ".join([*fields, writer.text(closing)])
    if plain and allowed == {"array"} and isinstance(schema.get("items"), Mapping):
        least, most = schema.get("minItems") or 0, schema.get("maxItems")
        return f"{tag(ITEM, schema['items'])}{{{least},{'' if most is None else most}}} {writer.text(closing)}"
    return leaf(schema, root, closing, writer)


def _fields(schema: Mapping[str, Any]) -> bool:
    """Return whether each field can be a tag, and all required fields are known."""
    known = properties(schema)
    return bool(known) and required(schema) <= known.keys() and all(map(_NAME.fullmatch, known))
