"""Log probabilities: of a given token with its rank, and of the most likely tokens.

All numbers of a row come from one log-softmax, so a token has the same value wherever it appears.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from engine.api.messages import Logprob
from kernels.cpu.program import Team

MAX_COMPILED = 1024  # for longer lists, sorting the entire vocabulary is not slower


@dataclass(frozen=True)
class Threshold:
    """Result of truncation per row: logits above `floor` are kept, and tokens up to `last` with a logit equal to it."""

    floor: Tensor  # [rows] float32
    last: Tensor  # [rows] int64

    def of(self, row: int, times: int) -> "Threshold":
        """Return the threshold of one row, repeated `times` times."""
        return Threshold(self.floor[row].expand(times).contiguous(), self.last[row].expand(times).contiguous())

    def applied(self, logits: Tensor) -> Tensor:
        """Return logits [rows, vocab] with truncated tokens at -inf."""
        floor, token = self.floor[:, None], torch.arange(logits.shape[1], device=logits.device)
        kept = (logits > floor) | ((logits == floor) & (token <= self.last[:, None])) | logits.isnan()
        return logits.masked_fill(~kept, -torch.inf)


def logprobs(
    logits: Tensor,
    ids: Tensor,
    tops: list[int],
    team: Team | None = None,
    *,
    at: list[int] | None = None,
    threshold: Threshold | None = None,
) -> list[Logprob]:
    """Return the logprobs of token `ids[i]` under `logits[at[i]]` (None: `logits[i]`) with the `tops[i]` most likely
    tokens (-1: all), in descending order, ties by id.

    logits: [.., vocab]; all tensors on one device. team: compiled kernels to use. threshold: truncation to apply."""
    most = max(tops)
    if team is not None and min(tops) >= 0 and most <= MAX_COMPILED:
        return _compiled(logits, ids, tops, team, at, threshold)
    logits = logits if at is None else logits[at]
    logits = logits if threshold is None else threshold.applied(logits)
    table = logits.float().log_softmax(1)
    own = table.gather(1, ids[:, None])
    ranks = ((table > own).sum(1) + 1).tolist()
    limits = [table.shape[1] if top < 0 else min(top, table.shape[1]) for top in tops]
    widest = max((limit for limit in limits if limit < table.shape[1]), default=0)
    shared_ids, shared_values = _top(table, widest)
    found = []
    for row, (token, own_value, rank, limit) in enumerate(
        zip(ids.tolist(), own[:, 0].tolist(), ranks, limits, strict=True)
    ):
        if limit > widest:
            whole_ids, whole_values = _top(table[row : row + 1], limit)
            top = whole_ids[0], whole_values[0]
        else:
            top = shared_ids[row][:limit], shared_values[row][:limit]
        found.append(Logprob(token, own_value, rank, tuple(top[0]), tuple(top[1])))
    return found


def with_ids(scored: Logprob, ids: tuple[int, ...], values: Sequence[float]) -> Logprob:
    """Replace the most likely tokens by the tokens that were requested by id."""
    return msgspec.structs.replace(scored, top_ids=ids, top_logprobs=tuple(values))


def _compiled(
    logits: Tensor, ids: Tensor, tops: list[int], team: Team, at: list[int] | None, threshold: Threshold | None
) -> list[Logprob]:
    most = min(max(tops), logits.shape[1])
    rows = torch.arange(len(ids)) if at is None else torch.tensor(at)
    kept = None if threshold is None else (torch.ones(len(ids)), threshold.floor, threshold.last)
    own, ranks, tokens, values = (found.tolist() for found in team.logprobs(logits, ids, most, rows, kept))
    return [
        Logprob(token, own[row], ranks[row], tuple(tokens[row][:top]), tuple(values[row][:top]))
        for row, (token, top) in enumerate(zip(ids.tolist(), tops, strict=True))
    ]


def _top(table: Tensor, count: int) -> tuple[list[list[int]], list[list[float]]]:
    if count == 0:
        return [[]] * len(table), [[]] * len(table)
    ids = table.topk(count, dim=1, sorted=False).indices.sort(dim=1).values
    values, order = table.gather(1, ids).sort(dim=1, descending=True, stable=True)
    return ids.gather(1, order).tolist(), values.tolist()


def kept_only(logits: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    """Return logits [rows, vocab] with only the first `keep[i]` of `ids[i]`, and -inf elsewhere."""
    beyond = torch.arange(ids.shape[1], device=ids.device) >= keep[:, None]
    values = logits.gather(1, ids).masked_fill(beyond, -torch.inf)
    return torch.full_like(logits, -torch.inf).scatter_(1, ids, values)
