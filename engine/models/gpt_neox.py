"""GPT-NeoX and Pythia: parallel attention and MLP with a layer norm each; partial rotation; q, k, v fused by head.

Source: transformers modeling_gpt_neox.py. Without use_parallel_residual, the MLP follows the attention.
"""

from collections.abc import Mapping
from typing import Any

from engine.models.config import Config
from engine.models.decoder import mask_buffers
from engine.models.parts import MLP, Attention, Embedding, Head, LayerNorm, Model, Parallel, ResidualBlock, named
from engine.models.rope import claimed_context, rope

ARCHITECTURES = ("GPTNeoXForCausalLM",)

_DEFAULTS: dict[str, Any] = {
    "attention_bias": True,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "rotary_emb_base": 10_000.0,
    "rotary_pct": 0.25,
    "use_parallel_residual": True,
}


def declare(config: Mapping[str, Any]) -> Model:
    c = Config.of(config, **_DEFAULTS)
    positions = rope(c, theta=c.number("rotary_emb_base"), partial=c.number("rotary_pct"))
    fused = "query_key_value"
    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.heads,
        head_dim=c.head_dim,
        rope=positions,
        bias=(c.flag("attention_bias"), c.flag("attention_bias")),
        sources=(fused, fused, fused, "dense"),
        groups=c.heads,
        name="attention",
    )
    mlp = MLP(
        hidden=c.hidden,
        intermediate_size=c.intermediate_size,
        act=c.activation(),
        bias=True,
        gate=None,
        up="dense_h_to_4h",
        down="dense_4h_to_h",
    )
    norm = LayerNorm(size=c.hidden, eps=c.number("layer_norm_eps"))
    norms = named(norm, "input_layernorm"), named(norm, "post_attention_layernorm")
    if c.flag("use_parallel_residual"):
        block: tuple[ResidualBlock, ...] = (ResidualBlock(body=Parallel(bodies=(attention, mlp), norms=norms)),)
    else:
        block = ResidualBlock(before=norms[0], body=attention), ResidualBlock(before=norms[1], body=mlp)
    return Model(
        embed=Embedding(vocab=c.whole("vocab_size"), hidden=c.hidden, name="embed_in"),
        blocks=(block,) * c.layers,
        norm=named(norm, "final_layer_norm"),
        head=Head(tied=c.flag("tie_word_embeddings"), name="embed_out"),
        max_context=claimed_context(c, positions),
        root="gpt_neox",
        unread=mask_buffers(c, "layers", "attention"),
    )
