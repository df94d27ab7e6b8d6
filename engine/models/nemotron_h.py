"""Nemotron-H: each layer is one of a Mamba-2 mixer, attention without positions, an MLP, or experts.

Source: transformers modeling_nemotron_h.py. Old files name the layers with the letters of hybrid_override_pattern. Time
steps are at least time_step_min; time_step_limit is ignored.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.api.errors import CheckpointError
from engine.models import mamba2
from engine.models.config import MAX_LAYERS, Config, shown
from engine.models.grouped_experts import grouped_experts
from engine.models.mamba2 import ATTENTION, RECURRENT
from engine.models.parts import MLP, Attention, Body, Embedding, Experts, Head, Model, ResidualBlock, RMSNorm, named

ARCHITECTURES = ("NemotronHForCausalLM",)
LETTERS = {"M": RECURRENT, "*": ATTENTION, "-": "mlp", "E": "moe"}

_DEFAULTS: dict[str, Any] = {
    "conv_kernel": 4,
    "expand": 2,
    "head_dim": 128,
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": 4096,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 128,
    "mlp_hidden_act": "relu2",
    "n_groups": 8,
    "n_group": 1,
    "norm_topk_prob": True,
    "num_key_value_heads": 8,
    "routed_scaling_factor": 1.0,
    "ssm_state_size": 128,
    "time_step_min": 0.001,
    "topk_group": 1,
    "use_conv_bias": True,
}


def declare(config: Mapping[str, Any]) -> Model:
    c = Config.of(config, {"num_experts": "n_routed_experts"}, **_DEFAULTS)
    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        rope=None,
        bias=(c.flag("attention_bias"), c.flag("attention_bias")),
        name="mixer",
    )
    kinds = _kinds(c)
    bodies: dict[str, Body] = {ATTENTION: attention}
    if RECURRENT in kinds:
        bodies[RECURRENT] = mamba2.mixer(_mixer_config(c))
    if "mlp" in kinds:
        bodies["mlp"] = _mlp(c, c.intermediate_size, "mixer")
    if "moe" in kinds:
        bodies["moe"] = _experts(c, len(kinds))
    norm = RMSNorm(size=c.hidden, eps=c.number("layer_norm_epsilon"))
    return Model(
        embed=Embedding(vocab=c.whole("vocab_size"), hidden=c.hidden, name="embeddings"),
        blocks=tuple((ResidualBlock(before=named(norm, "norm"), body=bodies[kind]),) for kind in kinds),
        norm=named(norm, "norm_f"),
        head=Head(tied=c.flag("tie_word_embeddings")),
        max_context=c.whole("max_position_embeddings"),
        root="backbone",
        unread=("mtp.",),
    )


def _mixer_config(c: Config) -> Config:
    """Return the configuration of the mixers, with the keys of Mamba-2. The key head_dim belongs to attention."""
    names = {
        "num_heads": "mamba_num_heads",
        "head_dim": "mamba_head_dim",
        "state_size": "ssm_state_size",
        "hidden_act": "mamba_hidden_act",
        "use_bias": "mamba_proj_bias",
    }
    values = {**c.values, **{key: c.values.get(name) for key, name in names.items()}}
    heads, head_dim = (Config(values, names).whole(key) for key in ("num_heads", "head_dim"))
    # The original ignores `expand` and multiplies the number of heads by their size.
    if heads * head_dim % c.hidden == 0:
        values["expand"] = heads * head_dim // c.hidden
    values["time_step_limit"] = [c.number("time_step_min"), math.inf]
    return Config(values, names)


def _mlp(c: Config, size: int, name: str) -> MLP:
    act, bias = c.activation("mlp_hidden_act"), c.flag("mlp_bias")
    return MLP(hidden=c.hidden, intermediate_size=size, act=act, bias=bias, gate=None, name=name)


def _experts(c: Config, layers: int) -> Experts:
    """Return the experts, which have no gate. Raises CheckpointError for those in a latent space."""
    if c.values.get("moe_latent_size") is not None:
        raise CheckpointError("config.json: moe_latent_size: experts in a latent space are not supported yet")
    if c.flag("mlp_bias"):
        raise CheckpointError("config.json: mlp_bias: experts with biases are not supported yet")
    values = {**c.values, "hidden_act": c.values.get("mlp_hidden_act"), "num_hidden_layers": layers}
    routed = grouped_experts(replace(c, values=values), shared="")
    shared = _mlp(c, c.whole("moe_shared_expert_intermediate_size"), "shared_experts")
    return replace(routed, gate=None, shared=shared, name="mixer")


def _kinds(c: Config) -> tuple[str, ...]:
    """Return the kind of each layer."""
    given, pattern = (
        c.values.get("layer_types") or c.values.get("layers_block_type"),
        c.values.get("hybrid_override_pattern"),
    )
    if given is None and isinstance(pattern, str):
        given = [LETTERS.get(letter, letter) for letter in pattern]
    if not isinstance(given, list) or not 1 <= len(given) <= MAX_LAYERS:
        raise CheckpointError(
            f"config.json: layers_block_type is {shown(given)}; it must name the kind of each layer, as "
            "hybrid_override_pattern does in old files"
        )
    sized = replace(c, values={**c.values, "layer_types": given, "num_hidden_layers": len(given)})
    return mamba2.layer_kinds(sized, "mlp", "moe")
