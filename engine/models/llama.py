"""Llama 2 and 3, Mistral (sliding window), Qwen2 (biases of q, k, v; windows in the upper layers) and MiMo (Qwen2 and
a prediction head).

Source: transformers modeling_llama.py, modeling_mistral.py, modeling_qwen2.py; for the head, vLLM mimo_mtp.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.models.config import Config
from engine.models.decoder import with_predictor
from engine.models.parts import MLP, Attention, Block, Embedding, Head, Model, ResidualBlock, RMSNorm, named
from engine.models.rope import claimed_context, rope

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "MiMoForCausalLM")

_LLAMA = {"max_position_embeddings": 2048}
_MISTRAL = {"max_position_embeddings": 131072, "sliding_window": 4096, "num_key_value_heads": 8}
_QWEN2 = {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
_DEFAULTS: dict[str, dict[str, Any]] = dict(zip(ARCHITECTURES, (_LLAMA, _MISTRAL, _QWEN2, _QWEN2), strict=True))


def declare(config: Mapping[str, Any]) -> Model:
    architecture = config["architectures"][0]
    c = Config.of(config, hidden_act="silu", rms_norm_eps=1e-6, **_DEFAULTS[architecture])
    qwen2 = architecture in ("Qwen2ForCausalLM", "MiMoForCausalLM")
    positions = rope(c)
    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        rope=positions,
        bias=(True, False) if qwen2 else (c.flag("attention_bias"), c.flag("attention_bias")),
    )
    mlp = MLP(hidden=c.hidden, intermediate_size=c.intermediate_size, act=c.activation(), bias=c.flag("mlp_bias"))
    norm = RMSNorm(size=c.hidden, eps=c.number("rms_norm_eps"))
    windows = layer_windows(c) if qwen2 else (c.window() if "Mistral" in architecture else None,) * c.layers

    def block(window: int | None) -> Block:
        return (
            ResidualBlock(before=named(norm, "input_layernorm"), body=replace(attention, window=window)),
            ResidualBlock(before=named(norm, "post_attention_layernorm"), body=mlp),
        )

    model = Model(
        embed=Embedding(vocab=c.whole("vocab_size"), hidden=c.hidden),
        blocks=tuple(block(window) for window in windows),
        norm=named(norm, "norm"),
        head=Head(tied=c.flag("tie_word_embeddings")),
        max_context=claimed_context(c, positions),
    )
    return model if architecture != "MiMoForCausalLM" else _with_head(model, c, attention, mlp)


def _with_head(model: Model, c: Config, attention: Attention, mlp: MLP) -> Model:
    """Return MiMo with its prediction head."""
    return with_predictor(
        replace(model, unread=("mtp_layers.",)),
        c,
        attention,
        mlp,
        [("model.mtp_layers.{}.", "")],
        tensors=("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm"),
        before_norm=True,
        states_first=True,
    )


def layer_windows(c: Config) -> tuple[int | None, ...]:
    """Return the window of each layer, by Qwen's rule: with use_sliding_window, from layer max_window_layers on."""
    if not c.flag("use_sliding_window") or c.window() is None:
        return (None,) * c.layers
    first = c.whole("max_window_layers", least=0)
    usual = tuple("sliding_attention" if i >= first else "full_attention" for i in range(c.layers))
    return tuple(c.window() if kind == "sliding_attention" else None for kind in c.layer_types(usual))
