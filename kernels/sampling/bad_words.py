"""Forbid the last token of a banned word if the reply ends with the word's other tokens.

Known tokens are read from the device's table, because the host does not know the latest ones yet. The prompt does not
count: a word that begins in the prompt is not banned.
"""

import torch
from torch import Tensor

from kernels.cpu import logit_processors
from kernels.jit import jit, launch, row_stride, tl
from kernels.op import Args, Case, Make, Op, nbytes


def _reference(
    logits: Tensor,
    slot: Tensor,
    lengths: Tensor,
    tokens: Tensor,
    prompt_tokens: Tensor,
    rows: Tensor,
    lasts: Tensor,
    prefixes: Tensor,
) -> Tensor:
    """logits: [rows, vocab] fp32; slot, lengths: [rows] int32; tokens: [slots, width] int32; prompt_tokens: [slots]
    int32; rows, lasts: [words] int32, row and last token of each word; prefixes: [words, longest] int32, its other
    tokens, padded with -1 at the start → logits, changed in place."""
    row, longest = rows.long(), prefixes.shape[1]
    line = slot[row].long()
    places = lengths[row].long()[:, None] - longest + torch.arange(longest, device=logits.device)
    equal = tokens[line[:, None], places.clamp(min=0)] == prefixes
    complete = ((prefixes < 0) | (equal & (places >= prompt_tokens[line].long()[:, None]))).all(1)
    logits[row[complete], lasts[complete].long()] = -torch.inf
    return logits


@jit(varying=("words", "longest"))
def bad_words_kernel(
    logits,
    slot,
    lengths,
    tokens,
    prompt_tokens,
    rows,
    lasts,
    prefixes,
    words,
    longest,
    logits_row,
    tokens_row,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each block of words."""
    word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = word < words
    row = tl.load(rows + word, keep, 0)
    line = tl.load(slot + row, keep, 0).to(tl.int64)
    length, prompt = tl.load(lengths + row, keep, 0), tl.load(prompt_tokens + line, keep, 0)
    differs = tl.zeros((BLOCK,), tl.int32)
    for number in range(longest):
        wanted = tl.load(prefixes + word * longest + number, keep, -1)
        place = length - longest + number
        in_reply = place >= prompt
        token = tl.load(tokens + line * tokens_row + place, keep & in_reply, -2)
        differs += ((wanted >= 0) & (token != wanted)).to(tl.int32)
    last = tl.load(lasts + word, keep, 0)
    place = logits + row.to(tl.int64) * logits_row + last
    tl.store(place, tl.full((BLOCK,), float("-inf"), tl.float32), keep & (differs == 0) & (last < VOCAB))


def _triton(
    logits: Tensor,
    slot: Tensor,
    lengths: Tensor,
    tokens: Tensor,
    prompt_tokens: Tensor,
    rows: Tensor,
    lasts: Tensor,
    prefixes: Tensor,
) -> Tensor:
    words, block = rows.shape[0], 128
    launch(
        bad_words_kernel,
        (-(-words // block),),
        *(logits, slot, lengths, tokens, prompt_tokens, rows, lasts, prefixes, words, prefixes.shape[1]),
        *(row_stride(logits, "logits"), row_stride(tokens, "tokens")),
        VOCAB=logits.shape[1],
        BLOCK=block,
    )
    return logits


def _inputs(make: Make, rows: int, words: int, longest: int, vocab: int, width: int) -> Args:
    """Sequences of few different tokens, so that many words are complete, with prompts that end within some of them."""
    slots = rows + 2
    tokens = make.integers(0, 2, slots, width)
    lengths = make.integers(0, width, rows)
    prefixes = make.integers(0, 2, words, longest)
    if not make.meta:
        for word in range(words):
            prefixes[word, : word % (longest + 1)] = -1
    return (
        make.normal(rows, vocab, dtype=torch.float32),
        make.permutation(slots)[:rows].contiguous(),
        lengths,
        tokens,
        make.integers(0, max(1, width // 2), slots),
        make.integers(0, max(1, rows), words),
        make.integers(0, vocab, words),
        prefixes,
    )


BAD_WORDS = Op(
    name="bad_words",
    reference=_reference,
    triton=_triton,
    inputs=_inputs,
    cases=(
        Case("some", {"rows": 7, "words": 40, "longest": 3, "vocab": 97, "width": 9}),
        Case("single", {"rows": 3, "words": 5, "longest": 0, "vocab": 97, "width": 4}),
        Case("many", {"rows": 4, "words": 300, "longest": 4, "vocab": 2000, "width": 20}),
        Case("empty", {"rows": 0, "words": 0, "longest": 2, "vocab": 32, "width": 4}),
        Case("64x100", {"rows": 256, "words": 6400, "longest": 4, "vocab": 151936, "width": 131073}, bench=True),
    ),
    tolerance={torch.float32: 0.0, torch.bfloat16: 0.0},
    compiled=logit_processors.bad_words,
    cpu_cases=(Case("8x100", {"rows": 8, "words": 800, "longest": 4, "vocab": 151936, "width": 4097}),),
    traffic=lambda logits, slot, lengths, tokens, prompt_tokens, rows, lasts, prefixes: (
        nbytes(rows, lasts, prefixes) + nbytes(prefixes)
    ),
    strided=(0, 3),
)
