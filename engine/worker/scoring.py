"""Prompt logprobs: each token is scored with the logits of the preceding position."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from engine.api.messages import Logprob
from engine.sampling.logprobs import logprobs
from engine.worker.rows import PlanRows
from engine.worker.table import RequestTable
from kernels.cpu.program import Team

SCORED_AT_ONCE = 64  # prompt positions whose logits are in memory at once: 64 x 152k float32 are 39 MB


def score_prompts(
    rows: PlanRows,
    table: RequestTable,
    hidden: Tensor,
    logits_of: Callable[[Tensor], Tensor],
    team: Team | None = None,
    at_once: int = SCORED_AT_ONCE,
) -> dict[int, tuple[Logprob, ...]]:
    """Return, for each row that requests them, the logprobs of its prompt tokens at positions first + 1 … first +
    count,
    of which the last one may belong to the next chunk.

    hidden: [tokens, hidden] of the step. at_once: positions whose logits are in memory at once. Waits for the
    device."""
    at_once = min(at_once, SCORED_AT_ONCE)
    starts = np.cumsum(rows.count) - rows.count
    return {
        row: _score(int(starts[row]), row, rows, table, hidden, logits_of, team, at_once)
        for row in table.rows_to_score(rows.slots)
    }


def _score(
    start: int,
    row: int,
    rows: PlanRows,
    table: RequestTable,
    hidden: Tensor,
    logits_of: Callable[[Tensor], Tensor],
    team: Team | None,
    at_once: int,
) -> tuple[Logprob, ...]:
    slot, first = int(rows.slots[row]), int(rows.first[row])
    end = min(int(rows.ends[row]), int(table.columns.prompt_tokens[slot]) - 1)
    ids = torch.from_numpy(table.tokens[slot, first + 1 : end + 1].astype(np.int64)).to(hidden.device)
    top = table.columns.prompt_logprobs[slot]
    found: list[Logprob] = []
    for at in range(0, len(ids), at_once):
        part = ids[at : at + at_once]
        logits = logits_of(hidden[start + at : start + at + len(part)])
        found += logprobs(logits, part, [top] * len(part), team)
    return tuple(found)
