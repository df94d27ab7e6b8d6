"""GPT-J and CodeGen: parallel attention and MLP after one layer norm; interleaved partial rotation; a head with bias.

Source: transformers modeling_gptj.py, modeling_codegen.py. CodeGen's q, v, k are one tensor of four blocks of rows, one
for each of the devices that trained it.
"""

from collections.abc import Mapping
from typing import Any

from engine.api.errors import CheckpointError
from engine.models.config import Config
from engine.models.decoder import mask_buffers
from engine.models.gpt2 import NAMES
from engine.models.parts import MLP, Attention, Embedding, Head, LayerNorm, Model, Parallel, ResidualBlock, Rope, named

ARCHITECTURES = ("GPTJForCausalLM", "CodeGenForCausalLM")

_DEFAULTS: dict[str, Any] = {
    "hidden_act": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": 2048,
    "rotary_dim": 64,
}
_BLOCKS = 4  # of rows in CodeGen's qkv_proj


def declare(config: Mapping[str, Any]) -> Model:
    c = Config.of(config, NAMES, **_DEFAULTS)
    is_codegen = config["architectures"][0] == "CodeGenForCausalLM"
    dim = c.whole("rotary_dim")
    if dim % 2 or dim > c.head_dim:
        raise CheckpointError(f"config.json: rotary_dim is {dim}; it must be even and at most {c.head_dim}")
    if is_codegen and c.heads % _BLOCKS:
        raise CheckpointError(f"config.json: n_head is {c.heads}; it must be a multiple of {_BLOCKS}")
    qkv = ("qkv_proj",) * 3 if is_codegen else ("q_proj", "k_proj", "v_proj")
    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.heads,
        head_dim=c.head_dim,
        rope=Rope(dim=dim, theta=10_000.0, interleaved=True),
        sources=(*qkv, "out_proj"),
        groups=_BLOCKS if is_codegen else 1,
        order="qvk" if is_codegen else "qkv",
        name="attn",
    )
    inner = c.whole_or_none("intermediate_size") or 4 * c.hidden
    mlp = MLP(
        hidden=c.hidden, intermediate_size=inner, act=c.activation(), bias=True, gate=None, up="fc_in", down="fc_out"
    )
    norm = LayerNorm(size=c.hidden, eps=c.number("layer_norm_epsilon"))
    block = (ResidualBlock(before=named(norm, "ln_1"), body=Parallel(bodies=(attention, mlp))),)
    return Model(
        embed=Embedding(vocab=c.whole("vocab_size"), hidden=c.hidden, name="wte"),
        blocks=(block,) * c.layers,
        norm=named(norm, "ln_f"),
        head=Head(tied=c.flag("tie_word_embeddings"), bias=True),
        max_context=c.whole("max_position_embeddings"),
        root="transformer",
        layers="h",
        unread=mask_buffers(c, "h", "attn"),
    )
