"""Ministral: Mistral with sliding windows in some layers. Ministral 3: Mistral with queries scaled by position.

Source: transformers modeling_ministral.py, modeling_ministral3.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.models.config import Config
from engine.models.decoder import llama_decoder
from engine.models.parts import MLP, Attention, Model, QueryScale, RMSNorm
from engine.models.rope import rope

ARCHITECTURES = ("MinistralForCausalLM", "Ministral3ForCausalLM")

_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
}
_YARN = {"type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16_384, "mscale": 1.0,
         "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}  # fmt: skip
_THIRD = {**_DEFAULTS, "head_dim": 128, "max_position_embeddings": 262_144, "rms_norm_eps": 1e-5,
          "sliding_window": None}  # fmt: skip


def declare(config: Mapping[str, Any]) -> Model:
    third = config["architectures"][0] == "Ministral3ForCausalLM"
    c = Config.of(config, **(_THIRD if third else _DEFAULTS))
    if third and not any(c.values.get(key) for key in ("rope_parameters", "rope_scaling")):
        c = replace(c, values={**c.values, "rope_parameters": _YARN})
    positions = rope(c)
    attention = Attention(hidden=c.hidden, heads=c.heads, kv_heads=c.kv_heads, head_dim=c.head_dim, rope=positions)
    if third:
        attention = replace(attention, query_scale=_query_scale(c))
    usual = "full_attention" if c.whole_or_none("sliding_window") is None else "sliding_attention"
    kinds = (usual,) * c.layers if third else c.layer_types((usual,) * c.layers)
    layers = [replace(attention, window=c.window() if kind == "sliding_attention" else None) for kind in kinds]
    mlp = MLP(hidden=c.hidden, intermediate_size=c.intermediate_size, act=c.activation())
    return llama_decoder(c, layers, mlp, RMSNorm(size=c.hidden, eps=c.number("rms_norm_eps")), positions=positions)


def _query_scale(c: Config) -> QueryScale | None:
    """Return the scale by the keys of the rotary settings."""
    settings = Config({**(c.values.get("rope_parameters") or {}), **(c.values.get("rope_scaling") or {})})
    beta = settings.number_or_none("llama_4_scaling_beta")
    if not beta:
        return None
    return QueryScale(scale=beta, length=settings.whole("original_max_position_embeddings"))
