"""Decoder of Aria: Llama's attention, and in each layer routed experts beside shared ones.

Source: transformers modeling_aria.py; arXiv:2410.05993. The experts of a layer are one tensor for each projection,
[num_experts, inputs, outputs].
"""

from collections.abc import Mapping
from typing import Any

from engine.models.config import Config
from engine.models.decoder import llama_decoder
from engine.models.parts import MLP, Attention, Experts, Model, RMSNorm, Stacked
from engine.models.rope import rope

ARCHITECTURES = ("AriaTextForCausalLM",)

_DEFAULTS: dict[str, Any] = {
    **{"hidden_size": 4096, "intermediate_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32},
    **{"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "vocab_size": 32_000, "hidden_act": "silu"},
    **{"moe_num_experts": 8, "moe_topk": 2, "moe_num_shared_experts": 2},
}
_NAMES = {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_topk"}


def declare(config: Mapping[str, Any]) -> Model:
    c = Config.of(config, _NAMES, **_DEFAULTS)
    positions, bias = rope(c, theta=10_000.0), c.flag("attention_bias")
    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        rope=positions,
        bias=(bias, bias),
    )
    shared = MLP(
        hidden=c.hidden,
        intermediate_size=c.intermediate_size * c.whole("moe_num_shared_experts"),
        act=c.activation(),
        bias=c.flag("mlp_bias"),
        name="shared_experts",
    )
    num_experts, top_k = c.experts()
    experts = Experts(
        hidden=c.hidden,
        intermediate_size=c.intermediate_size,
        num_experts=num_experts,
        top_k=top_k,
        scores="softmax_chosen",
        router="router",
        gate="fc1",
        up="fc1",
        down="fc2",
        stacked=Stacked(weight="experts.{}.weight", transposed=True),
        shared=shared,
    )
    norm = RMSNorm(size=c.hidden, eps=c.number("rms_norm_eps"))
    return llama_decoder(c, attention, experts, norm, positions=positions)
