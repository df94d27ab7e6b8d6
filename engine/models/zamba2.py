"""Zamba2: Mamba-2 mixers in all layers; some also read the output of a transformer block that layers share.

Source: transformers modeling_zamba2.py; arXiv:2411.15242. The input of a shared block is the residual stream and the
embedding of the token, side by side. A matrix of the layer projects the output, which is added to the input of the
layer's mixer. Layers use `num_mem_blocks` shared blocks in turn; the first layer of each block has its tensors. Each
use has its own low-rank updates of the MLP, and with `use_shared_attention_adapter` of q, k and v. As in transformers,
layers share blocks only if `tie_word_embeddings` is true.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from engine.api.errors import CheckpointError
from engine.models import mamba2
from engine.models.config import Config
from engine.models.mamba2 import RECURRENT
from engine.models.parts import (
    MLP,
    Attention,
    Block,
    Embedding,
    Head,
    LowRankUpdate,
    Mamba2,
    Model,
    Projection,
    ResidualBlock,
    RMSNorm,
    Rope,
    named,
)
from engine.models.rope import rope

ARCHITECTURES = ("Zamba2ForCausalLM",)
HYBRID = "hybrid"
USUAL = (6, 12, 18, 24, 30, 36, 42, 47, 51)  # layers of Zamba2 2.7B that have a shared block

_NAMES = {
    "num_heads": "n_mamba_heads",
    "n_groups": "mamba_ngroups",
    "state_size": "mamba_d_state",
    "conv_kernel": "mamba_d_conv",
    "expand": "mamba_expand",
    "use_bias": "add_bias_linear",
}
_DEFAULTS: dict[str, Any] = {
    "adapter_rank": 128,
    "conv_kernel": 4,
    "expand": 2,
    "hidden_act": "gelu",
    "max_position_embeddings": 4096,
    "n_groups": 1,
    "num_heads": 8,
    "num_mem_blocks": 1,
    "rms_norm_eps": 1e-5,
    "state_size": 64,
    "tie_word_embeddings": True,
    "time_step_min": 0.001,
}


def declare(config: Mapping[str, Any]) -> Model:
    c = Config.of(config, _NAMES, **_DEFAULTS)
    if c.flag("use_long_context"):
        raise CheckpointError("config.json: use_long_context is true, whose rotary positions are not supported")
    positions = rope(_attention_config(c)) if c.flag("use_mem_rope") else None
    norm, mixer, kinds = RMSNorm(size=c.hidden, eps=c.number("rms_norm_eps")), _mixer(c), _layer_kinds(c)
    hybrid = [layer for layer, kind in enumerate(kinds) if kind == HYBRID]
    count, tied = c.whole("num_mem_blocks"), c.flag("tie_word_embeddings")
    plain = (ResidualBlock(before=named(norm, "input_layernorm"), body=mixer),)
    joined = ResidualBlock(
        before=named(norm, "mamba_decoder.input_layernorm"),
        body=replace(mixer, name=f"mamba_decoder.{mixer.name}"),
        side="joins",
    )
    blocks: dict[int, Block] = dict.fromkeys(range(c.layers), plain)
    for use, layer in enumerate(hybrid):
        path = f"layers.{hybrid[use % count] if tied else layer}.shared_transformer"
        blocks[layer] = (*_shared(c, positions, use, path), joined)
    return Model(
        embed=Embedding(vocab=c.whole("vocab_size"), hidden=c.hidden),
        blocks=tuple(blocks.values()),
        norm=named(norm, "final_layernorm"),
        head=Head(tied=tied),
        max_context=c.whole("max_position_embeddings"),
        unread=tuple(_copies(hybrid, count) if tied else _unused_updates(hybrid, count)),
    )


def _copies(hybrid: Sequence[int], count: int) -> Iterator[str]:
    """Yield the prefixes of further copies of the shared blocks."""
    return (f"layers.{layer}.shared_transformer." for layer in hybrid[count:])


def _unused_updates(hybrid: Sequence[int], count: int) -> Iterator[str]:
    """Yield the prefixes of updates that a block has for layers that do not share it."""
    for use, layer in enumerate(hybrid):
        for other in range(use % count, len(hybrid), count):
            if other != use:
                path = f"layers.{layer}.shared_transformer"
                yield from (f"{path}.self_attn.linear_{one}_adapter_list.{other}." for one in "qkv")
                yield f"{path}.feed_forward.gate_up_proj_adapter_list.{other}."


def _shared(c: Config, positions: Rope | None, use: int, path: str) -> Iterator[ResidualBlock]:
    """Yield the blocks of a use of a shared block."""
    wide, inner = 2 * c.hidden, c.whole_or_none("intermediate_size") or 4 * c.hidden
    own, rank, eps = _attention_config(c), c.whole("adapter_rank"), c.number("rms_norm_eps")
    update = None
    if c.flag("use_shared_attention_adapter"):
        update = LowRankUpdate(rank=rank, names=tuple(f"linear_{one}_adapter_list.{use}" for one in "qkv"))
        if c.kv_heads != c.heads:
            raise CheckpointError(
                f"config.json: num_key_value_heads is {c.kv_heads}; with use_shared_attention_adapter it must be "
                f"num_attention_heads, {c.heads}"
            )
    attention = Attention(
        hidden=wide,
        outputs=c.hidden,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=own.head_dim,
        rope=positions,
        scale=(own.head_dim / 2) ** -0.5,
        update=update,
    )
    mlp = MLP(
        hidden=c.hidden,
        intermediate_size=inner,
        act=c.activation(),
        bias=c.flag("use_bias"),
        gate="gate_up_proj",
        up="gate_up_proj",
        update=LowRankUpdate(rank=rank, names=(f"gate_up_proj_adapter_list.{use}",)),
        name="feed_forward",
    )
    before = RMSNorm(size=wide, eps=eps, name="input_layernorm")
    yield ResidualBlock(before=before, body=attention, side="opens", path=path)
    between = RMSNorm(size=c.hidden, eps=eps, name="pre_ff_layernorm")
    yield ResidualBlock(before=between, body=mlp, side="continues", path=path)
    yield ResidualBlock(body=Projection(hidden=c.hidden, name="linear"), side="continues")


def _attention_config(c: Config) -> Config:
    """Return the configuration of attention, whose heads divide the residual stream and the embedding."""
    head_dim = 2 * c.hidden // c.heads
    if head_dim * c.heads != 2 * c.hidden:
        raise CheckpointError(
            f"config.json: num_attention_heads is {c.heads}; it must divide twice hidden_size, {2 * c.hidden}"
        )
    return replace(c, values={**c.values, "head_dim": head_dim})


def _mixer(c: Config) -> Mamba2:
    given = {"head_dim": "auto", "hidden_act": "silu", "use_conv_bias": True, "layer_norm_epsilon": 1e-5}
    part = mamba2.mixer(replace(c, values={**c.values, **given, "time_step_limit": None}))
    return replace(part, dt_limits=(c.number("time_step_min"), part.dt_limits[1]), name="mamba")


def _layer_kinds(c: Config) -> tuple[str, ...]:
    """Return the kind of each layer, "linear_attention" or "hybrid". The default is the list of Zamba2 2.7B."""
    if c.values.get("layers_block_type") is None and c.values.get("layer_types") is None:
        return tuple(HYBRID if layer in USUAL else RECURRENT for layer in range(c.layers))
    return mamba2.layer_kinds(c, HYBRID)
