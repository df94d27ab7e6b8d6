"""StableLM: Llama blocks with layer norms and partial rotation; StableLM 2 12B computes attention and MLP in parallel.

Source: transformers modeling_stablelm.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.models.config import Config
from engine.models.decoder import llama_decoder
from engine.models.parts import MLP, Attention, LayerNorm, Model, Parallel, ResidualBlock, named
from engine.models.rope import rope

ARCHITECTURES = ("StableLmForCausalLM", "StableLMEpochForCausalLM")

_DEFAULTS: dict[str, Any] = {"hidden_act": "silu", "layer_norm_eps": 1e-5, "max_position_embeddings": 4096}


def declare(config: Mapping[str, Any]) -> Model:
    c = Config.of(config, _names(config), **_DEFAULTS)
    eps, positions = c.number("layer_norm_eps"), rope(c, partial=0.25)
    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        rope=positions,
        bias=(c.flag("use_qkv_bias"), False),
        qk_norm=LayerNorm(size=c.head_dim, eps=eps, bias=False) if c.flag("qk_layernorm") else None,
        qk_norm_span="own",
        qk_norm_names=("q_layernorm.norms", "k_layernorm.norms"),
        qk_norm_listed=True,
    )
    mlp = MLP(hidden=c.hidden, intermediate_size=c.intermediate_size, act=c.activation())
    norm = LayerNorm(size=c.hidden, eps=eps)
    model = llama_decoder(c, attention, mlp, norm, positions=positions)
    if not c.flag("use_parallel_residual"):
        return model
    block = (ResidualBlock(before=named(norm, "input_layernorm"), body=Parallel(bodies=(attention, mlp))),)
    return replace(model, blocks=(block,) * c.layers)


def _names(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the names that the first exporters gave to some keys."""
    old = {"layer_norm_eps": "norm_eps", "partial_rotary_factor": "rope_pct"}
    return {key: name for key, name in old.items() if name in config}
