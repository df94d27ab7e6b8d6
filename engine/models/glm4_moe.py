"""GLM-4.5 to 4.7, Solar Open, dots.llm1 and K-EXAONE: Llama blocks with DeepSeek-V3's experts.

They differ in their attention: rotation of half a head (GLM), norms of q and k, windows, layers without positions
(K-EXAONE). Source: transformers modeling_glm4_moe.py, modeling_solar_open.py, modeling_dots1.py and
modeling_exaone_moe.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.models.config import Config
from engine.models.decoder import layers_of_heads, llama_decoder, with_predictor
from engine.models.exaone import window_kinds
from engine.models.grouped_experts import dense_first, grouped_experts
from engine.models.parts import MLP, Attention, Model, RMSNorm
from engine.models.rope import rope

ARCHITECTURES = ("Glm4MoeForCausalLM", "SolarOpenForCausalLM", "Dots1ForCausalLM", "ExaoneMoeForCausalLM")

_GLM = {
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "norm_topk_prob": True,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "Glm4MoeForCausalLM": {**_GLM, "first_k_dense_replace": 1},
    "SolarOpenForCausalLM": {**_GLM, "intermediate_size": 10_240},  # unused: no layer is dense
    "Dots1ForCausalLM": {"max_position_embeddings": 2048, "max_window_layers": 62, "rms_norm_eps": 1e-6,
                         "sliding_window": 4096, "use_qk_norm": True},
    "ExaoneMoeForCausalLM": {"first_k_dense_replace": 1, "max_position_embeddings": 2048, "norm_topk_prob": True,
                             "num_key_value_heads": 32, "num_shared_experts": 1, "rms_norm_eps": 1e-5,
                             "routed_scaling_factor": 2.5, "sliding_window": 4096, "use_qk_norm": True},
}  # fmt: skip
_COMMON = {"first_k_dense_replace": 0, "hidden_act": "silu", "routed_scaling_factor": 1.0}


def declare(config: Mapping[str, Any]) -> Model:
    architecture = config["architectures"][0]
    is_exaone = architecture == "ExaoneMoeForCausalLM"
    names = {} if is_exaone else {"num_experts": "n_routed_experts"}
    c = Config.of(config, names, **{**_COMMON, **_DEFAULTS[architecture]})
    is_glm = architecture == "Glm4MoeForCausalLM"
    positions = rope(
        c, theta=1e6 if architecture == "SolarOpenForCausalLM" else 10_000.0, partial=0.5 if is_glm else 1.0
    )
    norm = RMSNorm(size=c.hidden, eps=c.number("rms_norm_eps"))
    has_qk_norm = c.flag("use_qk_norm") and architecture != "SolarOpenForCausalLM"
    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        rope=positions,
        bias=(c.flag("attention_bias"), c.flag("attention_bias") and architecture == "Dots1ForCausalLM"),
        qk_norm=RMSNorm(size=c.head_dim, eps=norm.eps) if has_qk_norm else None,
    )
    experts = grouped_experts(c, "num_shared_experts" if is_exaone else "n_shared_experts")
    if is_exaone:
        experts = replace(experts, correction="e_score_correction_bias")
    mlp = MLP(hidden=c.hidden, intermediate_size=c.whole("intermediate_size"), act=c.activation())
    sparse = dense_first(c) if architecture != "SolarOpenForCausalLM" else (True,) * c.layers
    model = llama_decoder(
        c,
        _layers(c, attention, architecture),
        tuple(experts if has_experts else mlp for has_experts in sparse),
        norm,
        positions=positions,
    )
    # Layers beyond the last, and `mtp` in K-EXAONE, predict several tokens. `with_predictor` declares the layer of GLM.
    model = replace(model, unread=("mtp.", *layers_of_heads(c)))
    if not is_glm:
        return model
    return with_predictor(model, c, attention, experts, [("model.layers.{}.", "")], first=c.layers)


def _layers(c: Config, attention: Attention, architecture: str) -> tuple[Attention, ...]:
    match architecture:
        case "Dots1ForCausalLM":
            first = c.whole("max_window_layers", least=0)
            usual = tuple("sliding_attention" if index >= first else "full_attention" for index in range(c.layers))
            kinds = c.layer_types(usual if c.values.get("sliding_window") else ("full_attention",) * c.layers)
        case "ExaoneMoeForCausalLM":
            kinds = window_kinds(c)
        case _:
            return (attention,) * c.layers
    sliding = replace(attention, window=c.window())
    has_no_positions = architecture == "ExaoneMoeForCausalLM" and c.whole_or_none("sliding_window") is not None
    full = replace(attention, rope=None) if has_no_positions else attention
    return tuple(sliding if kind == "sliding_attention" else full for kind in kinds)
