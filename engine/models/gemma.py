"""Gemma 1 to 3 (text): scaled embedding; from Gemma 2 on norms before and after each body, and windows in some layers.

Source: transformers modeling_gemma.py, modeling_gemma2.py, modeling_gemma3.py. Norm weights are stored minus one. Gemma
1 has Llama's blocks; where its files state `gelu`, the approximation with tanh is meant. Gemma 2 caps scores and
logits with tanh. Gemma 3 normalises q and k, and its windowed layers have an unscaled RoPE with a separate base.
EmbeddingGemma is bidirectional.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.models.config import Config
from engine.models.decoder import llama_decoder
from engine.models.parts import MLP, Attention, Block, Embedding, Head, Model, ResidualBlock, RMSNorm, named
from engine.models.rope import claimed_context, local_rope, rope

ARCHITECTURES = ("GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM")

_DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_FIRST = {**_DEFAULTS, "max_position_embeddings": 8192, "num_key_value_heads": 16, "hidden_act": "gelu"}
_SECOND = {"max_position_embeddings": 8192, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0}
_THIRD = {"max_position_embeddings": 131072, "sliding_window_pattern": 6}


def declare(config: Mapping[str, Any]) -> Model:
    return _first(config) if config["architectures"][0] == "GemmaForCausalLM" else _later(config)


def _first(config: Mapping[str, Any]) -> Model:
    c = Config.of(config, **_FIRST)
    act, positions, bias = c.activation(), rope(c), c.flag("attention_bias")
    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        rope=positions,
        bias=(bias, bias),
        causal=not c.flag("use_bidirectional_attention"),
    )
    mlp = MLP(hidden=c.hidden, intermediate_size=c.intermediate_size, act="gelu_tanh" if act == "gelu" else act)
    norm = RMSNorm(size=c.hidden, eps=c.number("rms_norm_eps"), offset=1.0)
    return llama_decoder(c, attention, mlp, norm, positions=positions, embedding=c.hidden**0.5)


def _later(config: Mapping[str, Any]) -> Model:
    third = config["architectures"][0] == "Gemma3ForCausalLM"
    c = Config.of(config, **_DEFAULTS, **(_THIRD if third else _SECOND))
    causal = not c.flag("use_bidirectional_attention")
    eps, positions = c.number("rms_norm_eps"), rope(c, theta=1e6, kind="full_attention") if third else rope(c)
    full = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        rope=positions,
        scale=c.positive("query_pre_attn_scalar") ** -0.5,
        bias=(c.flag("attention_bias"), c.flag("attention_bias")),
        qk_norm=RMSNorm(size=c.head_dim, eps=eps, offset=1.0) if third else None,
        softcap=c.number_or_none("attn_logit_softcapping"),
        causal=causal,
    )
    size = c.whole_or_none("sliding_window")
    # In a bidirectional model, a position attends to half of the window on either side.
    window = c.window() if causal or size is None else size // 2 + 1
    windowed = replace(full, window=window, rope=local_rope(c) if third else positions)
    norm = RMSNorm(size=c.hidden, eps=eps, offset=1.0)
    feed = ResidualBlock(
        before=named(norm, "pre_feedforward_layernorm"),
        body=MLP(hidden=c.hidden, intermediate_size=c.intermediate_size, act=c.activation("hidden_activation")),
        after=named(norm, "post_feedforward_layernorm"),
    )

    def block(kind: str) -> Block:
        body = {"full_attention": full, "sliding_attention": windowed}[kind]
        mixer = ResidualBlock(
            before=named(norm, "input_layernorm"), body=body, after=named(norm, "post_attention_layernorm")
        )
        return (mixer, feed)

    pattern = c.whole("sliding_window_pattern") if third else 2
    usual = tuple("sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(c.layers))
    return Model(
        embed=Embedding(vocab=c.whole("vocab_size"), hidden=c.hidden, scale=c.hidden**0.5),
        blocks=tuple(block(kind) for kind in c.layer_types(usual)),
        norm=named(norm, "norm"),
        head=Head(tied=c.flag("tie_word_embeddings"), softcap=c.number_or_none("final_logit_softcapping")),
        # Long-context checkpoints state the extended length and keep a linear factor, which must not be applied twice.
        max_context=c.whole("max_position_embeddings") if third else claimed_context(c, positions),
    )
