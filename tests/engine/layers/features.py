"""Features of a model declaration, to choose test models that have every part.

Triton's interpreter takes a second or more for each tiny model, so `make test` runs one model for each part there;
`make test-all` runs all of them."""

import json
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from engine.models.families import declaration
from engine.models.parts import Attention, Model

WORDS = ("act", "scores", "qk_norm_span", "pool", "activation", "task")  # texts that select an algorithm, unlike names


def features(part: Any) -> Iterator[str]:
    """Yield the types of the parts, their switches and algorithms, and the numbers that differ from their defaults."""
    if isinstance(part, tuple):
        for one in part:
            yield from features(one)
    if not is_dataclass(part):
        return
    kind = type(part).__name__
    yield kind
    if isinstance(part, Attention):
        yield (
            "one KV head" if part.kv_heads == 1 else "shared KV heads" if part.kv_heads < part.heads else "own KV heads"
        )
        if part.rope is not None and part.rope.dim < part.head_dim:
            yield "partial rotation"
    for field in fields(part):
        value, name = getattr(part, field.name), f"{kind}.{field.name}"
        if is_dataclass(value):
            yield f"{name}: {type(value).__name__}"
        elif isinstance(value, bool) or field.name in WORDS or field.name == "bias":
            yield f"{name} = {value}"
        elif isinstance(value, int | float | None) and field.default is not MISSING:
            yield name if value != field.default else f"no {name}"
        yield from features(value)


def declare(architecture: str, config: Any) -> Model:
    """Return the declaration for a configuration of transformers, without a checkpoint."""
    stored = json.loads(config.to_json_string()) | {"architectures": [architecture]}
    return declaration(architecture, stored)(stored)
