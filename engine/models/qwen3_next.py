"""Qwen3-Next: gated DeltaNet in three of four layers, gated full attention in the others, and experts.

Norm weights of the hidden states, queries and keys are stored minus one; the norm of the DeltaNet is stored unchanged.

Source: transformers modeling_qwen3_next.py. The prediction head `mtp` has a layer of full attention (vLLM,
qwen3_next_mtp.py).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from engine.api.errors import CheckpointError
from engine.models.config import Config
from engine.models.decoder import with_predictor
from engine.models.parts import (
    MLP,
    Attention,
    Block,
    Body,
    DeltaNet,
    Embedding,
    Experts,
    Head,
    Model,
    ResidualBlock,
    RMSNorm,
    named,
)
from engine.models.rope import claimed_context, rope

ARCHITECTURES = ("Qwen3NextForCausalLM",)

_DEFAULTS: dict[str, Any] = {
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 32768,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_key_value_heads": 2,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-6,
    "shared_expert_intermediate_size": 512,
}


def declare(config: Mapping[str, Any]) -> Model:
    c = Config.of(config, **_DEFAULTS)
    experts = shared_experts(c, normalized=c.flag("norm_topk_prob"))
    act = c.activation()
    mlps = (MLP(hidden=c.hidden, intermediate_size=c.intermediate_size, act=act), experts)
    layers = [mlps[sparse] for sparse in c.sparse_layers()]
    return hybrid(c, layers, delta_net(c), heads="num_nextn_predict_layers")


def shared_experts(c: Config, *, normalized: bool) -> Experts:
    """Return routed experts with a gated shared expert."""
    num_experts, top_k = c.experts()
    size = c.whole("shared_expert_intermediate_size")
    return Experts(
        hidden=c.hidden,
        intermediate_size=c.whole("moe_intermediate_size"),
        num_experts=num_experts,
        top_k=top_k,
        scores="softmax_chosen" if normalized else "softmax",
        act=c.activation(),
        shared=MLP(hidden=c.hidden, intermediate_size=size, act=c.activation(), name="shared_expert"),
        shared_gate="shared_expert_gate",
    )


HEAD = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")


def hybrid(c: Config, mlps: Sequence[MLP | Experts], delta: DeltaNet, heads: str = "") -> Model:
    """Return the model with these MLPs and this DeltaNet. heads: key of the number of prediction heads."""
    eps, positions = c.number("rms_norm_eps"), rope(c, partial=0.25)
    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        rope=positions,
        bias=(c.flag("attention_bias"), c.flag("attention_bias")),
        qk_norm=RMSNorm(size=c.head_dim, eps=eps, offset=1.0),
        gated=True,
    )
    norm = RMSNorm(size=c.hidden, eps=eps, offset=1.0)
    mixers: dict[str, Body] = {"full_attention": attention, "linear_attention": delta}

    def block(kind: str, mlp: MLP | Experts) -> Block:
        return (
            ResidualBlock(before=named(norm, "input_layernorm"), body=mixers[kind]),
            ResidualBlock(before=named(norm, "post_attention_layernorm"), body=mlp),
        )

    interval = c.whole("full_attention_interval")
    usual = tuple("linear_attention" if (i + 1) % interval else "full_attention" for i in range(c.layers))
    model = Model(
        embed=Embedding(vocab=c.whole("vocab_size"), hidden=c.hidden),
        blocks=tuple(map(block, c.layer_types(usual, tuple(mixers)), mlps)),
        norm=named(norm, "norm"),
        head=Head(tied=c.flag("tie_word_embeddings")),
        max_context=claimed_context(c, positions),
        unread=("mtp.",),
    )
    if not heads:
        return model
    names = [("mtp.layers.{}.", ""), *((f"mtp.{name}.", f"{name}.") for name in HEAD)]
    return with_predictor(model, c, attention, mlps[-1], names, tensors=HEAD, count=heads, skips_first=False)


def delta_net(c: Config) -> DeltaNet:
    """Return the recurrent part. Raises CheckpointError if value heads cannot be divided among key heads."""
    key_heads, value_heads = c.whole("linear_num_key_heads"), c.whole("linear_num_value_heads")
    c.check_multiple("linear_num_value_heads", value_heads, "linear_num_key_heads", key_heads)
    if c.activation() != "silu":
        raise CheckpointError(f"config.json: hidden_act is {c.activation()}; the gated DeltaNet of this model has silu")
    return DeltaNet(
        hidden=c.hidden,
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=c.whole("linear_key_head_dim"),
        value_dim=c.whole("linear_value_head_dim"),
        conv=c.whole("linear_conv_kernel_dim", least=2),
        eps=c.number("rms_norm_eps"),
        projections="grouped",
    )
