"""Gemma 3n (text): hidden states in several streams (AltUp), a projection of low rank beside each attention (LAuReL),
sparse activations, shared keys and values, and per-layer embeddings.

Source: transformers modeling_gemma3n.py; arXiv:2301.13310 (AltUp) and arXiv:2411.07501 (LAuReL). Scores are not scaled;
queries, keys and values are normalised. The vectors of a layer are added to all streams but the first.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.api.errors import CheckpointError
from engine.models.config import Config, shown
from engine.models.gemma4 import FULL, layer_inputs, layer_kinds, shared_layers, unread_tensors
from engine.models.parts import (
    MLP,
    Attention,
    Block,
    Embedding,
    Head,
    LayerInput,
    LowRank,
    Model,
    Parallel,
    ResidualBlock,
    RMSNorm,
    Streams,
    named,
)
from engine.models.rope import local_rope, rope

ARCHITECTURES = ("Gemma3nForCausalLM",)

_DEFAULTS: dict[str, Any] = {
    "altup_active_idx": 0,
    "altup_correct_scale": True,
    "altup_num_inputs": 4,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 256,
    "intermediate_size": 16_384,
    "laurel_rank": 64,
    "max_position_embeddings": 32_768,
    "num_key_value_heads": 2,
    "num_kv_shared_layers": 15,
    "rms_norm_eps": 1e-6,
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "vocab_size_per_layer_input": 262_144,
}
_SPARSE = 10  # first layers with sparse activations, unless config.json names them
_SPARSITY = 0.95


def declare(config: Mapping[str, Any]) -> Model:
    c = Config.of(config, **_DEFAULTS)
    if c.whole("altup_active_idx", least=0) != 0:
        raise CheckpointError(f"config.json: altup_active_idx is {c.values['altup_active_idx']}; supported is 0")
    kinds = layer_kinds(c, 5)
    shared = shared_layers(c, kinds)
    eps, act, bias = c.number("rms_norm_eps"), c.activation("hidden_activation"), c.flag("attention_bias")
    norm, width = RMSNorm(size=c.hidden, eps=eps), c.whole("hidden_size_per_layer_input")
    full = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        rope=rope(c, theta=1e6, kind=FULL),
        scale=1.0,
        bias=(bias, bias),
        qk_norm=RMSNorm(size=c.head_dim, eps=eps),
        v_norm=RMSNorm(size=c.head_dim, eps=eps, weight=False, name="v_norm"),
    )
    windowed = replace(full, window=c.whole("sliding_window"), rope=local_rope(c))
    laurel_norm = replace(norm, name="post_laurel_norm")
    laurel = LowRank(hidden=c.hidden, rank=c.whole("laurel_rank"), norm=laurel_norm, name="laurel")
    sizes, sparsities = _sizes(c), _sparsities(c)

    def block(layer: int, kind: str) -> Block:
        attention = replace(full if kind == FULL else windowed, shared_kv=layer >= c.layers - shared)
        mixer = ResidualBlock(
            before=named(norm, "input_layernorm"),
            body=Parallel(bodies=(attention, laurel), after=(named(norm, "post_attention_layernorm"), None)),
            factor=2.0**-0.5,
        )
        feed = ResidualBlock(
            before=named(norm, "pre_feedforward_layernorm"),
            body=MLP(hidden=c.hidden, intermediate_size=sizes[layer], act=act, sparsity=sparsities[layer]),
            after=named(norm, "post_feedforward_layernorm"),
        )
        last = ResidualBlock(
            body=LayerInput(hidden=c.hidden, width=width, layer=layer, act=act),
            after=named(norm, "post_per_layer_input_norm"),
        )
        return mixer, feed, last

    scaled = c.flag("altup_correct_scale")
    unscaled = (f"layers.{layer}.altup.correct_output_scale" for layer in range(c.layers))
    return Model(
        embed=Embedding(vocab=c.whole("vocab_size"), hidden=c.hidden, scale=c.hidden**0.5),
        blocks=tuple(block(layer, kind) for layer, kind in enumerate(kinds)),
        norm=named(norm, "norm"),
        head=Head(tied=c.flag("tie_word_embeddings"), softcap=c.number_or_none("final_logit_softcapping")),
        max_context=c.whole("max_position_embeddings"),
        unread=(*unread_tensors(c, shared), *(() if scaled else unscaled)),
        layer_inputs=layer_inputs(c, RMSNorm(size=width, eps=eps, name="per_layer_projection_norm")),
        streams=Streams(
            count=c.whole("altup_num_inputs", least=2, most=64),
            norm=replace(norm, name="altup.router_norm"),
            scaled=scaled,
        ),
    )


def _sizes(c: Config) -> tuple[int, ...]:
    """Return the intermediate size of each layer; config.json has one, or a list."""
    found = c.values["intermediate_size"]
    sizes = found if isinstance(found, list) else [found] * c.layers
    if len(sizes) != c.layers:
        raise CheckpointError(
            f"config.json: intermediate_size has {len(sizes)} entries; it must have one for each of the {c.layers} "
            "layers"
        )
    return tuple(replace(c, values={**c.values, "intermediate_size": size}).intermediate_size for size in sizes)


def _sparsities(c: Config) -> tuple[float, ...]:
    """Return the share of each layer's gate values that become 0."""
    found = c.values.get("activation_sparsity_pattern")
    if found is None:
        sparse = _SPARSE if c.layers > _SPARSE else 0
        found = [_SPARSITY] * sparse + [0.0] * (c.layers - sparse)
    found = found if isinstance(found, list) else [found] * c.layers
    fits = all(isinstance(one, int | float) and not isinstance(one, bool) and 0 <= one < 1 for one in found)
    if len(found) != c.layers or not fits:
        raise CheckpointError(
            f"config.json: activation_sparsity_pattern is {shown(found)}; it must have a number from 0 to less than 1 "
            f"for each of the {c.layers} layers"
        )
    return tuple(map(float, found))
