"""Forbid tokens that a bit mask excludes: logit ← -∞ where the token's bit is 0.

Bit i of a word is token 32 · word + i, the format of grammars. Logits are not read, and words without a 0 write
nothing.
"""

import torch
from torch import Tensor

from kernels.cpu import logit_processors
from kernels.jit import jit, launch, row_stride, tl
from kernels.op import Args, Case, Make, Op


def _reference(logits: Tensor, users: Tensor, words: Tensor) -> Tensor:
    """logits: [rows, vocab] fp32; users: [n] int32, different rows; words: [n, ceil(vocab / 32)] int32. → logits,
    changed in place."""
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = (words[:, :, None] >> bits & 1).flatten(1)[:, : logits.shape[1]].bool()
    chosen = users.long()
    logits[chosen] = torch.where(allowed, logits[chosen], -torch.inf)
    return logits


@jit
def token_mask_kernel(logits, users, words, logits_row, words_row, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """One program for each block of a user's tokens."""
    user = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words + user * words_row + at // 32, at < VOCAB, -1)
    row = tl.load(users + user).to(tl.int64)
    tl.store(logits + row * logits_row + at, tl.full((BLOCK,), float("-inf"), tl.float32), (word >> (at % 32)) & 1 == 0)


def _triton(logits: Tensor, users: Tensor, words: Tensor) -> Tensor:
    vocab, block = logits.shape[1], 4096
    launch(
        token_mask_kernel,
        (users.shape[0], -(-vocab // block)),
        logits,
        users,
        words,
        row_stride(logits, "logits"),
        row_stride(words, "words"),
        VOCAB=vocab,
        BLOCK=block,
        warps=8,
    )
    return logits


def _inputs(make: Make, rows: int, users: int, vocab: int) -> Args:
    logits = make.normal(rows, vocab, dtype=torch.float32)
    words = make.integers(-(2**31), 2**31, users, -(-vocab // 32))
    if users > 1:
        words[0], words[1] = -1, 0
    return logits, make.permutation(rows)[:users].contiguous(), words


TOKEN_MASK = Op(
    name="token_mask",
    reference=_reference,
    triton=_triton,
    inputs=_inputs,
    cases=(
        Case("one", {"rows": 1, "users": 1, "vocab": 1}),
        Case("odd", {"rows": 5, "users": 3, "vocab": 97}),
        Case("long", {"rows": 3, "users": 3, "vocab": 8229}),
        Case("nobody", {"rows": 3, "users": 0, "vocab": 64}),
        Case("empty", {"rows": 0, "users": 0, "vocab": 32}),
        Case("256x151936", {"rows": 256, "users": 256, "vocab": 151936}, bench=True),
        Case("16x128256", {"rows": 256, "users": 16, "vocab": 128256}, bench=True),
    ),
    tolerance={torch.float32: 0.0, torch.bfloat16: 0.0},
    # half the bits of random words are 0
    compiled=logit_processors.token_mask,
    cpu_cases=(Case("8x151936", {"rows": 8, "users": 8, "vocab": 151936}),),
    traffic=lambda logits, users, words: words.nbytes + users.shape[0] * logits.shape[1] * logits.element_size() // 2,
    strided=(0, 2),
)
