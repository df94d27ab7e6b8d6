"""Weighted sum of the outputs of a token's experts, plus the output of the shared expert.

    y = Σ_e w_e · y_e (+ sigmoid(s) · shared, or + shared where it has no gate)

Experts are added in the order of their numbers, in fp32, the shared one last. The y_e of a zero-computation expert is
the input of the token. Source: transformers
modeling_qwen2_moe.py.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.jit import jit, launch, power_of_2, row_stride, tl
from kernels.op import Args, Case, Make, Op, nbytes

Skipped = tuple[Tensor, int, Tensor]


def _reference(
    y: Tensor,
    weights: Tensor,
    order: Tensor,
    shared: Tensor | None = None,
    logits: Tensor | None = None,
    gate: int = 0,
    dtype: torch.dtype | None = None,
    skipped: Skipped | None = None,
) -> Tensor:
    """y: [tokens · top_k, size], the experts of each token best first; weights fp32, order int32: [tokens, top_k],
    from expert_routes; shared: [tokens, size] of y's type; logits: [tokens, ..] fp32, with the logit of the shared
    expert in column `gate`; skipped: experts of each token, [tokens, top_k] int32, the number from which on they are
    zero-computation experts, and their inputs, [tokens, size] of y's type → [tokens, size] of `dtype` (default:
    y's)."""
    tokens, top_k = weights.shape
    given = y.view(tokens, top_k, y.shape[1]).float()
    if skipped is not None:
        expert_ids, count, inputs = skipped
        given = torch.where((expert_ids < count).unsqueeze(2), given, inputs.float().unsqueeze(1))
    given = given * weights[:, :, None]
    total = torch.zeros((tokens, y.shape[1]), dtype=torch.float32, device=y.device)
    for rank in order.long().unbind(1):
        total += given[torch.arange(tokens, device=y.device), rank]
    if shared is not None:
        total += shared.float() * (1.0 if logits is None else logits[:, gate, None].sigmoid())
    return total.to(dtype or y.dtype)


