"""RecurrentGemma (Griffin): RG-LRU blocks in two of three layers, windowed attention in the others, an MLP in all.

Source: transformers modeling_recurrent_gemma.py; arXiv:2402.19427. The factor of the embeddings is rounded to bfloat16.
"""

import struct
from collections.abc import Mapping
from typing import Any

from engine.api.errors import CheckpointError
from engine.models.config import Config, shown
from engine.models.mamba2 import MAX_CONTEXT
from engine.models.parts import MLP, Attention, Block, Embedding, Head, Model, ResidualBlock, RgLru, RMSNorm, named
from engine.models.rope import claimed_context, rope

ARCHITECTURES = ("RecurrentGemmaForCausalLM",)

_NAMES = {"hidden_act": "hidden_activation"}
_DEFAULTS: dict[str, Any] = {
    "attention_window_size": 2048,
    "block_types": ["recurrent", "recurrent", "attention"],
    "conv1d_width": 4,
    "hidden_act": "gelu_pytorch_tanh",
    "logits_soft_cap": 30.0,
    "max_position_embeddings": MAX_CONTEXT,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}


def declare(config: Mapping[str, Any]) -> Model:
    c = Config.of(config, _NAMES, **_DEFAULTS)
    positions, act = rope(c, partial=0.5), c.activation()
    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        rope=positions,
        bias=(c.flag("attention_bias"), True),
        window=c.whole("attention_window_size"),
        name="temporal_block",
    )
    mlp = MLP(hidden=c.hidden, intermediate_size=_inner(c), act=act, bias=True, name="mlp_block")
    norm = RMSNorm(size=c.hidden, eps=c.number("rms_norm_eps"), offset=1.0)

    def block(kind: str) -> Block:
        return (
            ResidualBlock(
                before=named(norm, "temporal_pre_norm"), body=_recurrent(c, act) if kind == "recurrent" else attention
            ),
            ResidualBlock(before=named(norm, "channel_pre_norm"), body=mlp),
        )

    return Model(
        embed=Embedding(vocab=c.whole("vocab_size"), hidden=c.hidden, scale=_in_bf16(c.hidden**0.5)),
        blocks=tuple(map(block, _kinds(c))),
        norm=named(norm, "final_norm"),
        head=Head(tied=c.flag("tie_word_embeddings"), softcap=c.positive("logits_soft_cap")),
        max_context=claimed_context(c, positions),
    )


def _recurrent(c: Config, act: str) -> RgLru:
    width = c.whole_or_none("lru_width") or c.hidden
    c.check_multiple("lru_width", width, "num_attention_heads", c.heads)
    return RgLru(
        hidden=c.hidden, heads=c.heads, head_dim=width // c.heads, conv=c.whole("conv1d_width", least=2), act=act
    )


def _inner(c: Config) -> int:
    """Return the size of the MLP, half of the configured one."""
    return max(1, c.intermediate_size // 2)


def _kinds(c: Config) -> tuple[str, ...]:
    """Return the kind of each layer, "recurrent" or "attention"; the list is repeated for further layers."""
    kinds = c.values["block_types"]
    if not isinstance(kinds, list) or not kinds or not all(kind in ("recurrent", "attention") for kind in kinds):
        raise CheckpointError(
            f"config.json: block_types is {shown(kinds)}; it must be a list of recurrent and attention"
        )
    return tuple(kinds[layer % len(kinds)] for layer in range(c.layers))


def _in_bf16(x: float) -> float:
    """Round a positive number to bfloat16, ties to even."""
    (bits,) = struct.unpack("<I", struct.pack("<f", x))
    rounded: float
    (rounded,) = struct.unpack("<f", struct.pack("<I", (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000))
    return rounded
