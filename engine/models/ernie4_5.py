"""ERNIE 4.5 (dense and with experts) and Helium: Llama blocks with interleaved rotation.

Source: transformers modeling_ernie4_5.py, modeling_ernie4_5_moe.py, modeling_helium.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.models.config import Config
from engine.models.decoder import llama_decoder, with_predictor
from engine.models.parts import MLP, Attention, Experts, Head, Model, RMSNorm
from engine.models.rope import rope

_EXPERTS = ("Ernie4_5_MoeForCausalLM", "Ernie4_5_MoEForCausalLM")
ARCHITECTURES = ("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM", *_EXPERTS, "HeliumForCausalLM")
"""The first exported checkpoints have the second name of two."""

_ERNIE = {
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
_MOE = {
    "moe_intermediate_size": 1536,
    "moe_k": 6,
    "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
    "moe_layer_start_index": 1,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "num_key_value_heads": 4,
}
_NAMES = {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"}
_HELIUM = {"head_dim": 128, "max_position_embeddings": 4096, "rms_norm_eps": 1e-8}


def declare(config: Mapping[str, Any]) -> Model:
    architecture = config["architectures"][0]
    is_helium, is_moe = architecture == "HeliumForCausalLM", architecture in _EXPERTS
    defaults: dict[str, Any] = _HELIUM if is_helium else _ERNIE | (_MOE if is_moe else {"head_dim": 128})
    c = Config.of(config, _NAMES if is_moe else {}, hidden_act="silu", **defaults)
    positions = rope(c, theta=100_000.0 if is_helium else 500_000.0, interleaved=True)
    bias = (c.flag("attention_bias"), False) if is_helium else (c.flag("use_bias"), c.flag("use_bias"))
    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        rope=positions,
        bias=bias,
    )
    mlp = MLP(
        hidden=c.hidden,
        intermediate_size=c.intermediate_size,
        act=c.activation(),
        bias=c.flag("mlp_bias" if is_helium else "use_bias"),
    )
    norm = RMSNorm(size=c.hidden, eps=c.number("rms_norm_eps"))
    mlps = _mlps(c, mlp) if is_moe else mlp
    model = llama_decoder(c, attention, mlps, norm, positions=positions)
    if not is_moe:
        return model
    # The layers `mtp_…` predict several tokens, and are read on their own.
    head = Head(tied=c.flag("tie_word_embeddings"), bias=c.flag("use_bias"))
    model = replace(model, head=head, unread=("mtp_",))
    own = ("mtp_linear_proj", "mtp_emb_norm", "mtp_hidden_norm")
    names = [("model.mtp_block.{}.", ""), *((f"model.{name}.{{}}.", f"{name}.") for name in own)]
    return with_predictor(model, c, attention, mlp, names, tensors=(*own, ""))


def _mlps(c: Config, mlp: MLP) -> tuple[MLP | Experts, ...]:
    """Return the MLP or the experts of each layer."""
    num_experts, top_k = c.experts()
    size, beside = c.whole("moe_intermediate_size"), c.whole("moe_num_shared_experts", least=0)
    experts = Experts(
        hidden=c.hidden,
        intermediate_size=size,
        num_experts=num_experts,
        top_k=top_k,
        scores="softmax",
        act=mlp.act,
        correction="moe_statics.e_score_correction_bias",
        correction_is_row=True,
        normalized=True,
        shared=replace(mlp, intermediate_size=size * beside, name="shared_experts") if beside else None,
    )
    first, step = c.whole("moe_layer_start_index", least=0), c.whole("moe_layer_interval")
    last = c.whole("moe_layer_end_index", least=-1)
    last = c.layers - 1 if last == -1 else last
    return tuple(experts if (i + 1) % step == 0 and first <= i <= last else mlp for i in range(c.layers))
