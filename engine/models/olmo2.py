"""OLMo 2 and 3: norms only after each body; q and k are normalised over the entire projection; OLMo 3 has windows.

Source: transformers modeling_olmo2.py, modeling_olmo3.py. In OLMo 3, layers with a window have no RoPE scaling.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.models.config import Config
from engine.models.parts import MLP, Attention, Block, Embedding, Head, Model, ResidualBlock, RMSNorm, Rope, named
from engine.models.rope import claimed_context, local_rope, rope

ARCHITECTURES = ("Olmo2ForCausalLM", "Olmo3ForCausalLM")

_DEFAULTS: dict[str, Any] = {"hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-5}


def declare(config: Mapping[str, Any]) -> Model:
    c = Config.of(config, **_DEFAULTS)
    is_third = config["architectures"][0] == "Olmo3ForCausalLM"
    eps = c.number("rms_norm_eps")
    positions = rope(c, theta=500_000.0, kind="full_attention") if is_third else rope(c)
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
    mlp = MLP(hidden=c.hidden, intermediate_size=c.intermediate_size, act=c.activation())
    norm = RMSNorm(size=c.hidden, eps=eps)
    layers = _third_layers(c, attention, positions) if is_third else (attention,) * c.layers

    def block(part: Attention) -> Block:
        return (
            ResidualBlock(body=part, after=named(norm, "post_attention_layernorm")),
            ResidualBlock(body=mlp, after=named(norm, "post_feedforward_layernorm")),
        )

    return Model(
        embed=Embedding(vocab=c.whole("vocab_size"), hidden=c.hidden),
        blocks=tuple(map(block, layers)),
        norm=named(norm, "norm"),
        head=Head(tied=c.flag("tie_word_embeddings")),
        max_context=claimed_context(c, positions),
    )


def _third_layers(c: Config, attention: Attention, positions: Rope) -> tuple[Attention, ...]:
    """Return the attention of each layer: every fourth one has no window."""
    c = Config({"sliding_window": 4096, **c.values})
    kinds = c.layer_types(
        tuple("sliding_attention" if (index + 1) % 4 else "full_attention" for index in range(c.layers))
    )
    sliding = replace(attention, window=c.window(), rope=local_rope(c, theta=positions.theta))
    return tuple(sliding if kind == "sliding_attention" else attention for kind in kinds)
