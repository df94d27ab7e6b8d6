"""Mamba-2: a mixer in each layer, no attention and no MLP.

Source: transformers modeling_mamba2.py. The state has no longest sequence; without `max_position_embeddings`,
MAX_CONTEXT tokens are supported.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.api.errors import CheckpointError
from engine.models.config import Config, shown
from engine.models.parts import Embedding, Head, Mamba2, Model, ResidualBlock, RMSNorm, named

ARCHITECTURES = ("Mamba2ForCausalLM",)
MAX_CONTEXT = 131_072
ATTENTION, RECURRENT = "full_attention", "linear_attention"
INFINITY = {"__float__": "Infinity"}  # as transformers writes it
OLD_KINDS = {"attention": ATTENTION, "mamba": RECURRENT}

_DEFAULTS: dict[str, Any] = {
    "conv_kernel": 4,
    "expand": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": MAX_CONTEXT,
    "n_groups": 8,
    "num_heads": 128,
    "state_size": 128,
    "use_conv_bias": True,
}


def declare(config: Mapping[str, Any]) -> Model:
    c = Config.of(config, **_DEFAULTS)
    norm = RMSNorm(size=c.hidden, eps=c.number("layer_norm_epsilon"))
    block = (ResidualBlock(before=named(norm, "norm"), body=mixer(c)),)
    return Model(
        embed=Embedding(vocab=c.whole("vocab_size"), hidden=c.hidden, name="embeddings"),
        blocks=(block,) * c.layers,
        norm=named(norm, "norm_f"),
        head=Head(tied=c.flag("tie_word_embeddings")),
        max_context=c.whole("max_position_embeddings"),
        root="backbone",
    )


def mixer(c: Config, channels: int | None = None) -> Mamba2:
    """Return the recurrent part. channels: of all heads; None for hidden_size · expand. Raises CheckpointError for
    sizes that do not match."""
    heads, groups, inner = c.whole("num_heads"), c.whole("n_groups"), channels or c.whole("expand") * c.hidden
    head_dim = inner // heads if c.values.get("head_dim") == "auto" else c.whole("head_dim")
    c.check_multiple("num_heads", heads, "n_groups", groups)
    if heads * head_dim != inner:
        raise CheckpointError(
            f"config.json: {c.name('num_heads')} is {heads} and {c.name('head_dim')} {head_dim}; their product must be "
            + ("mamba_d_ssm" if channels else f"hidden_size · {c.name('expand')}")
            + f", {inner}"
        )
    if c.activation() != "silu":
        raise CheckpointError(f"config.json: {c.name('hidden_act')} is {c.activation()}; Mamba mixers have silu")
    return Mamba2(
        hidden=c.hidden,
        heads=heads,
        head_dim=head_dim,
        groups=groups,
        state=c.whole("state_size"),
        conv=c.whole("conv_kernel", least=2),
        eps=c.number("layer_norm_epsilon"),
        bias=c.flag("use_bias"),
        conv_bias=c.flag("use_conv_bias"),
        dt_limits=_limits(c),
    )


def layer_kinds(c: Config, *more: str) -> tuple[str, ...]:
    """Return the kind of each layer, "full_attention", "linear_attention" or one of `more`, from layer_types or
    layers_block_type, which also have old names."""
    given = c.values.get("layers_block_type") if c.values.get("layer_types") is None else c.values["layer_types"]
    if isinstance(given, list):
        given = [OLD_KINDS.get(kind, kind) if isinstance(kind, str) else kind for kind in given]
    kinds = replace(c, values={**c.values, "layer_types": given})
    return kinds.layer_types((RECURRENT,) * c.layers, (ATTENTION, RECURRENT, *more))


def _limits(c: Config) -> tuple[float, float]:
    """Return the limits of the time step."""
    value = c.values.get("time_step_limit")
    if value is None:
        return 0.0, math.inf
    numbers = [math.inf if one == INFINITY else one for one in value] if isinstance(value, list) else []
    numeric = len(numbers) == 2 and all(isinstance(one, int | float) for one in numbers)
    if not numeric or not 0 <= numbers[0] <= numbers[1]:
        raise CheckpointError(f"config.json: time_step_limit is {shown(value)}; it must be two numbers, 0 ≤ low ≤ high")
    return float(numbers[0]), float(numbers[1])
