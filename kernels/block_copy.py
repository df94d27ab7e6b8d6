"""Copies of whole blocks of the KV cache: all layers of a block are contiguous, so a copy is one range of bytes."""

import torch
from torch import Tensor

from kernels.jit import jit, launch, tl
from kernels.op import Args, Case, Make, Op

_WORDS = 2048  # 32-bit words that a program copies


def _reference(pages: Tensor, pairs: Tensor) -> Tensor:
    """pages: [blocks, …]; pairs: [copies, 2] int32, from and to; no other copy reads a block that is written. → pages,
    changed in place."""
    source, target = pairs.long().unbind(1)
    pages.view(torch.uint8)[target] = pages.view(torch.uint8)[source]
    return pages


@jit
def block_copy_kernel(pages, pairs, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """One program for each piece of each copy."""
    pair = pairs + tl.program_id(0) * 2
    source, target = tl.load(pair).to(tl.int64), tl.load(pair + 1).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = at < WORDS
    tl.store(pages + target * WORDS + at, tl.load(pages + source * WORDS + at, keep, 0), keep)


def _triton(pages: Tensor, pairs: Tensor) -> Tensor:
    size = pages[:1].nbytes
    if size % 4:
        raise ValueError(f"block_copy: a block has {size} bytes; it must be a multiple of 4")
    words = size // 4
    launch(
        block_copy_kernel,
        (pairs.shape[0], -(-words // _WORDS)),
        pages.view(torch.int32),
        pairs,
        WORDS=words,
        BLOCK=_WORDS,
        warps=4,
    )
    return pages


def _inputs(make: Make, copies: int, layers: int, block_tokens: int, kv_heads: int, dim: int) -> Args:
    pages = make.normal(2 * copies + 1, layers, 2, block_tokens, kv_heads, dim)
    return pages, make.permutation(2 * copies + 1)[: 2 * copies].view(copies, 2).contiguous()


BLOCK_COPY = Op(
    name="block_copy",
    reference=_reference,
    triton=_triton,
    inputs=_inputs,
    cases=(
        Case("some", {"copies": 3, "layers": 2, "block_tokens": 3, "kv_heads": 2, "dim": 10}),
        Case("large", {"copies": 1, "layers": 3, "block_tokens": 16, "kv_heads": 2, "dim": 64}),
        Case("empty", {"copies": 0, "layers": 1, "block_tokens": 2, "kv_heads": 1, "dim": 8}),
        Case("64-of-llama-8b", {"copies": 64, "layers": 32, "block_tokens": 16, "kv_heads": 8, "dim": 128}, bench=True),
    ),
    tolerance={torch.float32: 0.0, torch.float16: 0.0, torch.bfloat16: 0.0},
    traffic=lambda pages, pairs: 2 * pairs.shape[0] * pages[:1].nbytes,
)
