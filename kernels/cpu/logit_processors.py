"""Compiled bodies of the operations in kernels/sampling: a team of threads runs one operation on float32 of a CPU.

As in bodies.py, each has the signature of its `Op` after a first argument of type Team. The CPU sampler calls them.
"""

import torch
from torch import Tensor

from kernels.cpu import program as cpu
from kernels.cpu.program import Program, StepData, Team


def token_mask(team: Team, logits: Tensor, users: Tensor, words: Tensor) -> Tensor:
    """See kernels/sampling/token_mask.py."""
    team.call("token_mask", *_rows(logits), *_list(users), words, _stride(words))
    return logits


def logit_bias(team: Team, logits: Tensor, rows: Tensor, tokens: Tensor, values: Tensor) -> Tensor:
    """See kernels/sampling/logit_bias.py."""
    team.call("logit_bias", *_rows(logits), *_list(rows), tokens, values)
    return logits


def min_tokens(team: Team, logits: Tensor, users: Tensor, stops: Tensor) -> Tensor:
    """See kernels/sampling/min_tokens.py."""
    team.call("min_tokens", *_rows(logits), *_list(users), stops, stops.shape[1], _stride(stops))
    return logits


def penalties(
    team: Team,
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
    """See kernels/sampling/penalties.py. `counts` are not needed: each thread of the team has a line of its own."""
    of_slots = prompt_tokens, repetition, frequency, presence
    team.call("penalties", *_rows(logits), *_list(users), slot, lengths, tokens, _stride(tokens), *of_slots)
    return logits, counts


def bad_words(
    team: Team,
    logits: Tensor,
    slot: Tensor,
    lengths: Tensor,
    tokens: Tensor,
    prompt_tokens: Tensor,
    rows: Tensor,
    lasts: Tensor,
    prefixes: Tensor,
) -> Tensor:
    """See kernels/sampling/bad_words.py."""
    known = slot, lengths, tokens, _stride(tokens), prompt_tokens
    team.call("bad_words", *_rows(logits), *_list(rows), *known, lasts, prefixes, prefixes.shape[1])
    return logits


def divide(team: Team, logits: Tensor, rows: Tensor, divisors: Tensor) -> None:
    """logits[rows[i]] /= divisors[i]; rows: int32, all different; divisors: float32."""
    team.call("divide", *_rows(logits), *_list(rows), divisors)


def cap_logits(team: Team, x: Tensor, scale: float, cap: float) -> Tensor:
    """See kernels/sampling/cap_logits.py."""
    op = cpu.Cap(x=x.data_ptr(), stride=x.stride(0), size=x.shape[1], scale=scale, cap=cap)
    team.run(Program([op], (x,)), StepData(len(x)))
    return x


def top_logprobs(
    team: Team,
    logits: Tensor,
    at: Tensor,
    users: Tensor,
    ids: Tensor,
    slot: Tensor,
    temperature: Tensor,
    floor: Tensor,
    last: Tensor,
    top: int,
    processed: bool,
) -> tuple[Tensor, Tensor]:
    """See kernels/sampling/top_logprobs.py."""
    user = users.long()
    kept = None
    if processed:
        divisor = temperature[slot[user].long()]
        kept = torch.where(divisor == 0, 1.0, divisor), floor[user], last[user].long()
    own, ranks, tokens, values = team.logprobs(logits, ids[user], top, at, kept)
    return torch.cat((own[:, None], values), 1), torch.cat((ranks[:, None], tokens), 1).int()


def _rows(logits: Tensor) -> tuple[Tensor, int, int]:
    """Return address, stride and width, the first arguments of functions on rows of logits."""
    assert logits.dtype == torch.float32 and logits.device.type == "cpu", "logits must be float32 on the CPU"
    return logits, _stride(logits), logits.shape[1]


def _list(rows: Tensor) -> tuple[Tensor, int]:
    assert rows.dtype == torch.int32 and rows.is_contiguous(), "rows must be contiguous int32"
    return rows, len(rows)


def _stride(matrix: Tensor) -> int:
    assert matrix.stride(1) == 1 or matrix.shape[1] < 2, "elements of a row must be contiguous"
    return matrix.stride(0)
