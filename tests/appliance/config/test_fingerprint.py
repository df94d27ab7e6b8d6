"""Hashes of an effective configuration: each changes exactly with the keys that have its effect."""

import hashlib
import json
import math
from typing import Any

import pytest

from appliance.config.effects import effects
from appliance.config.fingerprint import Unhashable, canonical, digest, graphs_hash, outputs_hash
from appliance.config.keys import Key, leaves

KEYS = [key for key in leaves() if "*" not in key.path]
VALUES: dict[str, Any] = {key.name: key.default for key in KEYS}


def another(key: Key) -> Any:
    """A value that the key's type has and that is not its default."""
    if key.choices:
        return next(word for word in (*key.choices, "other") if word != key.default)
    if "boolean" in key.types:
        return not key.default
    if "array" in key.types:
        return ["x"]
    return 3 if {"integer", "number"} & key.types else "x"


@pytest.mark.parametrize("key", KEYS, ids=[key.name for key in KEYS])
def test_a_hash_changes_if_and_only_if_the_key_has_that_effect(key: Key) -> None:
    changed = VALUES | {key.name: another(key)}
    assert changed[key.name] != VALUES[key.name]
    effect = effects()[key.name]
    assert (graphs_hash(changed) != graphs_hash(VALUES)) == effect.graphs
    assert (outputs_hash(changed) != outputs_hash(VALUES)) == (effect.outputs != "no")


def test_nothing_but_values_counts() -> None:
    turned = dict(reversed(VALUES.items()))
    assert graphs_hash(turned) == graphs_hash(VALUES) == graphs_hash(VALUES | {"more": object()})


def test_values_of_different_types_differ() -> None:
    spelled = [canonical(value, "k") for value in (1, True, 1.0, "1", [1], {"1": 1}, None, "", [], {})]
    assert len(set(spelled)) == len(spelled)
    assert canonical({"b": 1, "a": (2, 3)}, "k") == canonical({"a": [2, 3], "b": 1}, "k")


def test_the_digest_hashes_the_documented_text() -> None:
    text = json.dumps([["a", "1"], ["b", '"x"']])
    assert digest({"b": "x", "a": 1}, ["b", "a"]) == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize("value", [{1, 2}, object(), math.nan, math.inf, [set()], {"a": b"x"}, {1: 2}, len])
def test_values_without_canonical_form_are_rejected_with_their_key(value: Any) -> None:
    with pytest.raises(Unhashable, match=r"^hardware\.graphs: "):
        graphs_hash(VALUES | {"hardware.graphs": value})
