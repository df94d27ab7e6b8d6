"""Forbid end and stop tokens in replies below their minimum length, unless no other token is possible: a reply that
ends early is better than a reply that cannot continue.
"""

import torch
from torch import Tensor

from kernels.cpu import logit_processors
from kernels.jit import jit, launch, row_stride, tl
from kernels.op import Args, Case, Make, Op, nbytes


def _reference(logits: Tensor, users: Tensor, stops: Tensor) -> Tensor:
    """logits: [rows, vocab] fp32; users: [n] int32, different rows; stops: [n, most] int32, tokens, padded with -1 at
    the end → logits, changed in place."""
    chosen = users.long()
    barred = torch.zeros(len(users), logits.shape[1] + 1, dtype=torch.bool, device=logits.device)
    barred.scatter_(1, stops.long() % (logits.shape[1] + 1), True)  # -1 becomes one past the vocabulary
    left = logits[chosen].masked_fill(barred[:, :-1], -torch.inf)
    stuck = (left == -torch.inf).all(1, keepdim=True)
    logits[chosen] = torch.where(stuck, logits[chosen], left)
    return logits


@jit(varying=("most", "stops_row"))
def min_tokens_kernel(logits, users, stops, most, stops_row, logits_row, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """One program for each user: looks for another possible token, and usually finds one in the first block."""
    user = tl.program_id(0)
    own, mine = logits + tl.load(users + user).to(tl.int64) * logits_row, stops + user * stops_row
    found, start = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    while (found == 0) & (start < VOCAB):
        at = start + tl.arange(0, BLOCK)
        possible = (tl.load(own + at, at < VOCAB, float("-inf")) != float("-inf")).to(tl.int32)
        for number in range(most):
            possible = tl.where(at == tl.load(mine + number), 0, possible)
        found = tl.max(possible, 0)
        start += BLOCK
    if found > 0:
        for number in range(most):
            stop = tl.load(mine + number)
            if stop >= 0:
                tl.store(own + stop, float("-inf"))


def _triton(logits: Tensor, users: Tensor, stops: Tensor) -> Tensor:
    launch(
        min_tokens_kernel,
        (users.shape[0],),
        *(logits, users, stops, stops.shape[1], row_stride(stops, "stops"), row_stride(logits, "logits")),
        VOCAB=logits.shape[1],
        BLOCK=512,
    )
    return logits


def _inputs(make: Make, rows: int, users: int, most: int, vocab: int) -> Args:
    """Include a user with nothing but stop tokens left, one with a token at the end, and one with fewer stop tokens."""
    logits = make.normal(rows, vocab, dtype=torch.float32)
    chosen = make.permutation(rows)[:users].contiguous()
    stops = (torch.arange(most, device=make.device) * 7 % vocab).int().repeat(users, 1)
    if users > 2 and not make.meta:
        logits[chosen[:2].long()] = -torch.inf
        logits[chosen[0].long(), stops[0].long()] = 1.0
        logits[chosen[1].long(), stops[1, 0].long()] = 1.0
        logits[chosen[1].long(), vocab - 1] = -5.0
        stops[2, 1:] = -1
    return logits, chosen, stops


MIN_TOKENS = Op(
    name="min_tokens",
    reference=_reference,
    triton=_triton,
    inputs=_inputs,
    cases=(
        Case("some", {"rows": 5, "users": 4, "most": 3, "vocab": 97}),
        Case("long", {"rows": 3, "users": 3, "most": 5, "vocab": 1500}),
        Case("one", {"rows": 1, "users": 1, "most": 1, "vocab": 1}),
        Case("nobody", {"rows": 2, "users": 0, "most": 1, "vocab": 64}),
        Case("empty", {"rows": 0, "users": 0, "most": 1, "vocab": 32}),
        Case("256x151936", {"rows": 256, "users": 256, "most": 5, "vocab": 151936}, bench=True),
    ),
    tolerance={torch.float32: 0.0, torch.bfloat16: 0.0},
    compiled=logit_processors.min_tokens,
    cpu_cases=(Case("8x151936", {"rows": 8, "users": 8, "most": 5, "vocab": 151936}),),
    traffic=lambda logits, users, stops: nbytes(users, stops) * 2,
    strided=(0, 2),
)
