"""Penalties on tokens that were seen: repetition over prompt and reply, then frequency and presence over the reply.

    logit ← logit / r if logit > 0 else logit · r              (Keskar et al. 2019, CTRL)
    logit ← logit - frequency · count - presence               where count, in the reply, is not 0

Known tokens are read from the device's table. Each is counted in a line of integers as wide as the vocabulary, which is
zero before and after: one launch counts, a second takes each count out again (atomically, so that only one of several
equal tokens gets it) and changes that token's logit. Work grows with the sequence, not with the vocabulary. Only rows
of a launch that have penalties need lines. Counts that persist between steps would need a line for each slot (156 MB
for 256 slots of 152k), and a rebuild whenever a request enters.
"""

import torch
from torch import Tensor

from kernels.cpu import logit_processors
from kernels.jit import jit, launch, row_stride, tl
from kernels.op import Args, Case, Make, Op, nbytes

CHUNK = 1024  # known tokens that a program reads at once
PROGRAMS = 16  # for each row


def _reference(
    logits: Tensor,
    users: Tensor,
    slot: Tensor,
    lengths: Tensor,
    tokens: Tensor,
    prompt_tokens: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    """logits: [rows, vocab] fp32; users: [n] int32, different rows; slot, lengths: [rows] int32; tokens: [slots, width]
    int32; prompt_tokens: [slots] int32; repetition, frequency, presence: [slots] fp32; counts: [n or more, vocab]
    int32, zeros → logits, changed in place, and counts, zeros again."""
    for row in users.tolist():
        line = int(slot[row])
        known = tokens[line, : int(lengths[row])].long()
        x = logits[row]
        r, per_count, once = repetition[line], frequency[line], presence[line]
        seen = known.unique()
        x[seen] = torch.where(x[seen] > 0, x[seen] / r, x[seen] * r)
        reply, times = known[int(prompt_tokens[line]) :].unique(return_counts=True)
        x[reply] = x[reply] - per_count * times.float() - once
    return logits, counts


@jit
def _known(users, slot, lengths, prompt_tokens, repetition, frequency, presence):
    """Return row and line of a program's user, its range of tokens with penalties, and the penalties."""
    row = tl.load(users + tl.program_id(0))
    line = tl.load(slot + row)
    r, f, p = tl.load(repetition + line), tl.load(frequency + line), tl.load(presence + line)
    length, prompt = tl.load(lengths + row), tl.load(prompt_tokens + line)
    begin = tl.where(r == 1.0, prompt, 0)
    end = tl.where((r == 1.0) & (f == 0.0) & (p == 0.0), 0, length)
    return row.to(tl.int64), line.to(tl.int64), begin, end, prompt, r, f, p


@jit
def count_kernel(
    users,
    slot,
    lengths,
    tokens,
    prompt_tokens,
    repetition,
    frequency,
    presence,
    counts,
    tokens_row,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Several programs for each user. A count is twice the number of times in the reply, plus 1 if in the prompt."""
    row, line, begin, end, prompt, r, f, p = _known(
        users, slot, lengths, prompt_tokens, repetition, frequency, presence
    )
    own = counts + tl.program_id(0).to(tl.int64) * VOCAB
    for start in range(begin + tl.program_id(1) * CHUNK, end, tl.num_programs(1) * CHUNK):
        at = start + tl.arange(0, CHUNK)
        token = tl.load(tokens + line * tokens_row + at, at < end, VOCAB)
        tl.atomic_add(own + token, 2, (token < VOCAB) & (at >= prompt), sem="relaxed")
        tl.atomic_or(own + token, 1, (token < VOCAB) & (at < prompt), sem="relaxed")


@jit
def penalties_kernel(
    logits,
    users,
    slot,
    lengths,
    tokens,
    prompt_tokens,
    repetition,
    frequency,
    presence,
    counts,
    logits_row,
    tokens_row,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Several programs for each user."""
    row, line, begin, end, prompt, r, f, p = _known(
        users, slot, lengths, prompt_tokens, repetition, frequency, presence
    )
    own = counts + tl.program_id(0).to(tl.int64) * VOCAB
    for start in range(begin + tl.program_id(1) * CHUNK, end, tl.num_programs(1) * CHUNK):
        at = start + tl.arange(0, CHUNK)
        token = tl.load(tokens + line * tokens_row + at, at < end, VOCAB)
        # "and" with 0: Triton 3.6 cannot compile a masked exchange for gfx942
        count = tl.atomic_and(own + token, 0, token < VOCAB, sem="relaxed")
        count = tl.where(token < VOCAB, count, 0)  # masked lanes return arbitrary values
        place = logits + row * logits_row + token
        x = tl.load(place, count > 0, 0.0)
        # Products use float64: they are rounded once, and not fused with the subtraction that follows.
        x = tl.where(x > 0.0, tl.div_rn(x, r), (x.to(tl.float64) * r.to(tl.float64)).to(tl.float32))
        times = count >> 1
        fall = (f.to(tl.float64) * times.to(tl.float64)).to(tl.float32)
        x = tl.where(times > 0, x - fall - p, x)
        tl.store(place, x, count > 0)


def _triton(
    logits: Tensor,
    users: Tensor,
    slot: Tensor,
    lengths: Tensor,
    tokens: Tensor,
    prompt_tokens: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    n, vocab = users.shape[0], logits.shape[1]
    if counts.shape[0] < n or counts.shape[1] != vocab or not counts.is_contiguous():
        raise ValueError(f"counts {tuple(counts.shape)}: {n} rows with penalties need shape ({n}, {vocab})")
    known = users, slot, lengths, tokens, prompt_tokens, repetition, frequency, presence, counts
    grid, sizes = (n, PROGRAMS), {"VOCAB": vocab, "CHUNK": CHUNK}
    launch(count_kernel, grid, *known, row_stride(tokens, "tokens"), **sizes)
    launch(penalties_kernel, grid, logits, *known, row_stride(logits, "logits"), row_stride(tokens, "tokens"), **sizes)
    return logits, counts


def _inputs(make: Make, rows: int, users: int, lengths: list[int], prompt: int, vocab: int, variety: int) -> Args:
    """Sequences of `variety` different tokens, the first `prompt` of them (or fewer) prompts."""
    slots = rows + 3
    width = max([*lengths, 1]) + 5
    known = [lengths[row % len(lengths)] for row in range(rows)]
    return (
        make.normal(rows, vocab, dtype=torch.float32, scale=3.0),
        make.permutation(rows)[:users].contiguous(),
        make.permutation(slots)[:rows].contiguous(),
        make.tensor(known),
        make.integers(vocab - variety, vocab, slots, width),
        make.integers(0, prompt + 1, slots).clamp(max=min([*known, width])),
        make.tensor([(1.0, 1.3, 0.7)[line % 3] for line in range(slots)], torch.float32),
        make.tensor([(0.0, 0.4, -0.3, 0.0)[line % 4] for line in range(slots)], torch.float32),
        make.tensor([(0.0, 1.1, 0.0, 0.6, -0.5)[line % 5] for line in range(slots)], torch.float32),
        make.zeros(users, vocab, dtype=torch.int32),
    )


def _traffic(logits: Tensor, users: Tensor, slot: Tensor, lengths: Tensor, tokens: Tensor, *rest: Tensor) -> int:
    """For each known token: its id, reading and writing its count twice, and reading and writing its logit."""
    return users.shape[0] * tokens.shape[1] * 4 * 7 + nbytes(users)


PENALTIES = Op(
    name="penalties",
    reference=_reference,
    triton=_triton,
    inputs=_inputs,
    cases=(
        Case("some", {"rows": 7, "users": 5, "lengths": [3, 9, 20], "prompt": 6, "vocab": 97, "variety": 9}),
        Case("one", {"rows": 1, "users": 1, "lengths": [1], "prompt": 1, "vocab": 1, "variety": 1}),
        Case("long", {"rows": 2, "users": 2, "lengths": [2100, 1024], "prompt": 900, "vocab": 3000, "variety": 700}),
        Case("nobody", {"rows": 2, "users": 0, "lengths": [4], "prompt": 2, "vocab": 64, "variety": 3}),
        Case("empty", {"rows": 0, "users": 0, "lengths": [], "prompt": 0, "vocab": 32, "variety": 3}),
        Case(
            "256x4096",
            {"rows": 256, "users": 256, "lengths": [4096], "prompt": 2048, "vocab": 151936, "variety": 151936},
            bench=True,
        ),
        Case(
            "8x131072",
            {"rows": 8, "users": 8, "lengths": [131072], "prompt": 65536, "vocab": 151936, "variety": 151936},
            bench=True,
        ),
    ),
    tolerance={torch.float32: 0.0, torch.bfloat16: 0.0},
    compiled=logit_processors.penalties,
    cpu_cases=(
        Case(
            "8x4096",
            {"rows": 8, "users": 8, "lengths": [4096], "prompt": 2048, "vocab": 151936, "variety": 151936},
        ),
    ),
    traffic=_traffic,
    strided=(0, 4),
)
