"""InternLM 2 and 3: Llama blocks; InternLM 2 has q, k, v in one tensor, grouped by KV head, and other tensor names.

Source: modeling_internlm2.py and modeling_internlm3.py of the checkpoints internlm/internlm2_5-7b and internlm3-8b.
"""

from collections.abc import Mapping
from typing import Any

from engine.models.config import Config
from engine.models.decoder import llama_decoder
from engine.models.parts import MLP, Attention, Embedding, Head, Model, ResidualBlock, RMSNorm, named
from engine.models.rope import claimed_context, rope

ARCHITECTURES = ("InternLM2ForCausalLM", "InternLM3ForCausalLM")

_DEFAULTS: dict[str, Any] = {"hidden_act": "silu", "max_position_embeddings": 32768, "rms_norm_eps": 1e-6}


def declare(config: Mapping[str, Any]) -> Model:
    is_second = config["architectures"][0] == "InternLM2ForCausalLM"
    c = Config.of(config, bias=is_second, **_DEFAULTS)
    return _second(c) if is_second else _third(c)


def _second(c: Config) -> Model:
    positions, bias = rope(c), c.flag("bias")
    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        rope=positions,
        bias=(bias, bias),
        sources=("wqkv", "wqkv", "wqkv", "wo"),
        groups=c.kv_heads,
        name="attention",
    )
    mlp = MLP(
        hidden=c.hidden,
        intermediate_size=c.intermediate_size,
        act=c.activation(),
        gate="w1",
        up="w3",
        down="w2",
        name="feed_forward",
    )
    norm = RMSNorm(size=c.hidden, eps=c.number("rms_norm_eps"))
    block = (
        ResidualBlock(before=named(norm, "attention_norm"), body=attention),
        ResidualBlock(before=named(norm, "ffn_norm"), body=mlp),
    )
    return Model(
        embed=Embedding(vocab=c.whole("vocab_size"), hidden=c.hidden, name="tok_embeddings"),
        blocks=(block,) * c.layers,
        norm=named(norm, "norm"),
        head=Head(tied=c.flag("tie_word_embeddings"), name="output"),
        max_context=claimed_context(c, positions),
    )


def _third(c: Config) -> Model:
    """Biases have the keys of the checkpoints (`qkv_bias`, `bias`) or of transformers."""
    positions = rope(c)
    bias = c.flag("bias") or c.flag("mlp_bias")
    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        rope=positions,
        bias=(c.flag("qkv_bias") or c.flag("attention_bias"), bias),
    )
    mlp = MLP(hidden=c.hidden, intermediate_size=c.intermediate_size, act=c.activation(), bias=bias)
    return llama_decoder(c, attention, mlp, RMSNorm(size=c.hidden, eps=c.number("rms_norm_eps")), positions=positions)
