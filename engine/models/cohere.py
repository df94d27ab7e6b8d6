"""Command R and A: parallel attention and MLP after one layer norm (without bias); interleaved RoPE; scaled logits.

Source: transformers modeling_cohere.py, modeling_cohere2.py. Command R+ also normalises q and k, with separate weights
for each head. Command R7B and A (Cohere2) have windows; their layers without a window have no positions.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.models.config import Config
from engine.models.parts import MLP, Attention, Embedding, Head, LayerNorm, Model, Parallel, ResidualBlock, named
from engine.models.rope import claimed_context, rope

ARCHITECTURES = ("CohereForCausalLM", "Cohere2ForCausalLM")

_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


def declare(config: Mapping[str, Any]) -> Model:
    is_second = config["architectures"][0] == "Cohere2ForCausalLM"
    c = Config.of(config, **_DEFAULTS, **({"sliding_window": 4096} if is_second else {}))
    eps = c.number("layer_norm_eps")
    positions = rope(c, theta=10_000.0 if is_second else 500_000.0, interleaved=True)
    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        rope=positions,
        bias=(c.flag("attention_bias"), c.flag("attention_bias")),
        qk_norm=LayerNorm(size=c.head_dim, eps=eps, bias=False) if c.flag("use_qk_norm") and not is_second else None,
        qk_norm_span="own",
    )
    mlp = MLP(hidden=c.hidden, intermediate_size=c.intermediate_size, act=c.activation())
    norm = LayerNorm(size=c.hidden, eps=eps, bias=False)
    layers = _second_layers(c, attention) if is_second else (attention,) * c.layers
    return Model(
        embed=Embedding(vocab=c.whole("vocab_size"), hidden=c.hidden),
        blocks=tuple(
            (ResidualBlock(before=named(norm, "input_layernorm"), body=Parallel(bodies=(one, mlp))),) for one in layers
        ),
        norm=named(norm, "norm"),
        head=Head(tied=c.flag("tie_word_embeddings"), scale=c.number("logit_scale")),
        max_context=claimed_context(c, positions),
    )


def _second_layers(c: Config, attention: Attention) -> tuple[Attention, ...]:
    """Return the attention of each layer: with a window and positions, or with neither."""
    period = Config({"sliding_window_pattern": 4, **c.values}).whole("sliding_window_pattern")
    kinds = c.layer_types(
        tuple("sliding_attention" if (index + 1) % period else "full_attention" for index in range(c.layers))
    )
    sliding, full = replace(attention, window=c.window()), replace(attention, rope=None)
    return tuple(sliding if kind == "sliding_attention" else full for kind in kinds)
