"""Hashes of the effective configuration, by effect: a hash changes exactly if a key with that effect changes.

SHA-256 over the sorted keys, each with its value as canonical JSON. Values are resolved, so a different result of
`auto` changes the hash, and a different spelling (1GiB, 1024MiB) does not.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from appliance.config.effects import effects
from appliance.config.key import Effect


class Unhashable(TypeError):
    """Raised for a value without a canonical form.

    Only null, booleans, finite numbers, text, and lists and mappings of these have one.
    """


def outputs(effect: Effect) -> bool:
    return effect.outputs != "no"


def graphs(effect: Effect) -> bool:
    return effect.graphs


def keys_with(what: Any) -> tuple[str, ...]:
    """Return the keys whose effect satisfies `what`: `outputs` or `graphs`."""
    return tuple(key for key, effect in effects().items() if what(effect))


def outputs_hash(values: Mapping[str, Any]) -> str:
    """Return the hash of everything that can change generated tokens. `values` has the resolved value of every key."""
    return digest(values, keys_with(outputs))


def graphs_hash(values: Mapping[str, Any]) -> str:
    """Return the hash of everything that compiled kernels and captured graphs depend on."""
    return digest(values, keys_with(graphs))


def digest(values: Mapping[str, Any], keys: Iterable[str]) -> str:
    """Return the hash of these keys. Raise Unhashable with the key, or KeyError for a key without a value."""
    spelled = [[key, canonical(values[key], key)] for key in sorted(keys) if "*" not in key]
    return hashlib.sha256(json.dumps(spelled, ensure_ascii=True).encode()).hexdigest()


def canonical(value: Any, key: str) -> str:
    """Return the canonical JSON of a value."""
    _check(value, key)
    return json.dumps(value, sort_keys=True, ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def _check(value: Any, key: str) -> None:
    match value:
        case None | bool() | int() | str():
            return
        case float() if math.isfinite(value):
            return
        case list() | tuple():
            for item in value:
                _check(item, key)
        case dict() if all(isinstance(name, str) for name in value):
            for item in value.values():
                _check(item, key)
        case _:
            raise Unhashable(f"{key}: {type(value).__name__} cannot be hashed; use plain values")
