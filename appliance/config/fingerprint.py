"""Hashes of what an effective configuration entails: they change if, and only if, a key with that effect does.

SHA-256 over the keys in order, each with its value as canonical JSON. Values are the settled ones, so an `auto` that
comes out otherwise counts as a change, and a spelling (1GiB, 1024MiB) does not.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from appliance.config.effects import EFFECTS, Effect


class Unhashable(TypeError):
    """A value that has no one spelling: neither null, a truth value, a finite number, text, nor a list or mapping of
    those."""


def outputs(effect: Effect) -> bool:
    return effect.outputs != "no"


def graphs(effect: Effect) -> bool:
    return effect.graphs


def keys_with(what: Any) -> tuple[str, ...]:
    """The keys whose effect is `outputs` or `graphs`."""
    return tuple(key for key, effect in EFFECTS.items() if what(effect))


def outputs_hash(values: Mapping[str, Any]) -> str:
    """Of what may change the tokens of a reply. `values`: every key of a plan with its settled value."""
    return digest(values, keys_with(outputs))


def graphs_hash(values: Mapping[str, Any]) -> str:
    """Of what compiled kernels and captured graphs depend on."""
    return digest(values, keys_with(graphs))


def digest(values: Mapping[str, Any], keys: Iterable[str]) -> str:
    """Raises Unhashable naming the key, KeyError for a key without a value."""
    spelled = [[key, canonical(values[key], key)] for key in sorted(keys) if "*" not in key]
    return hashlib.sha256(json.dumps(spelled, ensure_ascii=True).encode()).hexdigest()


def canonical(value: Any, key: str) -> str:
    """The one JSON text of a value."""
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
            raise Unhashable(f"{key}: {type(value).__name__} has no one spelling; give plain values to hash")
