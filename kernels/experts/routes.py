"""Choice and weights of each token's experts: the largest scores win, and the lowest number among equal scores.

    softmax          s_e = exp(l_e - L) / Σ over all experts of exp(l - L)
    softmax_chosen   s_e = exp(l_e - L) / Σ over the chosen ones of exp(l - L)
    sigmoid          s_e = 1 / (1 + exp(-l_e))
    sparsemixer      s_e = 1 / Σ over the near ones of exp(l - l_e). In turn, e is the expert with the largest logit
                     that is left; near are those left with l_e - l ≤ 2 · jitter · max(|l|, l_e)

L is the largest logit; all is computed in fp32. The weight of a chosen expert is w_e = scale · s_e, or, `normalized`,
scale · s_e / (Σ over the chosen ones of s + 10⁻²⁰). A correction is added to the scores that are compared, but not to
the weights. With groups, experts are chosen from the best groups only.

NaN ranks above all numbers, and makes the weights NaN. The numbers are always valid and distinct experts, whatever the
logits. The kernel does not sort: a program takes the largest remaining key, once for each chosen expert. Source:
transformers modeling_qwen3_moe.py, modeling_mixtral.py, modeling_deepseek_v2.py, modeling_deepseek_v3.py,
modeling_phimoe.py.
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from kernels.jit import jit, launch, power_of_2, row_stride, tl
from kernels.op import Args, Case, Make, Op, independent_rows
from kernels.sampling.float_order import key_value, order_key

LEAST_SUM = 1e-20  # added to the sum by which weights are divided, which can be 0


class Routing(NamedTuple):
    """How experts are chosen and weighed."""

    top_k: int
    scores: Literal["softmax", "softmax_chosen", "sigmoid", "sparsemixer"]
    groups: int = 1  # of equal numbers of experts, in order
    groups_kept: int = 1
    group_score: Literal["max", "top_two"] = "top_two"  # largest or sum of the two largest compared scores of a group
    normalized: bool = False
    scale: float = 1.0
    jitter: float = 0.0  # of sparsemixer

    @property
    def by_logits(self) -> bool:
        """Whether logits are compared, which are in the order of the scores, if nothing is added to the scores."""
        return self.groups == 1 and self.scores != "sigmoid"


def route(logits: Tensor, routing: Routing, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """logits: [tokens, num_experts] fp32; correction: [num_experts] fp32 → ids and weights of the chosen experts,
    [tokens, top_k] int64 and fp32, best first."""
    softmax = routing.scores != "sigmoid"
    if routing.by_logits and correction is None:
        compared = logits
    else:
        compared = logits.softmax(-1) if softmax else logits.sigmoid()
        compared = compared if correction is None else compared + correction
        compared = _in_best_groups(compared, routing)
    expert_ids = compared.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_k]
    if routing.scores == "sparsemixer":
        weights = sparsemixer_weights(logits, expert_ids, routing.jitter)
    elif routing.scores == "softmax_chosen":
        weights = logits.gather(1, expert_ids).softmax(-1)
    else:
        weights = (logits.softmax(-1) if softmax else logits.sigmoid()).gather(1, expert_ids)
    if routing.normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + LEAST_SUM)
    return expert_ids, weights * routing.scale if routing.scale != 1.0 else weights


def sparsemixer_weights(logits: Tensor, expert_ids: Tensor, jitter: float) -> Tensor:
    """Return the weights of experts that are chosen by logits, best first, [tokens, top_k] fp32. logits: [tokens,
    num_experts] fp32; expert_ids: [tokens, top_k] int64."""
    left, weights = logits, []
    for chosen in expert_ids.split(1, 1):
        top = left.gather(1, chosen)
        far = top - logits > 2 * jitter * logits.abs().maximum(top)
        weights.append(left.masked_fill(far, float("-inf")).softmax(-1).gather(1, chosen))
        left = left.scatter(1, chosen, float("-inf"))
    return torch.cat(weights, 1)


def _in_best_groups(compared: Tensor, routing: Routing) -> Tensor:
    """Return the scores, with -inf outside of the best groups."""
    if routing.groups == 1:
        return compared
    grouped = compared.unflatten(-1, (routing.groups, -1))
    most = grouped.sort(dim=-1, descending=True).values
    found = most[..., 0] if routing.group_score == "max" else most[..., :2].sum(-1)
    best = found.sort(dim=-1, descending=True, stable=True).indices[:, : routing.groups_kept]
    keep = torch.zeros_like(found, dtype=torch.bool).scatter_(1, best, True)
    return grouped.masked_fill(~keep[..., None], float("-inf")).flatten(-2)


def _reference(
    logits: Tensor, num_experts: int, routing: Routing, correction: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """logits: [tokens, num_experts or more] fp32, experts in the first `num_experts` columns; correction:
    [num_experts] fp32 → expert_ids int32 and weights fp32, best first, and order int32, the places in `expert_ids` in
    ascending order of the expert's number: [tokens, top_k] each."""
    expert_ids, weights = route(logits[:, :num_experts], routing, correction)
    return expert_ids.int(), weights, expert_ids.argsort(1).int()


