"""Table of all manifest keys, derived from the schema: path, allowed values, default, meaning.

Error messages, suggestions, `slipway plan` and docs/manifest.md use this table.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import ValidationError

from appliance.config.key import Metadata, declared
from appliance.config.manifest import API_VERSION
from appliance.config.manifest_file import ManifestFile
from appliance.config.spelling import spell

Json = dict[str, Any]


@dataclass(frozen=True)
class Key:
    """One key of the manifest."""

    path: tuple[str, ...]
    kind: str  # kind of key: section, map (of names that the operator chooses), value (leaf) or layer (composes files)
    types: frozenset[str]  # JSON types of its values
    choices: tuple[str, ...]  # fixed words
    allowed: str
    required: bool
    default: Any
    text: str
    form: str = ""  # quantity, such as "size" or "duration"
    least: float | None = None  # minimum of a number
    above: float | None = None  # exclusive minimum of a number
    most: float | None = None  # maximum of a number
    examples: tuple[Any, ...] = ()

    @property
    def name(self) -> str:
        return ".".join(self.path)

    def default_text(self) -> str:
        return "(must be given)" if self.required else spell(self.default, self.form)


PROFILES = ("hardware", "profiles")
LAYER_KEYS = (("extends",), ("overlays",), PROFILES)
_LISTED = {"integer": "whole numbers"}
_EXAMPLES = {
    "size": "a size such as 8GiB",
    "duration": "a duration such as 30s",
    "count range": 'a whole number or a range such as ">=2"',
    "size range": 'a range such as ">=80GB"',
    "version range": 'a number such as 9.0 or a range such as ">=9.0"',
}


@cache
def schema() -> Json:
    """Return the JSON Schema of a manifest file (validation mode)."""
    return ManifestFile.model_json_schema(mode="validation")


@cache
def metadata() -> dict[str, Metadata]:
    """Return the metadata of every declared key by name (Key.name): all leaves and the keys that compose files."""
    return {".".join(path): one for path, one in declared(ManifestFile)}


@cache
def path_keys() -> tuple[tuple[str, ...], ...]:
    """Return the keys that name a file or folder. Secrets may name files, too."""
    return tuple(path for path, one in declared(ManifestFile) if one.is_path)


@cache
def keys() -> dict[tuple[str, ...], Key]:
    """Return all keys by path, in the order of the schema. `*` matches a name chosen by the operator."""
    return {key.path: key for key in _walk(schema(), ())}


def find(path: tuple[str | int, ...]) -> Key | None:
    """Return the declaration of a path in a manifest.

    Chosen names and sections in a list match `*`. Other list items match their list.
    """
    table = keys()
    found: tuple[str, ...] = ()
    for part in path:
        if not isinstance(part, int) and (*found, part) in table:
            found = (*found, part)
        elif (*found, "*") in table:
            found = (*found, "*")
        elif isinstance(part, int):
            break
        else:
            return None
    return table.get(found)


def children(path: tuple[str | int, ...]) -> tuple[str, ...]:
    """Return the names of the keys directly below a path; for the root of the manifest, its sections."""
    above: tuple[str, ...] = ()
    if path:
        key = find(path)
        if key is None:
            return ()
        above = key.path
    return tuple(p[-1] for p in keys() if p[:-1] == above and p[-1] != "*")


def takes(path: tuple[str, ...], value: Any) -> bool:
    """Return whether a key accepts a value, independent of other keys."""
    whole: Json = {"apiVersion": API_VERSION, "model": {"source": {"path": "/"}}}
    inner: Json = whole
    at: tuple[str | int, ...] = path
    if path[:3] == (*PROFILES, "*"):  # profiles are a list, and each item requires three keys
        inner = {"name": "x", "match": {}, "set": {}}
        whole["hardware"], at, path = {"profiles": [inner]}, (*PROFILES, 0, *path[3:]), path[3:]
    for part in path[:-1]:
        inner = inner.setdefault(part, {})
    inner[path[-1]] = value
    try:
        ManifestFile.model_validate(whole)
    except ValidationError as error:
        return not any(detail["loc"][: len(at)] == at for detail in error.errors(include_url=False))
    return True


def leaves() -> tuple[Key, ...]:
    """Return the leaf keys, which a plan lists, without those of profiles."""
    return tuple(key for key in keys().values() if key.kind == "value" and key.path[: len(PROFILES)] != PROFILES)


def _walk(node: Json, path: tuple[str, ...]) -> Iterator[Key]:
    required = node.get("required", ())
    for name, child in node.get("properties", {}).items():
        inner = (*path, name)
        yield from _key(child, inner, name in required)


def _key(node: Json, path: tuple[str, ...], required: bool) -> Iterator[Key]:
    resolved = _resolve(node)
    text = str(node.get("description") or resolved.get("description") or "")
    default = node.get("default")
    options = [_resolve(option) for option in resolved.get("anyOf", (resolved,))]
    types = frozenset(kind for option in options for kind in _types(option))
    choices = tuple(str(word) for option in options for word in _words(option))
    form = next((option["format"] for option in (resolved, *options) if "format" in option), "")
    named = resolved.get("patternProperties") or ({"": resolved["additionalProperties"]} if _is_map(resolved) else {})
    kind = "section" if "properties" in resolved else "map" if named else "value"
    if path in LAYER_KEYS:
        kind = "layer"
    examples = tuple(node.get("examples", ()))
    allowed, bounds = _allowed(resolved), _bounds(options)
    yield Key(path, kind, types, choices, allowed, required, default, text, form, *bounds, examples)
    if kind == "section":
        yield from _walk(resolved, path)
    if path == ("overlays",):
        return  # an overlay repeats the keys of the manifest
    for inner in map(_resolve, named.values()):
        yield from _named(inner, (*path, "*"))
    if "properties" in (item := _resolve(resolved.get("items", {}))):
        yield Key((*path, "*"), "section", frozenset({"object"}), (), _allowed(item), False, None, "One of the list.")
        yield from _walk(item, (*path, "*"))


def _named(inner: Json, path: tuple[str, ...]) -> Iterator[Key]:
    """Yield the keys below a chosen name: the forms of a secret, or a plain value."""
    options = [_resolve(option) for option in inner.get("anyOf", (inner,))]
    if not any("properties" in option for option in options):
        types = frozenset(kind for option in options for kind in _types(option))
        yield Key(path, "value", types, (), _allowed(inner), False, None, "One variable.", examples=(8192,))
        return
    meaning = "One secret: {file: path} or {env: NAME}." if path[0] == "secrets" else "One of them, by its name."
    yield Key(path, "section", frozenset({"object"}), (), _allowed(inner), False, None, meaning)
    for option in options:
        yield from _walk({**option, "required": ()}, path)


def _bounds(options: list[Json]) -> tuple[float | None, float | None, float | None]:
    """Return the minimum, exclusive minimum and maximum of a number."""
    least, above, most = (
        next((option[name] for option in options if name in option), None)
        for name in ("minimum", "exclusiveMinimum", "maximum")
    )
    return least, above, most


def _is_map(node: Json) -> bool:
    return isinstance(node.get("additionalProperties"), dict)


def _resolve(node: Json) -> Json:
    if "$ref" in node:
        return schema()["$defs"][node["$ref"].removeprefix("#/$defs/")]  # type: ignore[no-any-return]
    return node


def _types(node: Json) -> tuple[str, ...]:
    if "const" in node or "enum" in node:
        return ("string",)
    return (node["type"],) if "type" in node else ()


def _words(node: Json) -> tuple[Any, ...]:
    return tuple(node["enum"]) if "enum" in node else (node["const"],) if "const" in node else ()


def _allowed(node: Json) -> str:
    """Describe the allowed values."""
    if form := node.get("format"):
        return " or ".join(
            [*(str(word) for option in node.get("anyOf", ()) for word in _words(option)), _EXAMPLES[form]]
        )
    if "anyOf" in node:
        return " or ".join(dict.fromkeys(_allowed(_resolve(option)) for option in node["anyOf"]))
    if words := _words(node):
        return str(words[0]) if len(words) == 1 else f"one of {', '.join(map(str, words))}"
    match node.get("type"):
        case "boolean":
            return "true or false"
        case "integer" | "number" as kind:
            return _number("a whole number" if kind == "integer" else "a number", node)
        case "null":
            return "null"
        case "array":
            items = node["items"]
            many = f"{node['minItems']} " if "minItems" in node and node["minItems"] == node.get("maxItems") else ""
            return f"a list of {many}{'mappings' if '$ref' in items else _LISTED.get(items.get('type'), 'texts')}"
        case "object":
            free = "keys of the manifest" if node.get("additionalProperties") is True else "names of your choice"
            names = ", ".join(node["properties"]) if "properties" in node else free
            return f"a mapping with {names}" if names else "an empty mapping: {}"
        case _:
            if "examples" in node:
                return f"text such as {node['examples'][0]}"
            return f"text that matches {node['pattern']}" if "pattern" in node else "text"


def _number(noun: str, node: Json) -> str:
    low, above, high = (node.get(name) for name in ("minimum", "exclusiveMinimum", "maximum"))
    start = f"from {low:g}" if low is not None else f"above {above:g}" if above is not None else ""
    if high is not None:
        return f"{noun} {start} {'to' if low is not None else 'and at most'} {high:g}"
    if low is not None:
        return f"{noun} of at least {low:g}"
    return f"{noun} {start}".strip()
