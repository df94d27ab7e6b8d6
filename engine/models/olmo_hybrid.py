"""OLMo Hybrid: gated DeltaNet in three of four layers, attention in the others, an MLP in all.

Layers with attention have norms of the outputs, as in OLMo 3; the others have norms of the inputs. Released models have
no positions.

Source: transformers modeling_olmo_hybrid.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.models.config import Config
from engine.models.parts import MLP, Attention, Block, Embedding, Head, Model, ResidualBlock, RMSNorm, Rope, named
from engine.models.qwen3_next import delta_net
from engine.models.rope import claimed_context, rope

ARCHITECTURES = ("OlmoHybridForCausalLM",)
DELTA_EPS = 1e-5  # of the norm of a DeltaNet, whatever rms_norm_eps is

_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "linear_allow_neg_eigval": True,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 65_536,
    "rms_norm_eps": 1e-6,
}


def declare(config: Mapping[str, Any]) -> Model:
    c = Config.of(config, **_DEFAULTS)
    eps, positions = c.number("rms_norm_eps"), _positions(c)
    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        rope=positions,
        bias=(c.flag("attention_bias"), c.flag("attention_bias")),
        qk_norm=RMSNorm(size=c.head_dim, eps=eps),
        qk_norm_span="all",
    )
    recurrent = replace(
        delta_net(_with_sizes(c)),
        eps=DELTA_EPS,
        projections="separate",
        beta_scale=2.0 if c.flag("linear_allow_neg_eigval") else 1.0,
    )
    mlp = MLP(hidden=c.hidden, intermediate_size=c.intermediate_size, act=c.activation())
    norm = RMSNorm(size=c.hidden, eps=eps)
    blocks: dict[str, Block] = {
        "full_attention": (
            ResidualBlock(body=attention, after=named(norm, "post_attention_layernorm")),
            ResidualBlock(body=mlp, after=named(norm, "post_feedforward_layernorm")),
        ),
        "linear_attention": (
            ResidualBlock(before=named(norm, "attention_layer_norm"), body=recurrent),
            ResidualBlock(before=named(norm, "feedforward_layer_norm"), body=mlp),
        ),
    }
    return Model(
        embed=Embedding(vocab=c.whole("vocab_size"), hidden=c.hidden),
        blocks=tuple(blocks[kind] for kind in c.layer_types(_usual(c), tuple(blocks))),
        norm=named(norm, "norm"),
        head=Head(tied=c.flag("tie_word_embeddings")),
        max_context=claimed_context(c, positions),
    )


def _positions(c: Config) -> Rope | None:
    """Return the RoPE, or None if its base is null. A missing base has the usual default."""
    parameters = c.values.get("rope_parameters")
    for values in (parameters if isinstance(parameters, dict) else {}, c.values):
        if "rope_theta" in values:
            return None if values["rope_theta"] is None else rope(c)
    return rope(c)


def _with_sizes(c: Config) -> Config:
    """Return the configuration with the sizes of the DeltaNet that are derived if they are missing."""
    values = dict(c.values)
    for key in ("linear_num_key_heads", "linear_num_value_heads"):
        if values.get(key) is None:
            values[key] = c.heads
    sized = replace(c, values=values)
    if values.get("linear_key_head_dim") is None:
        values["linear_key_head_dim"] = int(0.75 * c.hidden / sized.whole("linear_num_key_heads"))
    if values.get("linear_value_head_dim") is None:
        values["linear_value_head_dim"] = 2 * sized.whole("linear_key_head_dim")
    return sized


def _usual(c: Config) -> tuple[str, ...]:
    """Return the kinds of layers without layer_types: attention in every fourth one, or else in the last one."""
    kinds = ["full_attention" if index % 4 == 3 else "linear_attention" for index in range(c.layers)]
    return (*kinds[:-1], "full_attention") if "full_attention" not in kinds else tuple(kinds)