@jit
def expert_routes_kernel(
    logits,
    expert_ids,
    weights,
    order,
    correction,
    scale,
    jitter,
    logits_row,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    OVER_TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    SPARSEMIXER: tl.constexpr,
    CORRECTED: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_KEPT: tl.constexpr,
    GROUP_LANES: tl.constexpr,
    TOP_TWO: tl.constexpr,
    NORMALIZED: tl.constexpr,
    SCALED: tl.constexpr,
    LEAST_SUM: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    """One program for each token. Key and number of an expert form one integer, so that no two are equal."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    real = expert < NUM_EXPERTS
    x = tl.load(logits + token * logits_row + expert, real, float("-inf"))
    none = -0x8000000000000000
    compared = x
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-x))
    elif CORRECTED or GROUPS > 1:
        scores = tl.where(real, tl.exp(x - tl.max(x, 0)), 0.0)
        scores /= tl.sum(scores, 0)
    if SIGMOID or CORRECTED or GROUPS > 1:
        compared = scores
    if CORRECTED:
        compared += tl.load(correction + expert, real, 0.0)
    both = (order_key(compared).to(tl.int64) << 32) | (0x7FFFFFFF - expert).to(tl.int64)
    both = tl.where(real, both, none)
    if GROUPS > 1:
        group = expert // (NUM_EXPERTS // GROUPS)
        group_lane = tl.arange(0, GROUP_LANES)
        ranked = tl.full([GROUP_LANES], none, tl.int64)
        for number in range(GROUPS):
            inside = tl.where(group == number, both, none)
            first = tl.max(inside, 0)
            total = key_value((first >> 32).to(tl.int32))
            if TOP_TWO:
                second = tl.max(tl.where(inside == first, none, inside), 0)
                total += key_value((second >> 32).to(tl.int32))
            key = (order_key(total).to(tl.int64) << 32) | (0x7FFFFFFF - number)
            ranked = tl.where(group_lane == number, key, ranked)
        kept = group < 0
        for _ in range(GROUPS_KEPT):
            first = tl.max(ranked, 0)
            ranked = tl.where(ranked == first, none, ranked)
            kept |= group == 0x7FFFFFFF - (first & 0x7FFFFFFF).to(tl.int32)
        both = tl.where(kept, both, none)
    lane = tl.arange(0, LANES)
    taken = tl.full([LANES], none, tl.int64)
    share = tl.zeros([LANES], tl.float32)
    for number in range(TOP_K):
        most = tl.max(both, 0)
        if SIGMOID or CORRECTED or GROUPS > 1:
            share = tl.where(lane == number, tl.sum(tl.where(both == most, scores, 0.0), 0), share)
        if SPARSEMIXER:
            top = key_value((most >> 32).to(tl.int32))
            near = (both != none) & (top - x <= 2.0 * jitter * tl.maximum(tl.abs(x), top))
            share = tl.where(lane == number, 1.0 / tl.sum(tl.where(near, tl.exp(x - top), 0.0), 0), share)
        both = tl.where(both == most, none, both)
        taken = tl.where(lane == number, most, taken)
    keep = lane < TOP_K
    found = 0x7FFFFFFF - (taken & 0x7FFFFFFF).to(tl.int32)
    if not (SIGMOID or SPARSEMIXER or CORRECTED or GROUPS > 1):
        value = key_value((taken >> 32).to(tl.int32))
        best = tl.max(tl.where(lane == 0, taken >> 32, -0x80000000), 0)
        best = key_value(best.to(tl.int32))
        share = tl.where(keep, tl.exp(value - best), 0.0)
        share /= tl.sum(share, 0) if OVER_TOP_K else tl.sum(tl.where(real, tl.exp(x - best), 0.0), 0)
    if NORMALIZED:
        share /= tl.sum(tl.where(keep, share, 0.0), 0) + LEAST_SUM
    if SCALED:
        share *= scale
    place = token * TOP_K + lane
    tl.store(expert_ids + place, found, keep)
    tl.store(weights + place, share, keep)
    lower = (found[None, :] < found[:, None]) & keep[None, :]
    tl.store(order + token * TOP_K + tl.sum(lower.to(tl.int32), 1), lane, keep)


def _triton(
    logits: Tensor, num_experts: int, routing: Routing, correction: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    top_k, groups = routing.top_k, routing.groups
    if not 1 <= top_k <= num_experts <= logits.shape[1]:
        raise ValueError(
            f"top_k={top_k}, num_experts={num_experts}, {logits.shape[1]} logits: each must be at least the one before"
        )
    if (
        num_experts % groups
        or not 1 <= routing.groups_kept <= groups
        or groups * top_k > routing.groups_kept * num_experts
    ):
        raise ValueError(
            f"{num_experts} experts in {groups} groups, of which {routing.groups_kept} are kept: no {top_k} experts"
        )
    if routing.scores in ("softmax_chosen", "sparsemixer") and (groups > 1 or correction is not None):
        raise ValueError(
            f"{routing.scores}: groups and a correction need scores of all experts; normalize those instead"
        )
    shape, device = (logits.shape[0], top_k), logits.device
    expert_ids = torch.empty(shape, dtype=torch.int32, device=device)
    weights = torch.empty(shape, dtype=torch.float32, device=device)
    order = torch.empty(shape, dtype=torch.int32, device=device)
    block = power_of_2(num_experts)
    launch(
        expert_routes_kernel,
        (shape[0],),
        logits,
        expert_ids,
        weights,
        order,
        weights if correction is None else correction,
        routing.scale,
        routing.jitter,
        row_stride(logits, "logits"),
        NUM_EXPERTS=num_experts,
        TOP_K=top_k,
        OVER_TOP_K=routing.scores == "softmax_chosen",
        SIGMOID=routing.scores == "sigmoid",
        SPARSEMIXER=routing.scores == "sparsemixer",
        CORRECTED=correction is not None,
        GROUPS=groups,
        GROUPS_KEPT=routing.groups_kept,
        GROUP_LANES=power_of_2(groups),
        TOP_TWO=routing.group_score == "top_two",
        NORMALIZED=routing.normalized,
        SCALED=routing.scale != 1.0,
        LEAST_SUM=LEAST_SUM,
        BLOCK=block,
        LANES=power_of_2(top_k),
        warps=max(1, block // 512),
    )
    return expert_ids, weights, order


def _inputs(
    make: Make,
    tokens: int,
    num_experts: int,
    top_k: int,
    scores: Literal["softmax", "softmax_chosen", "sigmoid", "sparsemixer"] = "softmax_chosen",
    *,
    groups: tuple[int, int] = (1, 1),
    group_score: Literal["max", "top_two"] = "top_two",
    corrected: bool = False,
    normalized: bool = False,
    scale: float = 1.0,
    more: int = 0,
    step: float = 0.0,
    odd: bool = False,
    jitter: float = 0.0,
) -> Args:
    """groups: their number, and how many are kept. more: number of logits after the logits of the experts. step: logits
    are multiples of it, so that many are equal, and zeros of both signs. odd: some logits are infinite and some NaN."""
    logits = make.normal(tokens, num_experts + more, dtype=torch.float32, scale=2.0)
    if step:
        logits = (logits / step).round() * step
    if odd:
        logits[1::4, ::2] = float("nan")
        logits[2::4] = float("nan")
        logits[3::4, 1:] = float("-inf")
        logits[4::4, :2] = float("inf")
    correction = make.normal(num_experts, dtype=torch.float32, scale=0.3) if corrected else None
    return logits, num_experts, Routing(top_k, scores, *groups, group_score, normalized, scale, jitter), correction


_CORRECTED: dict[str, Any] = {"corrected": True, "normalized": True}
_TWO_OF_FOUR: dict[str, Any] = {"scores": "sigmoid", "groups": (4, 2), "normalized": True}
_GROUPS: dict[str, Any] = {"groups": (6, 2), "group_score": "max", "scale": 16.0}
_V3: dict[str, Any] = {"groups": (8, 4), "scale": 2.5, **_CORRECTED}
_GROUPS_CORRECTED: dict[str, Any] = {"groups": (5, 2), "scale": 2.5, **_CORRECTED}

EXPERT_ROUTES = Op(
    name="expert_routes",
    reference=_reference,
    triton=_triton,
    inputs=_inputs,
    cases=(
        Case("one", {"tokens": 1, "num_experts": 8, "top_k": 2}),
        Case("odd", {"tokens": 9, "num_experts": 60, "top_k": 4, "scores": "softmax", "more": 1}),
        Case("equal", {"tokens": 12, "num_experts": 37, "top_k": 16, "step": 1.0}),
        Case("equal-softmax", {"tokens": 5, "num_experts": 37, "top_k": 9, "scores": "softmax", "step": 2.0}),
        Case("many", {"tokens": 3, "num_experts": 512, "top_k": 10, "scores": "softmax"}),
        Case("single", {"tokens": 6, "num_experts": 5, "top_k": 1}),
        Case("all", {"tokens": 4, "num_experts": 7, "top_k": 7, "scores": "softmax"}),
        Case("alone", {"tokens": 2, "num_experts": 1, "top_k": 1}),
        Case("no-numbers", {"tokens": 10, "num_experts": 11, "top_k": 3, "odd": True}),
        Case("no-numbers-softmax", {"tokens": 10, "num_experts": 33, "top_k": 32, "scores": "softmax", "odd": True}),
        Case("sigmoid", {"tokens": 9, "num_experts": 21, "top_k": 5, "scores": "sigmoid", "more": 1, "scale": 2.5}),
        Case("corrected", {"tokens": 7, "num_experts": 37, "top_k": 6, "scores": "softmax", **_CORRECTED}),
        Case("groups", {"tokens": 8, "num_experts": 48, "top_k": 6, "scores": "softmax", **_GROUPS}),
        Case("deepseek", {"tokens": 8, "num_experts": 40, "top_k": 6, "scores": "sigmoid", **_GROUPS_CORRECTED}),
        Case("groups-equal", {"tokens": 5, "num_experts": 40, "top_k": 10, "step": 2.0, **_TWO_OF_FOUR}),
        Case("groups-no-numbers", {"tokens": 9, "num_experts": 40, "top_k": 6, "odd": True, **_TWO_OF_FOUR}),
        Case("sparsemixer", {"tokens": 9, "num_experts": 11, "top_k": 2, "scores": "sparsemixer", "jitter": 0.2}),
        Case("empty", {"tokens": 0, "num_experts": 16, "top_k": 2}),
        *(
            Case(f"8-of-128-{tokens}", {"tokens": tokens, "num_experts": 128, "top_k": 8}, bench=True)
            for tokens in (1, 256)
        ),
        Case("8-of-128-4096", {"tokens": 4096, "num_experts": 128, "top_k": 8}, bench=True),
        Case("deepseek-v3", {"tokens": 256, "num_experts": 256, "top_k": 8, "scores": "sigmoid", **_V3}, bench=True),
        Case(
            "phi-moe",
            {"tokens": 256, "num_experts": 16, "top_k": 2, "scores": "sparsemixer", "jitter": 0.01},
            bench=True,
        ),
        Case("16-of-512", {"tokens": 256, "num_experts": 512, "top_k": 16, "scores": "softmax"}, bench=True),
    ),
    tolerance={torch.float32: 1e-5, torch.bfloat16: 1e-5},
    traffic=lambda logits, num_experts, routing, _: logits.shape[0] * 4 * (num_experts + 3 * routing.top_k),
    single_row=independent_rows(0),
    strided=(0,),
)
