"""Experts with the routing of DeepSeek-V3, which many families share: sigmoid scores, a correction of each expert's
score that only affects the selection, groups of experts, and shared experts.

Source: transformers modeling_deepseek_v3.py; arXiv:2412.19437.
"""

from engine.api.errors import CheckpointError
from engine.models.config import Config
from engine.models.parts import MLP, Experts


def grouped_experts(c: Config, shared: str = "n_shared_experts") -> Experts:
    """shared: key of the number of shared experts, which are stored as one MLP."""
    count, top_k = c.experts()
    groups, kept = (c.whole_or_none(key) or 1 for key in ("n_group", "topk_group"))
    if count % groups or kept > groups or top_k > kept * (count // groups) or (groups > 1 and count < 2 * groups):
        raise CheckpointError(
            f"config.json: n_group is {groups}, topk_group {kept}, num_experts_per_tok {top_k}, and there are {count} "
            "experts; groups must be equal and have at least two experts, and the kept ones enough for a token"
        )
    size, act = c.whole("moe_intermediate_size"), c.activation()
    beside = 0 if c.values.get(shared) is None else c.whole(shared, least=0)
    return Experts(
        hidden=c.hidden,
        intermediate_size=size,
        num_experts=count,
        top_k=top_k,
        scores="sigmoid",
        act=act,
        correction="gate.e_score_correction_bias",
        groups=groups,
        groups_kept=kept,
        normalized=c.flag("norm_topk_prob"),
        weight_scale=c.positive("routed_scaling_factor"),
        shared=MLP(hidden=c.hidden, intermediate_size=size * beside, act=act, name="shared_experts")
        if beside
        else None,
    )


def dense_first(c: Config) -> tuple[bool, ...]:
    """Return for each layer whether it has experts: all but the first `first_k_dense_replace`, or by
    `mlp_layer_types`."""
    kinds = c.values.get("mlp_layer_types")
    if kinds is None:
        return tuple(index >= c.whole("first_k_dense_replace", least=0) for index in range(c.layers))
    if not isinstance(kinds, list) or len(kinds) != c.layers or set(kinds) - {"dense", "sparse"}:
        raise CheckpointError(
            f"config.json: mlp_layer_types must name dense or sparse for each of the {c.layers} layers"
        )
    return tuple(kind == "sparse" for kind in kinds)
