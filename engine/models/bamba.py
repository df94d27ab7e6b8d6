"""Bamba: Mamba-2 mixers in most layers, attention with rotary positions in the others, an MLP in all.

Source: transformers modeling_bamba.py. Half of each head is rotated.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.api.errors import CheckpointError
from engine.models import mamba2
from engine.models.config import Config, shown
from engine.models.granite_hybrid import mixer_config
from engine.models.mamba2 import ATTENTION, RECURRENT
from engine.models.parts import MLP, Attention, Block, Embedding, Head, Model, ResidualBlock, RMSNorm, named
from engine.models.rope import claimed_context, rope

ARCHITECTURES = ("BambaForCausalLM",)

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
    "conv_kernel": 4,
    "expand": 2,
    "hidden_act": "silu",
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": 262_144,
    "n_groups": 1,
    "num_heads": 128,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "state_size": 256,
    "use_conv_bias": True,
}


def declare(config: Mapping[str, Any]) -> Model:
    c = Config.of(config, _NAMES, **_DEFAULTS)
    positions = rope(c, partial=0.5)
    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        rope=positions,
        bias=(c.flag("attention_bias"), c.flag("attention_bias")),
    )
    recurrent = replace(mamba2.mixer(mixer_config(c)), name="mamba")
    norm = RMSNorm(size=c.hidden, eps=c.number("rms_norm_eps"))
    feed = MLP(
        hidden=c.hidden,
        intermediate_size=c.intermediate_size,
        act=c.activation(),
        bias=c.flag("mlp_bias"),
        name="feed_forward",
    )

    def block(kind: str) -> Block:
        body = attention if kind == ATTENTION else recurrent
        return (
            ResidualBlock(before=named(norm, "input_layernorm"), body=body),
            ResidualBlock(before=named(norm, "pre_ff_layernorm"), body=feed),
        )

    return Model(
        embed=Embedding(vocab=c.whole("vocab_size"), hidden=c.hidden),
        blocks=tuple(map(block, _kinds(c))),
        norm=named(norm, "final_layernorm"),
        head=Head(tied=c.flag("tie_word_embeddings")),
        max_context=claimed_context(c, positions),
    )


def _kinds(c: Config) -> tuple[str, ...]:
    """Return the kind of each layer, from the indexes of those with attention."""
    indexes = c.values.get("attn_layer_indices") or []
    if not isinstance(indexes, list) or not all(isinstance(one, int) for one in indexes):
        raise CheckpointError(
            f"config.json: attn_layer_indices is {shown(indexes)}; it must be a list of layers' numbers"
        )
    return tuple(ATTENTION if layer in indexes else RECURRENT for layer in range(c.layers))
