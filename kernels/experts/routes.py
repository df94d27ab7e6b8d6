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

from kernels.jit import jit, launch, power_of_2, rows_of, tl
from kernels.op import Args, Case, Make, Op, sliced
from kernels.sampling.float_order import key_value, order_key

Scores = Literal["softmax", "softmax_chosen"]


def route(logits: Tensor, chosen: int, scores: Scores) -> tuple[Tensor, Tensor]:
    """logits: [tokens, count] fp32 → numbers and weights of the chosen experts, [tokens, chosen] int64 and fp32, best
    first."""
    values, numbers = logits.sort(dim=-1, descending=True, stable=True)
    values, numbers = values[:, :chosen], numbers[:, :chosen]
    if scores == "softmax_chosen":
        return numbers, values.softmax(-1)
    return numbers, logits.softmax(-1).gather(1, numbers)


def _reference(logits: Tensor, count: int, chosen: int, scores: Scores) -> tuple[Tensor, Tensor, Tensor]:
    """logits: [tokens, count or more] fp32, experts in the first `count` columns → numbers int32 and weights fp32, best
    first, and order int32, the places in `numbers` in ascending order of the expert's number: [tokens, chosen] each."""
    numbers, weights = route(logits[:, :count], chosen, scores)
    return numbers.int(), weights, numbers.argsort(1).int()


@jit
def expert_routes_kernel(
    logits,
    numbers,
    weights,
    order,
    logits_row,
    COUNT: tl.constexpr,
    CHOSEN: tl.constexpr,
    OF_CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    """One program for each token. Key and number of an expert form one integer, so that no two are equal."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    real = expert < COUNT
    x = tl.load(logits + token * logits_row + expert, real, float("-inf"))
    none = -0x8000000000000000
    both = (order_key(x).to(tl.int64) << 32) | (0x7FFFFFFF - expert).to(tl.int64)
    both = tl.where(real, both, none)
    lane = tl.arange(0, LANES)
    taken = tl.full([LANES], none, tl.int64)
    for number in range(CHOSEN):
        most = tl.max(both, 0)
        both = tl.where(both == most, none, both)
        taken = tl.where(lane == number, most, taken)
    keep = lane < CHOSEN
    found = 0x7FFFFFFF - (taken & 0x7FFFFFFF).to(tl.int32)
    value = key_value((taken >> 32).to(tl.int32))
    best = tl.max(tl.where(lane == 0, taken >> 32, -0x80000000), 0)
    best = key_value(best.to(tl.int32))
    share = tl.where(keep, tl.exp(value - best), 0.0)
    whole = tl.sum(share, 0) if OF_CHOSEN else tl.sum(tl.where(real, tl.exp(x - best), 0.0), 0)
    place = token * CHOSEN + lane
    tl.store(numbers + place, found, keep)
    tl.store(weights + place, share / whole, keep)
    lower = (found[None, :] < found[:, None]) & keep[None, :]
    tl.store(order + token * CHOSEN + tl.sum(lower.to(tl.int32), 1), lane, keep)


def _triton(logits: Tensor, count: int, chosen: int, scores: Scores) -> tuple[Tensor, Tensor, Tensor]:
    if not 1 <= chosen <= count <= logits.shape[1]:
        raise ValueError(
            f"{chosen} of {count} experts by {logits.shape[1]} logits: each number must be at least the one before"
        )
    shape, device = (logits.shape[0], chosen), logits.device
    numbers = torch.empty(shape, dtype=torch.int32, device=device)
    weights = torch.empty(shape, dtype=torch.float32, device=device)
    order = torch.empty(shape, dtype=torch.int32, device=device)
    block = power_of_2(count)
    launch(
        expert_routes_kernel,
        (shape[0],),
        logits,
        numbers,
        weights,
        order,
        rows_of(logits, "logits"),
        COUNT=count,
        CHOSEN=chosen,
        OF_CHOSEN=scores == "softmax_chosen",
        BLOCK=block,
        LANES=power_of_2(chosen),
        warps=max(1, block // 512),
    )
    return numbers, weights, order


def _inputs(
    make: Make,
    tokens: int,
    count: int,
    chosen: int,
    scores: Scores = "softmax_chosen",
    *,
    more: int = 0,
    step: float = 0.0,
    odd: bool = False,
) -> Args:
    """more: number of logits after the logits of the experts. step: logits are multiples of it, so that many are equal,
    and zeros of both signs. odd: some logits are infinite and some NaN."""
    logits = make.normal(tokens, count + more, dtype=torch.float32, scale=2.0)
    if step:
        logits = (logits / step).round() * step
    if odd:
        logits[1::4, ::2] = float("nan")
        logits[2::4] = float("nan")
        logits[3::4, 1:] = float("-inf")
        logits[4::4, :2] = float("inf")
    return logits, count, chosen, scores


EXPERT_ROUTES = Op(
    name="expert_routes",
    reference=_reference,
    triton=_triton,
    inputs=_inputs,
    cases=(
        Case("one", {"tokens": 1, "count": 8, "chosen": 2}),
        Case("odd", {"tokens": 9, "count": 60, "chosen": 4, "scores": "softmax", "more": 1}),
        Case("equal", {"tokens": 12, "count": 37, "chosen": 16, "step": 1.0}),
        Case("equal-softmax", {"tokens": 5, "count": 37, "chosen": 9, "scores": "softmax", "step": 2.0}),
        Case("many", {"tokens": 3, "count": 512, "chosen": 10, "scores": "softmax"}),
        Case("single", {"tokens": 6, "count": 5, "chosen": 1}),
        Case("all", {"tokens": 4, "count": 7, "chosen": 7, "scores": "softmax"}),
        Case("alone", {"tokens": 2, "count": 1, "chosen": 1}),
        Case("no-numbers", {"tokens": 10, "count": 11, "chosen": 3, "odd": True}),
        Case("no-numbers-softmax", {"tokens": 10, "count": 33, "chosen": 32, "scores": "softmax", "odd": True}),
        Case("empty", {"tokens": 0, "count": 16, "chosen": 2}),
        *(Case(f"8-of-128-{tokens}", {"tokens": tokens, "count": 128, "chosen": 8}, bench=True) for tokens in (1, 256)),
        Case("8-of-128-4096", {"tokens": 4096, "count": 128, "chosen": 8}, bench=True),
        Case("16-of-512", {"tokens": 256, "count": 512, "chosen": 16, "scores": "softmax"}, bench=True),
    ),
    tolerance={torch.float32: 1e-5, torch.bfloat16: 1e-5},
    traffic=lambda logits, count, chosen, scores: logits.shape[0] * 4 * (count + 3 * chosen),
    alone=sliced(0),
    strided=(0,),
)
