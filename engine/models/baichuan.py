"""Baichuan and Baichuan 2: Llama blocks with q, k, v in one tensor; Baichuan 2 divides head rows by their length.

Source: modeling_baichuan.py of the checkpoints baichuan-inc/Baichuan-7B, Baichuan-13B-Base and Baichuan2-7B-Base. The
13B models have ALiBi instead of rotary positions, and model_max_length instead of max_position_embeddings.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.api.errors import CheckpointError
from engine.models.config import Config
from engine.models.decoder import llama_decoder
from engine.models.parts import MLP, Alibi, Attention, Model, RMSNorm
from engine.models.rope import rope

ARCHITECTURES = ("BaichuanForCausalLM", "BaiChuanForCausalLM")

_DEFAULTS: dict[str, Any] = {"hidden_act": "silu", "rms_norm_eps": 1e-6}
_VOCAB_2 = 125_696  # vocabulary of Baichuan 2; the configurations of both generations have the same keys


def declare(config: Mapping[str, Any]) -> Model:
    is_13b = "max_position_embeddings" not in config
    if is_13b and "model_max_length" not in config:
        raise CheckpointError(
            "config.json: there must be max_position_embeddings, for RoPE (7B), or model_max_length, for ALiBi (13B)"
        )
    c = Config.of(config, {"max_position_embeddings": "model_max_length"} if is_13b else {}, **_DEFAULTS)
    positions = None if is_13b else rope(c)
    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.heads,
        head_dim=c.head_dim,
        rope=positions,
        alibi=Alibi() if is_13b else None,
        sources=("W_pack", "W_pack", "W_pack", "o_proj"),
    )
    mlp = MLP(hidden=c.hidden, intermediate_size=c.intermediate_size, act=c.activation())
    norm = RMSNorm(size=c.hidden, eps=c.number("rms_norm_eps"))
    model = llama_decoder(c, attention, mlp, norm, positions=positions)
    assert model.head is not None, "decoders have a head"
    return replace(model, head=replace(model.head, unit_rows=model.embed.vocab == _VOCAB_2))
