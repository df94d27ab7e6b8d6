"""MiniMax-Text-01 and MiniMax-M1: lightning attention in most layers, attention in the others, and experts.

Source: transformers modeling_minimax.py; arXiv:2501.08313. The residual stream of each block is normalised, and
weighted sums replace the additions: x = alpha · norm(x) + beta · body(norm(x)). The first published configurations have
other keys (`attn_type_list`, `layernorm_…_alpha`), and rotate only `rotary_dim` dimensions.
"""

from collections.abc import Mapping
from typing import Any

from engine.api.errors import CheckpointError
from engine.models.config import Config, shown
from engine.models.mamba2 import ATTENTION, RECURRENT
from engine.models.parts import (
    Attention,
    Block,
    DecaySlopes,
    Embedding,
    Experts,
    Head,
    LightningAttention,
    Model,
    ResidualBlock,
    RMSNorm,
    named,
)
from engine.models.rope import claimed_context, rope

ARCHITECTURES = ("MiniMaxForCausalLM", "MiniMaxM1ForCausalLM", "MiniMaxText01ForCausalLM")
BUFFERS = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")  # computed from the configuration

_KINDS = {"mlp": "mlp", ATTENTION: "full_attn", RECURRENT: "linear_attn"}
_OLD = {"mlp": "mlp", ATTENTION: "full_attention", RECURRENT: "linear_attention"}
_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "max_position_embeddings": 131_072,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
}


def declare(config: Mapping[str, Any]) -> Model:
    c = Config.of(config, **_DEFAULTS)
    original = config["architectures"][0] != "MiniMaxForCausalLM"
    rotated = c.whole_or_none("rotary_dim") if original else None
    positions = rope(c, theta=1e6, partial=1.0 if rotated is None else rotated / c.head_dim)
    attention = Attention(
        hidden=c.hidden, heads=c.heads, kv_heads=c.kv_heads, head_dim=c.head_dim, rope=positions, window=c.window()
    )
    if c.activation() != "silu":
        raise CheckpointError(f"config.json: hidden_act is {c.activation()}; lightning attention has silu")
    if original and not c.flag("postnorm"):
        raise CheckpointError("config.json: postnorm is not true; supported are models with postnorm: true")
    factors = {kind: _factors(c, kind, original=original) for kind in _KINDS}
    norm = RMSNorm(size=c.hidden, eps=c.number("rms_norm_eps"))

    def block(layer: int, kind: str) -> Block:
        body = attention if kind == ATTENTION else _lightning(c, layer, original=original)
        alpha, beta = factors[kind]
        mlp_alpha, mlp_beta = factors["mlp"]
        return (
            ResidualBlock(first=named(norm, "input_layernorm"), body=body, factor=alpha, scale=beta / alpha),
            ResidualBlock(
                first=named(norm, "post_attention_layernorm"),
                body=_experts(c),
                factor=mlp_alpha,
                scale=mlp_beta / mlp_alpha,
            ),
        )

    return Model(
        embed=Embedding(vocab=c.whole("vocab_size"), hidden=c.hidden),
        blocks=tuple(block(layer, kind) for layer, kind in enumerate(_layer_kinds(c))),
        norm=named(norm, "norm"),
        head=Head(tied=c.flag("tie_word_embeddings")),
        max_context=claimed_context(c, positions),
        unread=tuple(f"layers.{layer}.self_attn.{name}" for layer in range(c.layers) for name in BUFFERS),
    )


def _lightning(c: Config, layer: int, *, original: bool) -> LightningAttention:
    """Return the recurrent part. The slopes decrease from layer to layer."""
    heads, last = c.heads, c.layers - 1
    share = 1 - layer / max(last, 1) if original else 1 - layer / (last + 1e-5)
    slopes = DecaySlopes(heads=heads, factor=share + 1e-5, alibi=original)
    return LightningAttention(hidden=c.hidden, heads=heads, head_dim=c.head_dim, slopes=slopes, eps=1e-6)


def _experts(c: Config) -> Experts:
    num_experts, top_k = c.experts()
    return Experts(
        hidden=c.hidden,
        intermediate_size=c.intermediate_size,
        num_experts=num_experts,
        top_k=top_k,
        scores="softmax_chosen",
        act=c.activation(),
        gate="w1",
        up="w3",
        down="w2",
        name="block_sparse_moe",
    )


def _factors(c: Config, kind: str, *, original: bool) -> tuple[float, float]:
    """Return the factors of the residual stream and of the output of a body."""
    names = f"layernorm_{_OLD[kind]}_{{}}" if original else f"{_KINDS[kind]}_{{}}_factor"
    keys = [names.format(one) for one in ("alpha", "beta")]
    alpha, beta = (1.0 if c.values.get(key) is None else c.positive(key) for key in keys)
    return alpha, beta


def _layer_kinds(c: Config) -> tuple[str, ...]:
    """Return the kind of each layer. The original key lists 1 for attention and 0 for lightning attention."""
    listed = c.values.get("attn_type_list")
    if listed is None:
        default = tuple(RECURRENT if layer % 2 else ATTENTION for layer in range(c.layers))
        return c.layer_types(default, (ATTENTION, RECURRENT))
    if not isinstance(listed, list) or len(listed) != c.layers or not all(one in (0, 1) for one in listed):
        raise CheckpointError(
            f"config.json: attn_type_list is {shown(listed)}; it must have 0 or 1 for each of the {c.layers} layers"
        )
    return tuple(ATTENTION if one else RECURRENT for one in listed)
