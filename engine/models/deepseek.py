"""DeepSeek V2, V3, V3.2 and R1, Kimi K2, Moonlight, GLM-4.7-Flash, GLM-5 and Youtu: multi-head latent attention, and
experts in all but the first layers. V3.2 and GLM-5 read only the keys that an indexer selects; in GLM-5, several layers
may share a selection.

V2 selects experts by softmax scores, ranking groups by their largest; V3 by sigmoid scores with a correction. Youtu has
no experts. Source: transformers modeling_deepseek_v2.py, modeling_deepseek_v3.py, modeling_deepseek_v32.py,
modeling_glm_moe_dsa.py, modeling_glm4_moe_lite.py and modeling_youtu.py; arXiv:2405.04434, arXiv:2412.19437,
arXiv:2512.02556.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.api.errors import CheckpointError
from engine.models.config import Config, shown
from engine.models.decoder import layers_of_heads, llama_decoder, with_predictor
from engine.models.grouped_experts import dense_first, grouped_experts
from engine.models.parts import MLP, Experts, Indexer, LatentAttention, LayerNorm, Model, RMSNorm
from engine.models.rope import rope, yarn_mscale

ARCHITECTURES = (
    *("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "Glm4MoeLiteForCausalLM"),
    *("GlmMoeDsaForCausalLM", "YoutuForCausalLM"),
)
INDEXED = ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")
LATENT_EPS = 1e-6  # of the norms of latents, whatever rms_norm_eps is

_V3 = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
       "first_k_dense_replace": 3, "hidden_act": "silu", "max_position_embeddings": 4096, "moe_layer_freq": 1,
       "n_group": 8, "topk_group": 4, "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 8,
       "rms_norm_eps": 1e-6, "rope_interleave": True, "routed_scaling_factor": 2.5,
       "scoring_func": "sigmoid"}  # fmt: skip
_DEFAULTS: dict[str, dict[str, Any]] = {
    "DeepseekV2ForCausalLM": {**_V3, "first_k_dense_replace": 0, "max_position_embeddings": 2048, "n_group": None,
                              "topk_group": None, "n_shared_experts": 2, "norm_topk_prob": False,
                              "routed_scaling_factor": 1.0, "scoring_func": "softmax", "topk_method": "greedy"},
    "DeepseekV3ForCausalLM": _V3,
    "DeepseekV32ForCausalLM": {**_V3, "max_position_embeddings": 163_840, "index_topk": 2048, "index_head_dim": 128,
                               "index_n_heads": 64},
    "Glm4MoeLiteForCausalLM": {**_V3, "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256,
                               "first_k_dense_replace": 1, "max_position_embeddings": 202_752, "n_group": 1,
                               "topk_group": 1, "num_experts_per_tok": 4, "rms_norm_eps": 1e-5,
                               "routed_scaling_factor": 1.8},
    "GlmMoeDsaForCausalLM": {**_V3, "q_lora_rank": 2048, "qk_nope_head_dim": 192, "v_head_dim": 256, "n_group": 1,
                             "topk_group": 1, "max_position_embeddings": 202_752, "rms_norm_eps": 1e-5,
                             "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 32, "index_topk_freq": 1,
                             "index_skip_topk_offset": 2},
    "YoutuForCausalLM": {**_V3, "max_position_embeddings": 131_072, "tie_word_embeddings": True},
}  # fmt: skip


def declare(config: Mapping[str, Any]) -> Model:
    architecture = config["architectures"][0]
    # Rotary positions are those of the shared key.
    names = {"num_experts": "n_routed_experts", "head_dim": "qk_rope_head_dim"}
    c = Config.of(config, names, **{**_DEFAULTS[architecture], "head_dim": 64})
    is_v2 = architecture == "DeepseekV2ForCausalLM"
    indexed = architecture in INDEXED
    attention = latent_attention(c, interleaved=is_v2 or indexed or c.flag("rope_interleave"))
    bias = is_v2 and c.flag("mlp_bias")
    mlp = MLP(hidden=c.hidden, intermediate_size=c.intermediate_size, act=c.activation(), bias=bias)
    norm = RMSNorm(size=c.hidden, eps=c.number("rms_norm_eps"))
    mlps: tuple[MLP | Experts, ...] = (mlp,) * c.layers
    if architecture != "YoutuForCausalLM":
        experts = _softmax_experts(c, bias=bias) if is_v2 else _sigmoid_experts(c)
        mlps = tuple(experts if has_experts else mlp for has_experts in dense_first(c))
    attentions = (attention,) * c.layers
    if indexed:
        # GLM-5 rotates adjacent pairs of the index vectors, V3.2 pairs that are half of the rotated part apart.
        indexer = _indexer(c, attention, interleaved=architecture == "GlmMoeDsaForCausalLM")
        attentions = tuple(
            replace(attention, indexer=indexer) if selects else replace(attention, shares_selection=True)
            for selects in _selecting_layers(c)
        )
    model = llama_decoder(c, attentions, mlps, norm, positions=attention.rope)
    # Layers beyond the last predict several tokens, and are read on their own.
    model = replace(model, unread=layers_of_heads(c))
    if is_v2 or indexed:
        return model
    return with_predictor(model, c, attention, mlps[-1], [("model.layers.{}.", "")], first=c.layers)


def latent_attention(c: Config, *, interleaved: bool) -> LatentAttention:
    """Return the attention. `c` has the size of the shared key as head_dim."""
    # All of the shared key is rotated, whatever the key for other attentions says.
    whole = replace(c, values={key: value for key, value in c.values.items() if key != "partial_rotary_factor"})
    positions, mscale = rope(whole, interleaved=interleaved), yarn_mscale(c)
    if positions.dim != c.head_dim:
        raise CheckpointError(
            f"config.json: rope_parameters rotate {positions.dim} of the {c.head_dim} dimensions of qk_rope_head_dim; "
            "latent attention rotates all of them"
        )
    nope, q_rank, bias = c.whole("qk_nope_head_dim"), c.whole_or_none("q_lora_rank"), c.flag("attention_bias")
    return LatentAttention(
        hidden=c.hidden,
        heads=c.heads,
        kv_lora_rank=c.whole("kv_lora_rank"),
        qk_nope_head_dim=nope,
        v_head_dim=c.whole_or_none("v_head_dim") or c.hidden // c.heads,
        rope=positions,
        scale=mscale * mscale / math.sqrt(nope + positions.dim),
        latent_norm=RMSNorm(size=c.whole("kv_lora_rank"), eps=LATENT_EPS, name="kv_a_layernorm"),
        q_lora_rank=q_rank,
        q_norm=None if q_rank is None else RMSNorm(size=q_rank, eps=LATENT_EPS, name="q_a_layernorm"),
        bias=(bias, bias),
    )


def _indexer(c: Config, attention: LatentAttention, *, interleaved: bool) -> Indexer:
    size, positions = c.whole("index_head_dim"), replace(attention.rope, interleaved=interleaved)
    if attention.q_lora_rank is None or size < positions.dim:
        raise CheckpointError(
            f"config.json: q_lora_rank is {shown(attention.q_lora_rank)}, index_head_dim {size} and qk_rope_head_dim "
            f"{positions.dim}; an indexer needs queries of low rank, and at least as many dimensions as are rotated"
        )
    return Indexer(
        hidden=c.hidden,
        heads=c.whole("index_n_heads"),
        head_dim=size,
        top_k=c.whole("index_topk"),
        q_lora_rank=attention.q_lora_rank,
        rope=positions,
        norm=LayerNorm(size=size, eps=LATENT_EPS, name="k_norm"),
    )


def _selecting_layers(c: Config) -> tuple[bool, ...]:
    """Return for each layer whether it has an indexer. A layer without one uses the selection of the layer before.

    `indexer_types` lists `full` and `shared`, and `index_topk_pattern` has a letter F or S for each layer. Without
    both, all layers up to `index_skip_topk_offset` - 1 have an indexer, and after it every `index_topk_freq`-th."""
    kinds = c.values.get("indexer_types")
    pattern = c.values.get("index_topk_pattern")
    if kinds is None and isinstance(pattern, str):
        kinds = [{"F": "full", "S": "shared"}.get(kind, kind) for kind in pattern]
    if kinds is None and c.values.get("index_topk_freq") is not None:
        every, offset = max(1, c.whole("index_topk_freq", least=0)), c.whole("index_skip_topk_offset", least=0)
        kinds = ["full" if max(index - offset + 1, 0) % every == 0 else "shared" for index in range(c.layers)]
    if kinds is None:
        return (True,) * c.layers
    named = isinstance(kinds, list) and len(kinds) == c.layers and all(kind in ("full", "shared") for kind in kinds)
    if not named or kinds[0] != "full":
        raise CheckpointError(
            f"config.json: indexer_types must name full or shared for each of the {c.layers} layers, and full for the "
            "first"
        )
    return tuple(kind == "full" for kind in kinds)


def _sigmoid_experts(c: Config) -> Experts:
    _require(c, "scoring_func", "sigmoid")
    _require(c, "moe_layer_freq", 1)
    return grouped_experts(c)


def _softmax_experts(c: Config, *, bias: bool) -> Experts:
    """Return experts that are selected by their softmax scores alone, from the groups with the largest scores."""
    _require(c, "scoring_func", "softmax")
    _require(c, "moe_layer_freq", 1)
    _require(c, "topk_method", "greedy", "group_limited_greedy")
    _require(c, "norm_topk_prob", False)  # transformers ignores it, and the original code does not scale then
    if c.values["topk_method"] == "greedy":
        c = replace(c, values={**c.values, "n_group": 1, "topk_group": 1})
    experts = grouped_experts(c)
    shared = None if experts.shared is None else replace(experts.shared, bias=bias)
    return replace(experts, scores="softmax", correction="", group_score="max", shared=shared)


def _require(c: Config, key: str, *supported: Any) -> None:
    if c.values.get(key) not in supported:
        expected = " or ".join(map(repr, supported))
        raise CheckpointError(f"config.json: {key} is {shown(c.values.get(key))}; supported is {expected}")
