"""The families of architectures that are served, and which one serves a name.

A family is a module with `ARCHITECTURES`, the names in config.json that it serves, and `declare(config) -> Model`.
"""

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from engine.api.errors import UnknownArchitecture
from engine.models import (
    bart,
    bert,
    cohere,
    gemma,
    glm4,
    granite,
    llama,
    mixtral,
    modernbert,
    nomic_bert,
    olmo2,
    olmoe,
    phi3,
    pooled_decoders,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    starcoder2,
)
from engine.models.parts import Model

Declare = Callable[[Mapping[str, Any]], Model]

DECODERS = (llama, qwen3, phi3, gemma, olmo2, granite, starcoder2, cohere, glm4, mixtral, qwen2_moe, qwen3_moe, olmoe)
TRANSLATORS = (bart,)
POOLED = (bert, modernbert, nomic_bert, pooled_decoders)
FAMILIES = (*DECODERS, *TRANSLATORS, *POOLED)
ARCHITECTURES: dict[str, Declare] = {name: family.declare for family in FAMILIES for name in family.ARCHITECTURES}


def declaration(architecture: str) -> Declare:
    """The function that declares models of this architecture. Raises UnknownArchitecture with what is served."""
    if architecture in ARCHITECTURES:
        return ARCHITECTURES[architecture]
    close = difflib.get_close_matches(architecture, ARCHITECTURES, n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    raise UnknownArchitecture(
        f"config.json: the architecture {architecture!r} is not served.{hint} "
        f"Served are {', '.join(sorted(ARCHITECTURES))}"
    )