@jit
def expert_sum_kernel(
    y,
    weights,
    order,
    shared,
    logits,
    expert_ids,
    inputs,
    out,
    shared_row,
    logits_row,
    inputs_row,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,
    GATED: tl.constexpr,
    GATE: tl.constexpr,
    COMPUTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each block of a token. COMPUTED: number of experts that compute their outputs; 0 for all."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = at < SIZE
    total = tl.zeros([BLOCK], tl.float32)
    for number in tl.static_range(TOP_K):
        pair = token * TOP_K + tl.load(order + token * TOP_K + number)
        if COMPUTED:
            expert = tl.load(expert_ids + pair) + at * 0  # the interpreter accepts no scalar in a mask
            value = tl.load(y + pair * SIZE + at, keep & (expert < COMPUTED), 0.0).to(tl.float32)
            value += tl.load(inputs + token * inputs_row + at, keep & (expert >= COMPUTED), 0.0).to(tl.float32)
        else:
            value = tl.load(y + pair * SIZE + at, keep, 0.0).to(tl.float32)
        total += tl.load(weights + pair) * value
    if SHARED:
        value = tl.load(shared + token * shared_row + at, keep, 0.0).to(tl.float32)
        if GATED:
            value = value / (1.0 + tl.exp(-tl.load(logits + token * logits_row + GATE)))
        total += value
    tl.store(out + token * SIZE + at, total.to(out.dtype.element_ty), keep)


def _triton(
    y: Tensor,
    weights: Tensor,
    order: Tensor,
    shared: Tensor | None = None,
    logits: Tensor | None = None,
    gate: int = 0,
    dtype: torch.dtype | None = None,
    skipped: Skipped | None = None,
) -> Tensor:
    (tokens, top_k), size = weights.shape, y.shape[1]
    if len(y) != tokens * top_k or not y.is_contiguous():
        raise ValueError(
            f"y of {list(y.shape)}: must be contiguous, with {tokens * top_k} rows ({tokens} tokens, {top_k} experts)"
        )
    out = torch.empty((tokens, size), dtype=dtype or y.dtype, device=y.device)
    block = min(1024, power_of_2(size))
    launch(
        expert_sum_kernel,
        (tokens, -(-size // block)),
        y,
        weights,
        order,
        y if shared is None else shared,
        weights if logits is None else logits,
        order if skipped is None else skipped[0],
        y if skipped is None else skipped[2],
        out,
        0 if shared is None else row_stride(shared, "shared"),
        0 if logits is None else row_stride(logits, "logits"),
        0 if skipped is None else row_stride(skipped[2], "skipped"),
        SIZE=size,
        TOP_K=top_k,
        SHARED=shared is not None,
        GATED=logits is not None,
        GATE=gate,
        COMPUTED=0 if skipped is None else skipped[1],
        BLOCK=block,
        warps=4 if block >= 512 else 1,
    )
    return out


def _inputs(
    make: Make,
    tokens: int,
    top_k: int,
    size: int,
    *,
    shared: bool = False,
    gate: int | None = None,
    dtype: torch.dtype | None = None,
    steep: bool = False,
    computed: int = 0,
) -> Args:
    """gate: the column of the shared expert's logit. steep: the first and the last expert cancel, and the others vanish
    between them, so that every order gives a different sum. computed: number of 6 experts that are not skipped."""
    weights = make.normal(tokens, top_k, dtype=torch.float32)
    order = make.normal(tokens, top_k, dtype=torch.float32).argsort(1).int()
    own = make.normal(tokens, size) if shared else None
    y = make.normal(tokens * top_k, size)
    if steep:
        ranks, weights = y.view(tokens, top_k, size), torch.ones_like(weights)
        first, last = (order[:, at].long()[:, None, None].expand(-1, 1, size) for at in (0, -1))
        ranks.scatter_(1, first, 2.0**14).scatter_(1, last, -(2.0**14))
    logits = None if gate is None else make.normal(tokens, gate + 1, dtype=torch.float32, scale=2.0)
    if not computed:
        return y, weights, order, own, logits, gate or 0, dtype, None
    expert_ids = make.integers(0, 6, tokens, top_k)
    if not make.meta:
        y[expert_ids.flatten() >= computed] = torch.nan  # not computed
    return y, weights, order, own, logits, gate or 0, dtype, (expert_ids, computed, make.normal(tokens, size))


def _single_row(args: Args, row: int) -> tuple[Args, Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]]:
    y, weights, order, shared, logits, gate, dtype, skipped = args
    top_k, own = weights.shape[1], slice(row, row + 1)
    pairs = y[row * top_k : (row + 1) * top_k]
    beside = (None if one is None else one[own] for one in (shared, logits))
    if skipped is not None:
        skipped = skipped[0][own], skipped[1], skipped[2][own]
    return (pairs, weights[own], order[own], *beside, gate, dtype, skipped), lambda outputs: (outputs[0][own],)


def _traffic(y: Tensor, weights: Tensor, order: Tensor, shared: Tensor | None = None, *rest: object) -> int:
    return nbytes(y, weights, order, shared) + y.nbytes // weights.shape[1]


EXPERT_SUM = Op(
    name="expert_sum",
    reference=_reference,
    triton=_triton,
    inputs=_inputs,
    cases=(
        Case("one", {"tokens": 1, "top_k": 1, "size": 64}),
        Case("odd", {"tokens": 7, "top_k": 3, "size": 77}),
        Case("shared", {"tokens": 3, "top_k": 2, "size": 40, "shared": True}),
        Case("gated", {"tokens": 5, "top_k": 4, "size": 1100, "shared": True, "gate": 6}),
        Case("wide", {"tokens": 4, "top_k": 8, "size": 48, "shared": True, "gate": 60, "dtype": torch.float32}),
        Case("steep", {"tokens": 6, "top_k": 5, "size": 20, "steep": True}),
        Case("skipped", {"tokens": 7, "top_k": 4, "size": 77, "computed": 3}),
        Case("empty", {"tokens": 0, "top_k": 2, "size": 32, "shared": True, "gate": 4}),
        *(Case(f"{tokens}x8x2048", {"tokens": tokens, "top_k": 8, "size": 2048}, bench=True) for tokens in (1, 256)),
        Case("4096x8x2048", {"tokens": 4096, "top_k": 8, "size": 2048}, bench=True),
        Case("4096x4x2048", {"tokens": 4096, "top_k": 4, "size": 2048, "shared": True, "gate": 60}, bench=True),
    ),
    tolerance={torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2},
    traffic=_traffic,
    single_row=_single_row,
    rows=lambda args: args[1].shape[0],
    strided=(3, 4),
)
