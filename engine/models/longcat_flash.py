"""LongCat-Flash: layers of two latent attentions and two MLPs, with experts on a shortcut.

The experts have the same input as the first MLP of a layer, and their output is added at the end of the layer.
Zero-computation experts return their input. Queries and latents are multiplied by sqrt(hidden / rank). Source:
transformers modeling_longcat_flash.py; arXiv:2509.01322. The prediction head `mtp` has a dense MLP (SGLang,
longcat_flash_nextn.py).
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.api.errors import CheckpointError
from engine.models.config import Config
from engine.models.decoder import with_predictor
from engine.models.deepseek import latent_attention
from engine.models.parts import MLP, Embedding, Experts, Head, LatentAttention, Model, ResidualBlock, RMSNorm, named
from engine.models.rope import claimed_context

ARCHITECTURES = ("LongcatFlashForCausalLM",)

_DEFAULTS: dict[str, Any] = {
    "expert_ffn_hidden_size": 2048, "ffn_hidden_size": 12_288, "hidden_act": "silu", "kv_lora_rank": 512,
    "max_position_embeddings": 131_072, "moe_topk": 12, "n_routed_experts": 512, "num_layers": 28,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-5,
    "rope_theta": 1e7, "routed_scaling_factor": 6.0, "v_head_dim": 128, "zero_expert_num": 256,
}  # fmt: skip
_NAMES = {"head_dim": "qk_rope_head_dim", "intermediate_size": "ffn_hidden_size",
          "moe_intermediate_size": "expert_ffn_hidden_size", "num_experts": "n_routed_experts",
          "num_experts_per_tok": "moe_topk", "num_hidden_layers": "num_layers"}  # fmt: skip


def declare(config: Mapping[str, Any]) -> Model:
    c = Config.of({**_DEFAULTS, **config}, _NAMES)
    norm = RMSNorm(size=c.hidden, eps=c.number("rms_norm_eps"))
    mlp = MLP(hidden=c.hidden, intermediate_size=c.intermediate_size, act=c.activation())
    first, second = (_attention(c, number) for number in (0, 1))
    layer = (
        ResidualBlock(before=named(norm, "input_layernorm.0"), body=first),
        ResidualBlock(
            before=named(norm, "post_attention_layernorm.0"), body=replace(mlp, name="mlps.0"), shortcut=_experts(c)
        ),
        ResidualBlock(before=named(norm, "input_layernorm.1"), body=second),
        ResidualBlock(before=named(norm, "post_attention_layernorm.1"), body=replace(mlp, name="mlps.1")),
    )
    model = Model(
        embed=Embedding(vocab=c.whole("vocab_size"), hidden=c.hidden),
        blocks=(layer,) * c.layers,
        norm=named(norm, "norm"),
        head=Head(tied=c.flag("tie_word_embeddings")),
        max_context=claimed_context(c, first.rope),
        unread=("mtp.",),
    )
    head = "model.mtp.layers.{}."
    renamed = {"enorm.m.": "enorm.", "hnorm.m.": "hnorm.", "transformer_layer.mlp.": "mlp."}
    names = [(head, ""), ("model.mtp.norm.", "norm."), *((f"{head}{old}", new) for old, new in renamed.items())]
    attention, tensors = replace(first, name="self_attn"), ("eh_proj", "enorm", "hnorm", "norm")
    return with_predictor(model, c, attention, mlp, names, tensors=tensors, skips_first=False)


def _attention(c: Config, number: int) -> LatentAttention:
    part = latent_attention(c, interleaved=True)
    if part.q_lora_rank is None:
        raise CheckpointError("config.json: q_lora_rank is null; LongCat-Flash has queries of low rank")
    of_queries, of_latents = (math.sqrt(c.hidden / rank) for rank in (part.q_lora_rank, part.kv_lora_rank))
    return replace(
        part,
        name=f"self_attn.{number}",
        scale=part.scale * of_queries,
        latent_norm=replace(part.latent_norm, scale=of_latents),
    )


def _experts(c: Config) -> Experts:
    count, top_k = c.experts()
    if c.flag("router_bias"):
        raise CheckpointError("config.json: router_bias is true; a bias of the router is not supported")
    return Experts(
        hidden=c.hidden,
        intermediate_size=c.whole("moe_intermediate_size"),
        num_experts=count,
        top_k=top_k,
        scores="softmax",
        zero_experts=c.whole("zero_expert_num", least=0),
        act=c.activation(),
        router="router.classifier",
        correction="router.e_score_correction_bias",
        weight_scale=c.positive("routed_scaling_factor"),
    )
