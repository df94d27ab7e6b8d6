"""Gemma 4 (text): heads of two sizes, keys and values that the last layers share, and per-layer embeddings.

Source: transformers modeling_gemma4.py. Scores are not scaled; queries, keys and values are normalised. Full layers
have rotary positions in some pairs of their dimensions only; in large models their values are the keys before the norm.
The larger models have experts beside each MLP.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.api.errors import CheckpointError
from engine.models.config import Config, shown
from engine.models.parts import (
    MLP,
    Attention,
    Block,
    Embedding,
    Experts,
    Head,
    LayerInput,
    LayerInputs,
    Model,
    Parallel,
    ResidualBlock,
    RMSNorm,
    Stacked,
    named,
)
from engine.models.rope import rope

ARCHITECTURES = ("Gemma4ForCausalLM",)
FULL, WINDOWED = "full_attention", "sliding_attention"

_DEFAULTS: dict[str, Any] = {
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 256,
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 4,
    "num_kv_shared_layers": 0,
    "rms_norm_eps": 1e-6,
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "vocab_size_per_layer_input": 262_144,
}
_ROPES = {
    WINDOWED: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
UNREAD = ("k_proj", "v_proj", "k_norm", "v_norm")  # tensors of layers that share keys and values


def declare(config: Mapping[str, Any]) -> Model:
    c = Config.of(config, **_DEFAULTS)
    c = replace(c, values={**c.values, "rope_parameters": c.values.get("rope_parameters") or _ROPES})
    if c.values.get("use_bidirectional_attention") == "all":
        raise CheckpointError('config.json: use_bidirectional_attention is "all"; supported are null and "vision"')
    kinds = (*layer_kinds(c, 6)[:-1], FULL)  # the last layer is full in any case
    shared = shared_layers(c, kinds)
    eps, act, bias = c.number("rms_norm_eps"), c.activation("hidden_activation"), c.flag("attention_bias")
    norm = RMSNorm(size=c.hidden, eps=eps)

    def attention(kind: str) -> Attention:
        own = _of_kind(c, kinds, kind)
        joined = kind == FULL and c.flag("attention_k_eq_v")
        return Attention(
            hidden=c.hidden,
            heads=own.heads,
            kv_heads=own.kv_heads,
            head_dim=own.head_dim,
            rope=rope(own, theta=1e6 if kind == FULL else 1e4, kind=kind),
            scale=1.0,
            bias=(bias, bias),
            qk_norm=RMSNorm(size=own.head_dim, eps=eps),
            v_norm=RMSNorm(size=own.head_dim, eps=eps, weight=False, name="v_norm"),
            window=c.whole("sliding_window") if kind == WINDOWED else None,
            sources=("q_proj", "k_proj", "k_proj" if joined else "v_proj", "o_proj"),
        )

    attentions = {kind: attention(kind) for kind in dict.fromkeys(kinds)}
    experts = _experts(c, eps, act) if c.flag("enable_moe_block") else None
    wide, width = c.flag("use_double_wide_mlp"), 0
    if c.values["hidden_size_per_layer_input"] is not None:
        width = c.whole("hidden_size_per_layer_input", least=0)

    def block(layer: int, kind: str) -> Block:
        is_shared = layer >= c.layers - shared
        size = c.intermediate_size * (2 if wide and is_shared else 1)
        mixer = ResidualBlock(
            before=named(norm, "input_layernorm"),
            body=replace(attentions[kind], shared_kv=is_shared),
            after=named(norm, "post_attention_layernorm"),
        )
        feed = _feed(MLP(hidden=c.hidden, intermediate_size=size, act=act), experts, norm)
        if not width:
            return mixer, replace(feed, multiplier="layer_scalar")
        last = ResidualBlock(
            body=LayerInput(hidden=c.hidden, width=width, layer=layer, act=act),
            after=named(norm, "post_per_layer_input_norm"),
            multiplier="layer_scalar",
        )
        return mixer, feed, last

    return Model(
        embed=Embedding(vocab=c.whole("vocab_size"), hidden=c.hidden, scale=c.hidden**0.5),
        blocks=tuple(block(layer, kind) for layer, kind in enumerate(kinds)),
        norm=named(norm, "norm"),
        head=Head(tied=c.flag("tie_word_embeddings"), softcap=c.number_or_none("final_logit_softcapping")),
        max_context=c.whole("max_position_embeddings"),
        unread=unread_tensors(c, shared),
        layer_inputs=layer_inputs(c, RMSNorm(size=width, eps=eps, name="per_layer_projection_norm")) if width else None,
    )


def _feed(mlp: MLP, experts: Experts | None, norm: RMSNorm) -> ResidualBlock:
    before, after = named(norm, "pre_feedforward_layernorm"), named(norm, "post_feedforward_layernorm")
    if experts is None:
        return ResidualBlock(before=before, body=mlp, after=after)
    both = Parallel(
        bodies=(mlp, experts),
        norms=(before, named(norm, f"{before.name}_2")),
        after=tuple(named(norm, f"{after.name}_{number}") for number in (1, 2)),
    )
    return ResidualBlock(body=both, after=after)


def _experts(c: Config, eps: float, act: str) -> Experts:
    """Return the experts next to an MLP. Their router reads the hidden states with a norm of its own."""
    count, chosen = replace(c, values={**c.values, "num_experts_per_tok": c.values.get("top_k_experts")}).experts()
    return Experts(
        hidden=c.hidden,
        intermediate_size=c.whole("moe_intermediate_size"),
        num_experts=count,
        top_k=chosen,
        scores="softmax_chosen",
        act=act,
        router="router.proj",
        router_norm=RMSNorm(size=c.hidden, eps=eps, name="router.scale", last=""),
        logits_scale=c.hidden**-0.5,
        expert_scales="router.per_expert_scale",
        gate="gate_up_proj",
        up="gate_up_proj",
        stacked=Stacked(weight="experts.{}"),
        name="",
    )


def layer_kinds(c: Config, pattern: int) -> tuple[str, ...]:
    """Return the kind of each layer. By default, every `pattern`-th layer is full."""
    usual = tuple(WINDOWED if (i + 1) % pattern else FULL for i in range(c.layers))
    return c.layer_types(usual)


def shared_layers(c: Config, kinds: tuple[str, ...]) -> int:
    """Return the number of last layers without keys and values of their own."""
    count = c.whole("num_kv_shared_layers", least=0)
    if count >= c.layers:
        raise CheckpointError(
            f"config.json: num_kv_shared_layers is {count}, and there are {c.layers} layers; some must have keys"
        )
    missing = sorted(set(kinds[c.layers - count :]) - set(kinds[: c.layers - count]))
    if missing:
        raise CheckpointError(
            f"config.json: num_kv_shared_layers is {count}, but no layer before the last {count} is of the kind "
            f"{missing[0]}, whose keys and values they share"
        )
    return count


def unread_tensors(c: Config, shared: int) -> tuple[str, ...]:
    """Return the tensors of layers that share keys and values. Checkpoints have them, and nothing reads them."""
    return tuple(f"layers.{layer}.self_attn.{name}" for layer in range(c.layers - shared, c.layers) for name in UNREAD)


def layer_inputs(c: Config, norm: RMSNorm) -> LayerInputs:
    """Return the per-layer embeddings. Their projection is multiplied by 1/√hidden before the norm, which equals a norm
    with another eps."""
    return LayerInputs(
        vocab=c.whole("vocab_size_per_layer_input"),
        layers=c.layers,
        width=norm.size,
        scale=norm.size**0.5,
        factor=2.0**-0.5,
        norm=replace(norm, eps=norm.eps * c.hidden),
    )


def _of_kind(c: Config, kinds: tuple[str, ...], kind: str) -> Config:
    """Return the settings of layers of this kind. transformers writes those of each layer in per_layer_config."""
    if kind == WINDOWED:
        return c
    more: dict[str, Any] = {"head_dim": c.values["global_head_dim"]}
    if c.flag("attention_k_eq_v") and c.values.get("num_global_key_value_heads") is not None:
        more["num_key_value_heads"] = c.values["num_global_key_value_heads"]
    layers = c.values.get("per_layer_config")
    if isinstance(layers, dict):
        own = {int(key): value for key, value in layers.items() if str(key).isdigit()}  # keys may have leading zeros
        found = [own.get(layer) or {} for layer, one in enumerate(kinds) if one == kind]
        if any(one != found[0] for one in found) or not isinstance(found[0], dict):
            raise CheckpointError(
                f"config.json: per_layer_config differs between layers of the kind {kind}: {shown(found)}"
            )
        more |= found[0]
    return replace(c, values={**c.values, **more})
