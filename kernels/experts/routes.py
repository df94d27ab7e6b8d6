"""Choice and weights of each token's experts: the largest logits win, and the lowest number among equal logits.

    softmax          w_e = exp(l_e - L) / Σ over all experts of exp(l - L)
    softmax_chosen   w_e = exp(l_e - L) / Σ over the chosen ones of exp(l - L)

L is the largest logit; all is computed in fp32. NaN ranks above all numbers, and makes the weights NaN. The numbers are
always valid and distinct experts, whatever the logits. The kernel does not sort: a program takes the largest remaining
key, once for each chosen expert. Source: transformers modeling_qwen3_moe.py, modeling_mixtral.py.
"""

from typing import Literal

import torch
from torch import Tensor

from kernels.jit import jit, launch, power_of_2, row_stride, tl
from kernels.op import Args, Case, Make, Op, independent_rows
from kernels.sampling.float_order import key_value, order_key

Scores = Literal["softmax", "softmax_chosen"]


def route(logits: Tensor, top_k: int, scores: Scores) -> tuple[Tensor, Tensor]:
    """logits: [tokens, num_experts] fp32 → ids and weights of the chosen experts, [tokens, top_k] int64 and fp32, best
    first."""
    values, expert_ids = logits.sort(dim=-1, descending=True, stable=True)
    values, expert_ids = values[:, :top_k], expert_ids[:, :top_k]
    if scores == "softmax_chosen":
        return expert_ids, values.softmax(-1)
    return expert_ids, logits.softmax(-1).gather(1, expert_ids)


def _reference(logits: Tensor, num_experts: int, top_k: int, scores: Scores) -> tuple[Tensor, Tensor, Tensor]:
    """logits: [tokens, num_experts or more] fp32, experts in the first `num_experts` columns → expert_ids int32 and
    weights fp32, best first, and order int32, the places in `expert_ids` in ascending order of the expert's number:
    [tokens, top_k] each."""
    expert_ids, weights = route(logits[:, :num_experts], top_k, scores)
    return expert_ids.int(), weights, expert_ids.argsort(1).int()


@jit
def expert_routes_kernel(
    logits,
    expert_ids,
    weights,
    order,
    logits_row,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    OVER_TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    """One program for each token. Key and number of an expert form one integer, so that no two are equal."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    real = expert < NUM_EXPERTS
    x = tl.load(logits + token * logits_row + expert, real, float("-inf"))
    none = -0x8000000000000000
    both = (order_key(x).to(tl.int64) << 32) | (0x7FFFFFFF - expert).to(tl.int64)
    both = tl.where(real, both, none)
    lane = tl.arange(0, LANES)
    taken = tl.full([LANES], none, tl.int64)
    for number in range(TOP_K):
        most = tl.max(both, 0)
        both = tl.where(both == most, none, both)
        taken = tl.where(lane == number, most, taken)
    keep = lane < TOP_K
    found = 0x7FFFFFFF - (taken & 0x7FFFFFFF).to(tl.int32)
    value = key_value((taken >> 32).to(tl.int32))
    best = tl.max(tl.where(lane == 0, taken >> 32, -0x80000000), 0)
    best = key_value(best.to(tl.int32))
    share = tl.where(keep, tl.exp(value - best), 0.0)
    whole = tl.sum(share, 0) if OVER_TOP_K else tl.sum(tl.where(real, tl.exp(x - best), 0.0), 0)
    place = token * TOP_K + lane
    tl.store(expert_ids + place, found, keep)
    tl.store(weights + place, share / whole, keep)
    lower = (found[None, :] < found[:, None]) & keep[None, :]
    tl.store(order + token * TOP_K + tl.sum(lower.to(tl.int32), 1), lane, keep)


def _triton(logits: Tensor, num_experts: int, top_k: int, scores: Scores) -> tuple[Tensor, Tensor, Tensor]:
    if not 1 <= top_k <= num_experts <= logits.shape[1]:
        raise ValueError(
            f"top_k={top_k}, num_experts={num_experts}, {logits.shape[1]} logits: each must be at least the one before"
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
        row_stride(logits, "logits"),
        NUM_EXPERTS=num_experts,
        TOP_K=top_k,
        OVER_TOP_K=scores == "softmax_chosen",
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
    scores: Scores = "softmax_chosen",
    *,
    more: int = 0,
    step: float = 0.0,
    odd: bool = False,
) -> Args:
    """more: number of logits after the logits of the experts. step: logits are multiples of it, so that many are equal,
    and zeros of both signs. odd: some logits are infinite and some NaN."""
    logits = make.normal(tokens, num_experts + more, dtype=torch.float32, scale=2.0)
    if step:
        logits = (logits / step).round() * step
    if odd:
        logits[1::4, ::2] = float("nan")
        logits[2::4] = float("nan")
        logits[3::4, 1:] = float("-inf")
        logits[4::4, :2] = float("inf")
    return logits, num_experts, top_k, scores


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
        Case("empty", {"tokens": 0, "num_experts": 16, "top_k": 2}),
        *(
            Case(f"8-of-128-{tokens}", {"tokens": tokens, "num_experts": 128, "top_k": 8}, bench=True)
            for tokens in (1, 256)
        ),
        Case("8-of-128-4096", {"tokens": 4096, "num_experts": 128, "top_k": 8}, bench=True),
        Case("16-of-512", {"tokens": 256, "num_experts": 512, "top_k": 16, "scores": "softmax"}, bench=True),
    ),
    tolerance={torch.float32: 1e-5, torch.bfloat16: 1e-5},
    traffic=lambda logits, num_experts, top_k, scores: logits.shape[0] * 4 * (num_experts + 3 * top_k),
    single_row=independent_rows(0),
    strided=(0,),
)
