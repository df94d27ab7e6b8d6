"""Mamba and Falcon Mamba: a mixer in each layer, no attention and no MLP.

Source: transformers modeling_mamba.py, modeling_falcon_mamba.py. Falcon Mamba normalises B, C and dt, without weights.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.api.errors import CheckpointError
from engine.models.config import Config
from engine.models.mamba2 import MAX_CONTEXT
from engine.models.parts import Embedding, Head, Mamba, Model, ResidualBlock, RMSNorm, named

ARCHITECTURES = ("FalconMambaForCausalLM", "MambaForCausalLM")

_DEFAULTS: dict[str, Any] = {
    "conv_kernel": 4,
    "expand": 2,
    "hidden_act": "silu",
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": MAX_CONTEXT,
    "mixer_rms_eps": 1e-6,
    "state_size": 16,
    "tie_word_embeddings": True,
    "time_step_rank": "auto",
    "use_conv_bias": True,
}


def declare(config: Mapping[str, Any]) -> Model:
    c = Config.of(config, **_DEFAULTS)
    body = mixer(c)
    if config["architectures"][0] == "FalconMambaForCausalLM":
        body = with_norms(body, c.number("mixer_rms_eps"), weight=False)
    norm = RMSNorm(size=c.hidden, eps=c.number("layer_norm_epsilon"))
    return Model(
        embed=Embedding(vocab=c.whole("vocab_size"), hidden=c.hidden, name="embeddings"),
        blocks=((ResidualBlock(before=named(norm, "norm"), body=body),),) * c.layers,
        norm=named(norm, "norm_f"),
        head=Head(tied=c.flag("tie_word_embeddings")),
        max_context=c.whole("max_position_embeddings"),
        root="backbone",
    )


def mixer(c: Config) -> Mamba:
    """Return the recurrent part. Without intermediate_size, it has expand · hidden_size channels."""
    if c.activation() != "silu":
        raise CheckpointError(f"config.json: {c.name('hidden_act')} is {c.activation()}; Mamba mixers have silu")
    return Mamba(
        hidden=c.hidden,
        channels=c.whole_or_none("intermediate_size") or c.whole("expand") * c.hidden,
        dt_rank=-(-c.hidden // 16) if c.values.get("time_step_rank") == "auto" else c.whole("time_step_rank"),
        state=c.whole("state_size"),
        conv=c.whole("conv_kernel", least=2),
        bias=c.flag("use_bias"),
        conv_bias=c.flag("use_conv_bias"),
    )


def with_norms(part: Mamba, eps: float, *, weight: bool) -> Mamba:
    """Add norms of dt, B and C."""
    sizes = {"dt_layernorm": part.dt_rank, "b_layernorm": part.state, "c_layernorm": part.state}
    norms = (RMSNorm(size=size, eps=eps, weight=weight, name=name) for name, size in sizes.items())
    return replace(part, norms=tuple(norms))
