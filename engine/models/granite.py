"""Granite 3, dense or with experts: Llama blocks with multipliers of embeddings, attention, residuals and logits.

Source: transformers modeling_granite.py, modeling_granitemoe.py, modeling_granitemoeshared.py. Each projection of all
experts is one tensor; the shared expert is an MLP next to them.
"""

from collections.abc import Mapping
from typing import Any

from engine.models.config import Config
from engine.models.decoder import Feed, llama_decoder
from engine.models.parts import MLP, Attention, Experts, Model, Parallel, RMSNorm, Stacked
from engine.models.rope import rope

ARCHITECTURES = ("GraniteForCausalLM", "GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM")

_DEFAULTS: dict[str, Any] = {
    "attention_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "hidden_act": "silu",
    "logits_scaling": 1.0,
    "max_position_embeddings": 2048,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "residual_multiplier": 1.0,
    "rms_norm_eps": 1e-6,
}

_STACKED: dict[str, Any] = {"gate": "input_linear", "up": "input_linear", "down": "output_linear"}


def declare(config: Mapping[str, Any]) -> Model:
    c = Config.of(config, **_DEFAULTS)
    is_dense = config["architectures"][0] == "GraniteForCausalLM"
    positions = rope(c)
    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        rope=positions,
        scale=c.number("attention_multiplier"),
        bias=(c.flag("attention_bias"), c.flag("attention_bias")),
    )
    mlp = MLP(hidden=c.hidden, intermediate_size=c.intermediate_size, act=c.activation(), bias=c.flag("mlp_bias"))
    return llama_decoder(
        c,
        attention,
        mlp if is_dense else granite_experts(c),
        RMSNorm(size=c.hidden, eps=c.number("rms_norm_eps")),
        positions=positions,
        residual=c.number("residual_multiplier"),
        embedding=c.number("embedding_multiplier"),
        logits=1.0 / c.positive("logits_scaling"),
    )


def granite_experts(c: Config) -> Feed:
    """Return the experts. A shared MLP, if the model has one, gets the same input."""
    num_experts, top_k = c.experts()
    experts = Experts(
        hidden=c.hidden,
        intermediate_size=c.intermediate_size,
        num_experts=num_experts,
        top_k=top_k,
        scores="softmax_chosen",
        act=c.activation(),
        router="router.layer",
        stacked=Stacked(weight="{}.weight"),
        name="block_sparse_moe",
        **_STACKED,
    )
    shared = 0 if c.values.get("shared_intermediate_size") is None else c.whole("shared_intermediate_size", least=0)
    return Parallel(bodies=(experts, shared_mlp(c))) if shared else experts


def shared_mlp(c: Config) -> MLP:
    size = c.whole("shared_intermediate_size")
    return MLP(hidden=c.hidden, intermediate_size=size, act=c.activation(), name="shared_mlp", **_STACKED)
