"""gpt-oss: attention with sinks and biases, windows in every second layer, and experts with biases.

Source: transformers modeling_gpt_oss.py; arXiv:2508.10925. The experts of a layer are one tensor for each projection,
[num_experts, inputs, outputs], in which the outputs of gate and up alternate. Quantized tensors (mxfp4) are
[num_experts, outputs, …].
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.api.errors import CheckpointError
from engine.models.config import Config
from engine.models.decoder import llama_decoder
from engine.models.parts import Attention, Experts, Model, RMSNorm, Stacked
from engine.models.rope import rope

ARCHITECTURES = ("GptOssForCausalLM",)

ALPHA = 1.702  # of gate · sigmoid(ALPHA · gate), which is quick_gelu
_DEFAULTS: dict[str, Any] = {
    "attention_bias": True,
    "head_dim": 64,
    "max_position_embeddings": 131_072,
    "num_experts": 128,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "sliding_window": 128,
    "swiglu_alpha": ALPHA,
    "swiglu_limit": 7.0,
}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def declare(config: Mapping[str, Any]) -> Model:
    c = Config.of(config, **_DEFAULTS)
    if c.values.get("rope_parameters") is None and c.values.get("rope_scaling") is None:
        c = replace(c, values={**c.values, "rope_parameters": _YARN})
    if c.number("swiglu_alpha") != ALPHA:
        raise CheckpointError(f"config.json: swiglu_alpha is {c.number('swiglu_alpha'):g}; supported is {ALPHA}")
    positions, bias = rope(c, theta=150_000.0), c.flag("attention_bias")
    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        rope=positions,
        bias=(bias, bias),
        sinks=True,
    )
    alternating = tuple("full_attention" if index % 2 else "sliding_attention" for index in range(c.layers))
    kinds = c.layer_types(alternating)
    layers = [replace(attention, window=c.window() if kind == "sliding_attention" else None) for kind in kinds]
    num_experts, top_k = c.experts()
    experts = Experts(
        hidden=c.hidden,
        intermediate_size=c.intermediate_size,
        num_experts=num_experts,
        top_k=top_k,
        scores="softmax_chosen",
        act="quick_gelu",
        limit=c.positive("swiglu_limit"),
        up_offset=1.0,
        bias=True,
        router="router",
        router_bias=True,
        gate="gate_up_proj",
        up="gate_up_proj",
        interleaved=True,
        stacked=Stacked(weight="experts.{}", others="experts.{}_{}", transposed=True),
    )
    return llama_decoder(c, layers, experts, RMSNorm(size=c.hidden, eps=c.number("rms_norm_eps")), positions=positions)
