"""Falcon-H1: a Mamba-2 mixer and attention with the same input in each layer, their outputs summed, then an MLP.

Source: transformers modeling_falcon_h1.py; arXiv:2507.22448. Multipliers of the configuration scale embeddings, logits,
the inputs and outputs of all parts, keys, and the five pieces of the mixer's projection.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from engine.api.errors import CheckpointError
from engine.models import mamba2
from engine.models.config import Config, shown
from engine.models.granite_hybrid import mixer_config
from engine.models.parts import (
    MLP,
    Attention,
    Embedding,
    Head,
    Mamba2,
    Model,
    Parallel,
    ResidualBlock,
    RMSNorm,
    named,
)
from engine.models.rope import claimed_context, rope

ARCHITECTURES = ("FalconH1ForCausalLM",)
LARGE = 1e9  # no multiplier is as large

_NAMES = {
    "num_heads": "mamba_n_heads",
    "n_groups": "mamba_n_groups",
    "state_size": "mamba_d_state",
    "conv_kernel": "mamba_d_conv",
    "expand": "mamba_expand",
    "use_bias": "mamba_proj_bias",
    "use_conv_bias": "mamba_conv_bias",
    "layer_norm_epsilon": "rms_norm_eps",
}
_DEFAULTS: dict[str, Any] = {
    "attention_in_multiplier": 1.0,
    "attention_out_multiplier": 1.0,
    "conv_kernel": 4,
    "embedding_multiplier": 1.0,
    "expand": 2,
    "hidden_act": "silu",
    "key_multiplier": 1.0,
    "layer_norm_epsilon": 1e-5,
    "lm_head_multiplier": 1.0,
    "mamba_d_ssm": 1024,
    "mamba_norm_before_gate": True,
    "max_position_embeddings": 8192,
    "n_groups": 1,
    "num_heads": 128,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "ssm_in_multiplier": 1.0,
    "ssm_out_multiplier": 1.0,
    "state_size": 256,
    "use_conv_bias": True,
}


def declare(config: Mapping[str, Any]) -> Model:
    c = Config.of(config, _NAMES, **_DEFAULTS)
    positions, entering = rope(c), c.positive("attention_in_multiplier")
    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        rope=positions,
        # The multiplier of the input is one of queries, keys and values.
        scale=c.head_dim**-0.5 * entering * entering * c.positive("key_multiplier"),
        bias=(c.flag("attention_bias"), c.flag("attention_bias")),
    )
    _check_biases(c)
    gate, down = _multipliers(c, "mlp_multipliers", 2)
    mlp = MLP(
        hidden=c.hidden,
        intermediate_size=c.intermediate_size,
        act=c.activation(),
        bias=c.flag("mlp_bias"),
        gate_scale=gate,
        name="feed_forward",
    )
    scales = c.positive("ssm_out_multiplier"), entering * c.positive("attention_out_multiplier")
    norm = RMSNorm(size=c.hidden, eps=c.number("rms_norm_eps"))
    mixers = Parallel(bodies=(_mixer(c), attention), scales=scales)
    block = (
        ResidualBlock(before=named(norm, "input_layernorm"), body=mixers),
        ResidualBlock(before=named(norm, "pre_ff_layernorm"), body=mlp, scale=down),
    )
    return Model(
        embed=Embedding(vocab=c.whole("vocab_size"), hidden=c.hidden, scale=c.number("embedding_multiplier")),
        blocks=(block,) * c.layers,
        norm=named(norm, "final_layernorm"),
        head=Head(tied=c.flag("tie_word_embeddings"), scale=c.number("lm_head_multiplier")),
        max_context=claimed_context(c, positions),
    )


def _mixer(c: Config) -> Mamba2:
    entering = c.number("ssm_in_multiplier")
    norms: tuple[Literal["gated", "scan"], ...] = ("gated", "scan")
    return replace(
        mamba2.mixer(mixer_config(c), c.whole_or_none("mamba_d_ssm")),
        norm=norms[c.flag("mamba_norm_before_gate")] if c.flag("mamba_rms_norm") else "none",
        scales=tuple(entering * factor for factor in _multipliers(c, "ssm_multipliers", 5)),
        name="mamba",
    )


def _check_biases(c: Config) -> None:
    """Raise CheckpointError for biases that a multiplier of the input does not scale."""
    if c.flag("projectors_bias") != c.flag("use_bias"):
        raise CheckpointError("config.json: projectors_bias and mamba_proj_bias differ, which is not supported yet")
    for bias, multiplier in (("attention_bias", "attention_in_multiplier"), ("use_bias", "ssm_in_multiplier")):
        if c.flag(bias) and c.number(multiplier) != 1.0:
            raise CheckpointError(
                f"config.json: {c.name(bias)} is true and {multiplier} {c.number(multiplier):g}; it must be 1"
            )


def _multipliers(c: Config, key: str, count: int) -> tuple[float, ...]:
    """Return a list of multipliers; all are 1 if the key is missing."""
    found = c.values.get(key)
    if found is None:
        return (1.0,) * count
    numeric = isinstance(found, list) and all(isinstance(one, int | float) and abs(one) < LARGE for one in found)
    if not numeric or len(found) != count:
        raise CheckpointError(f"config.json: {key} is {shown(found)}; it must be a list of {count} numbers")
    return tuple(map(float, found))
