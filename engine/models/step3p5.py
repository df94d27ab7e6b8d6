"""Step-3.5-Flash: windows with more heads in most layers, a gate for each head, and DeepSeek-V3's experts beside a
shared one.

The last layers clamp silu(gate x) to a maximum, and up x to a range. silu increases above 0, so the maximum of its
output is declared as a maximum of its input. Source: transformers modeling_step3p7.py, the text model of
Step-3.7-Flash. Layers beyond the last one are prediction heads with their own norms and output matrices. A head reads
the hidden states of the previous head before this norm (vLLM, step3p5_mtp.py; SGLang, step3p5_mtp.py).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from engine.api.errors import CheckpointError
from engine.models.config import Config, shown
from engine.models.decoder import llama_decoder, with_predictor
from engine.models.parts import MLP, Attention, Experts, Model, Parallel, RMSNorm, Stacked
from engine.models.rope import rope

ARCHITECTURES = ("Step3p5ForCausalLM",)
FULL, WINDOWED = "full_attention", "sliding_attention"

_NAMES = {"num_key_value_heads": "num_attention_groups", "num_experts": "moe_num_experts",
          "num_experts_per_tok": "moe_top_k"}  # fmt: skip
_DEFAULTS: dict[str, Any] = {
    "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 11_264,
    "max_position_embeddings": 128_000, "moe_intermediate_size": 1280, "moe_router_activation": "softmax",
    "moe_router_scaling_factor": 1.0, "norm_expert_weight": True, "num_experts": 288, "num_experts_per_tok": 8,
    "num_key_value_heads": 8, "num_nextn_predict_layers": 0, "rms_norm_eps": 1e-5, "share_expert_dim": 1280,
    "zero_centered": True,
}  # fmt: skip
_LISTS = ("layer_types", "partial_rotary_factors", "rope_theta", "swiglu_limits", "swiglu_limits_shared",
          "use_rope_layers")  # fmt: skip


def declare(config: Mapping[str, Any]) -> Model:
    whole = Config.of(config, _NAMES, **_DEFAULTS)
    c = _cut(whole, 0, whole.layers)  # lists have entries of the layers that predict several tokens, too
    if not all(_each(c, "use_rope_layers", True)) or c.values["moe_router_activation"] != "sigmoid":
        raise CheckpointError(
            f"config.json: use_rope_layers is {shown(c.values.get('use_rope_layers'))} and moe_router_activation "
            f"{shown(c.values['moe_router_activation'])}; supported are true in all layers, and sigmoid"
        )
    experts = _layers_with_experts(c)
    attentions, feeds = _layers(c, [index in experts for index in range(c.layers)])
    kinds = c.layer_types((FULL,) * c.layers)
    longest = next((part.rope for part, kind in zip(attentions, kinds, strict=True) if kind == FULL), None)
    model = llama_decoder(c, attentions, feeds, _norm(c, c.hidden), positions=longest)
    heads = range(c.layers, c.layers + c.whole("num_nextn_predict_layers", least=0, most=64))
    model = replace(model, unread=tuple(f"layers.{index}." for index in heads))
    if not heads or any(len(value) < heads.stop for value in _lists(whole).values()):
        return model
    attentions, feeds = _layers(_cut(whole, heads.start, len(heads)), [index in experts for index in heads])
    return with_predictor(
        model,
        c,
        attentions[0],
        feeds[0],
        [("model.layers.{}.", ""), ("model.layers.{}.transformer.", "")],
        first=heads.start,
        further=list(zip(attentions[1:], feeds[1:], strict=True)),
        before_norm=True,
        further_states="before norm",
        own_output="shared_head.output",
        skips_first=False,
    )


def _lists(c: Config) -> dict[str, list[Any]]:
    return {key: value for key in _LISTS if isinstance(value := c.values.get(key), list)}


def _cut(c: Config, first: int, count: int) -> Config:
    """Return the configuration of the layers from `first` to `first + count - 1`."""
    cut = {key: value[first : first + count] for key, value in _lists(c).items()}
    return replace(c, values={**c.values, **cut, "num_hidden_layers": count})


def _layers(c: Config, sparse: Sequence[bool]) -> tuple[list[Attention], list[MLP | Parallel]]:
    """Return the attention of each layer, and its MLP or experts. sparse: whether it has experts."""
    attentions = [_attention(c, index, kind) for index, kind in enumerate(c.layer_types((FULL,) * c.layers))]
    dense = MLP(hidden=c.hidden, intermediate_size=c.intermediate_size, act="silu")
    limits = zip(sparse, _each(c, "swiglu_limits", 0), _each(c, "swiglu_limits_shared", 0), strict=True)
    return attentions, [
        _experts(c, _clamp(own), _clamp(shared)) if has_experts else replace(dense, clamp=_clamp(shared))
        for has_experts, own, shared in limits
    ]


def _attention(c: Config, index: int, kind: str) -> Attention:
    heads = c.heads
    other = c.values.get("attention_other_setting") or {}
    if kind == WINDOWED and isinstance(other, dict) and other.get("num_attention_heads") is not None:
        heads = Config(other).whole("num_attention_heads")
    if heads % c.kv_heads:
        raise CheckpointError(
            f"config.json: layers of {kind} have {heads} heads and {c.kv_heads} KV heads (num_attention_groups); the "
            "first must be a multiple of the second"
        )
    scaled = c.values.get("yarn_only_types")
    settings = {
        "rope_theta": _each(c, "rope_theta", 10_000.0)[index],
        "partial_rotary_factor": _each(c, "partial_rotary_factors", 1.0)[index],
        "rope_scaling": None if isinstance(scaled, list) and kind not in scaled else c.values.get("rope_scaling"),
    }
    gated = c.flag("use_head_wise_attn_gate")
    return Attention(
        hidden=c.hidden,
        heads=heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        rope=rope(replace(c, values={**c.values, **settings})),
        bias=(c.flag("attention_bias"),) * 2,
        window=c.window() if kind == WINDOWED else None,
        qk_norm=_norm(c, c.head_dim),
        gated=gated,
        gate_source="g_proj" if gated else "",
        gate_per_head=gated,
    )


def _norm(c: Config, size: int) -> RMSNorm:
    return RMSNorm(size=size, eps=c.number("rms_norm_eps"), offset=1.0 if c.flag("zero_centered") else 0.0)


def _experts(c: Config, clamp: tuple[float, float] | None, shared_clamp: tuple[float, float] | None) -> Parallel:
    count, top_k = c.experts()
    experts = Experts(
        hidden=c.hidden,
        intermediate_size=c.whole("moe_intermediate_size"),
        num_experts=count,
        top_k=top_k,
        scores="sigmoid",
        act="silu",
        clamp=clamp,
        correction="router_bias" if c.flag("use_moe_router_bias") else "",
        normalized=c.flag("norm_expert_weight"),
        weight_scale=c.positive("moe_router_scaling_factor"),
        stacked=Stacked(weight="{}.weight"),
        name="moe",
    )
    shared = MLP(
        hidden=c.hidden,
        intermediate_size=c.whole("share_expert_dim"),
        act="silu",
        clamp=shared_clamp,
        name="share_expert",
    )
    return Parallel(bodies=(experts, shared))


def _layers_with_experts(c: Config) -> frozenset[int]:
    """Return the numbers of the layers in moe_layers_enum, which separates them by commas; by default, all but the
    first three."""
    given = c.values.get("moe_layers_enum")
    if given is None:
        return frozenset(range(3, c.layers))
    try:
        return frozenset(
            int(one) for one in (given.split(",") if isinstance(given, str) else given) if str(one).strip()
        )
    except (TypeError, ValueError):
        raise CheckpointError(
            f"config.json: moe_layers_enum is {shown(given)}; it must be numbers of layers, separated by commas"
        ) from None


def _each(c: Config, key: str, default: Any) -> list[Any]:
    """Return the value for each layer of a key that has a list of them, or one for all."""
    value = c.values.get(key)
    values = value if isinstance(value, list) else [default if value is None else value] * c.layers
    if len(values) != c.layers or not all(one is None or isinstance(one, int | float) for one in values):
        raise CheckpointError(f"config.json: {key} must be a number, or a list of one for each of {c.layers} layers")
    return values


def _clamp(limit: float | None) -> tuple[float, float] | None:
    """Return the maximum of gate x at which silu(gate x) is `limit`, and the maximum of up x. limit: 0 or null for
    none."""
    if not limit:
        return None
    if not 0 < limit < math.inf:
        raise CheckpointError(f"config.json: a limit in swiglu_limits is {limit!r}; it must be a number of at least 0")
    low, high = 0.0, limit + 1.0  # silu(limit + 1) > limit
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if middle / (1 + math.exp(-middle)) < limit else (low, middle)
    return high, float(limit)
