"""HunYuan, dense and with experts: Llama blocks whose queries and keys are normalised after the rotation.

Source: transformers modeling_hunyuan_v1_dense.py, modeling_hunyuan_v1_moe.py. Each layer with experts has a shared
expert of the same size. A RoPE of type dynamic with `alpha` has a fixed, larger base.
"""

from collections.abc import Mapping
from typing import Any

from engine.api.errors import CheckpointError
from engine.models.config import MAX_EXPERTS, Config, shown
from engine.models.decoder import Feed, llama_decoder
from engine.models.parts import MLP, Attention, Experts, Model, RMSNorm
from engine.models.rope import rope

ARCHITECTURES = ("HunYuanDenseV1ForCausalLM", "HunYuanMoEV1ForCausalLM")

_DEFAULTS: dict[str, Any] = {"hidden_act": "silu", "max_position_embeddings": 2048, "moe_topk": 1, "num_experts": 1,
                             "rms_norm_eps": 1e-5}  # fmt: skip


def declare(config: Mapping[str, Any]) -> Model:
    c = Config.of(config, **_DEFAULTS)
    positions, bias = rope(c, ntk_alpha=True), c.flag("attention_bias")
    norm = RMSNorm(size=c.hidden, eps=c.number("rms_norm_eps"))
    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        rope=positions,
        bias=(bias, bias),
        qk_norm=RMSNorm(size=c.head_dim, eps=norm.eps),
        qk_norm_last=True,
        qk_norm_names=("query_layernorm", "key_layernorm"),
    )
    mlp = MLP(hidden=c.hidden, intermediate_size=c.intermediate_size, act=c.activation())
    feeds: tuple[Feed, ...] = (mlp,) * c.layers
    if config["architectures"][0] == "HunYuanMoEV1ForCausalLM":
        feeds = tuple(_experts(c, mlp, layer) for layer in range(c.layers))
    return llama_decoder(c, attention, feeds, norm, positions=positions)


def _experts(c: Config, mlp: MLP, layer: int) -> Experts:
    count, top_k = (_of_layer(c, key, layer) for key in ("num_experts", "moe_topk"))
    if not 1 <= top_k <= count <= MAX_EXPERTS // c.layers:
        raise CheckpointError(
            f"config.json: moe_topk is {top_k} and num_experts {count} in layer {layer}; a token cannot take more "
            f"experts than there are, and {c.layers} layers may have {MAX_EXPERTS:,} experts together"
        )
    return Experts(
        hidden=c.hidden,
        intermediate_size=mlp.intermediate_size,
        num_experts=count,
        top_k=top_k,
        scores="softmax_chosen",
        act=mlp.act,
        router="gate.wg",
        shared=MLP(hidden=c.hidden, intermediate_size=mlp.intermediate_size, act=mlp.act, name="shared_mlp"),
    )


def _of_layer(c: Config, key: str, layer: int) -> int:
    """Return a number that all layers share, or that a list has for each layer."""
    value = c.values.get(key)
    if not isinstance(value, list):
        return c.whole(key)
    if len(value) < c.layers or not all(type(one) is int for one in value):
        raise CheckpointError(f"config.json: {key} is {shown(value)}; it must be a number, or one for each layer")
    return int(value[layer])
