"""AFMoE (Arcee Trinity): gated attention, norms before and after each body, and experts in all but the first layers.

Source: transformers modeling_afmoe.py. Layers with full attention have no positions. Experts are selected by sigmoid
scores plus a bias of each expert.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.models.config import Config
from engine.models.decoder import Feed
from engine.models.parts import MLP, Attention, Block, Embedding, Experts, Head, Model, ResidualBlock, RMSNorm, named
from engine.models.rope import claimed_context, rope

ARCHITECTURES = ("AfmoeForCausalLM",)

_DEFAULTS: dict[str, Any] = {
    "global_attn_every_n_layers": 4,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 16_384,
    "moe_intermediate_size": 1408,
    "num_dense_layers": 1,
    "num_experts": 64,
    "num_experts_per_tok": 6,
    "num_shared_experts": 2,
    "rms_norm_eps": 1e-5,
    "route_scale": 1.0,
    "sliding_window": 1024,
}


def declare(config: Mapping[str, Any]) -> Model:
    c = Config.of(config, **_DEFAULTS)
    positions, bias = rope(c), c.flag("attention_bias")
    norm = RMSNorm(size=c.hidden, eps=c.number("rms_norm_eps"))
    sliding = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        rope=positions,
        bias=(bias, bias),
        qk_norm=RMSNorm(size=c.head_dim, eps=norm.eps),
        window=c.window(),
        gated=True,
        gate_source="gate_proj",
    )
    kinds = {"sliding_attention": sliding, "full_attention": replace(sliding, rope=None, window=None)}
    every = c.whole("global_attn_every_n_layers")
    usual = tuple("sliding_attention" if (i + 1) % every else "full_attention" for i in range(c.layers))
    mlp = MLP(hidden=c.hidden, intermediate_size=c.intermediate_size, act=c.activation())
    first_sparse = c.whole("num_dense_layers", least=0)

    def block(index: int, kind: str) -> Block:
        feed: Feed = mlp if index < first_sparse else _experts(c)
        before, after = named(norm, "input_layernorm"), named(norm, "post_attention_layernorm")
        mixer = ResidualBlock(before=before, body=kinds[kind], after=after)
        before, after = named(norm, "pre_mlp_layernorm"), named(norm, "post_mlp_layernorm")
        return mixer, ResidualBlock(before=before, body=feed, after=after)

    scale = c.hidden**0.5 if c.flag("mup_enabled") else 1.0
    return Model(
        embed=Embedding(vocab=c.whole("vocab_size"), hidden=c.hidden, scale=scale),
        blocks=tuple(block(index, kind) for index, kind in enumerate(c.layer_types(usual))),
        norm=named(norm, "norm"),
        head=Head(tied=c.flag("tie_word_embeddings")),
        max_context=claimed_context(c, positions),
    )


def _experts(c: Config) -> Experts:
    count, top_k = c.experts()
    size, act = c.whole("moe_intermediate_size"), c.activation()
    return Experts(
        hidden=c.hidden,
        intermediate_size=size,
        num_experts=count,
        top_k=top_k,
        scores="sigmoid",
        act=act,
        router="router.gate",
        correction="expert_bias",
        normalized=True,
        weight_scale=c.positive("route_scale"),
        shared=MLP(
            hidden=c.hidden, intermediate_size=size * c.whole("num_shared_experts"), act=act, name="shared_experts"
        ),
    )
