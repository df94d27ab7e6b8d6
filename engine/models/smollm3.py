"""SmolLM3: Llama blocks; every fourth layer has no positions.

Source: transformers modeling_smollm3.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.api.errors import CheckpointError
from engine.models.config import Config, shown
from engine.models.decoder import llama_decoder
from engine.models.parts import MLP, Attention, Model, RMSNorm
from engine.models.rope import rope

ARCHITECTURES = ("SmolLM3ForCausalLM",)

_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "no_rope_layer_interval": 4,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}


def declare(config: Mapping[str, Any]) -> Model:
    c = Config.of(config, **_DEFAULTS)
    positions, bias = rope(c, theta=2_000_000.0), c.flag("attention_bias")
    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        rope=positions,
        bias=(bias, bias),
    )
    rotated = _rotated(c)
    window = c.window() if c.flag("use_sliding_window") else None
    kinds = c.layer_types(tuple("full_attention" if one or window is None else "sliding_attention" for one in rotated))
    layers = [
        replace(attention, rope=positions if one else None, window=window if kind == "sliding_attention" else None)
        for one, kind in zip(rotated, kinds, strict=True)
    ]
    mlp = MLP(hidden=c.hidden, intermediate_size=c.intermediate_size, act=c.activation(), bias=c.flag("mlp_bias"))
    return llama_decoder(c, layers, mlp, RMSNorm(size=c.hidden, eps=c.number("rms_norm_eps")), positions=positions)


def _rotated(c: Config) -> tuple[bool, ...]:
    """Return whether each layer has rotary positions: its entry of no_rope_layers is 1."""
    interval = c.whole("no_rope_layer_interval")
    listed = c.values.get("no_rope_layers")
    if listed is None:
        return tuple((index + 1) % interval != 0 for index in range(c.layers))
    if not isinstance(listed, list) or len(listed) != c.layers or not all(one in (0, 1) for one in listed):
        raise CheckpointError(
            f"config.json: no_rope_layers is {shown(listed)}; it must be 0 or 1 for each of the {c.layers} layers"
        )
    return tuple(map(bool, listed))
