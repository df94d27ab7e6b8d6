"""ERNIE 4.5 (dense) and Helium: Llama blocks with interleaved rotation.

Source: transformers modeling_ernie4_5.py, modeling_helium.py.
"""

from collections.abc import Mapping
from typing import Any

from engine.models.config import Config
from engine.models.decoder import llama_decoder
from engine.models.parts import MLP, Attention, Model, RMSNorm
from engine.models.rope import rope

ARCHITECTURES = ("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM", "HeliumForCausalLM")
"""The first exported checkpoints have the second name."""

_ERNIE = {
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
_HELIUM = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-8}


def declare(config: Mapping[str, Any]) -> Model:
    is_helium = config["architectures"][0] == "HeliumForCausalLM"
    defaults: dict[str, Any] = _HELIUM if is_helium else _ERNIE
    c = Config.of(config, head_dim=128, hidden_act="silu", **defaults)
    positions = rope(c, theta=100_000.0 if is_helium else 500_000.0, interleaved=True)
    bias = (c.flag("attention_bias"), False) if is_helium else (c.flag("use_bias"), c.flag("use_bias"))
    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        rope=positions,
        bias=bias,
    )
    mlp = MLP(
        hidden=c.hidden,
        intermediate_size=c.intermediate_size,
        act=c.activation(),
        bias=c.flag("mlp_bias" if is_helium else "use_bias"),
    )
    return llama_decoder(c, attention, mlp, RMSNorm(size=c.hidden, eps=c.number("rms_norm_eps")), positions=positions)
