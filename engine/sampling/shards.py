"""Sampling from logits whose vocabulary is divided among ranks, without gathering them.

    rows without truncation   each rank finds the best token of its columns, argmax(logit / temperature + noise). The
                              ranks gather these tokens and their scores; the highest score wins, then the lowest id
    rows with top_k           each rank selects the best `MAX_K` of its columns, which the ranks gather. All other
                              tokens get the logit -inf, and the usual kernels sample

Both give the tokens of the gathered logits, bit by bit. 256 rows of a vocabulary of 128k gather 131 MB of logits, but 2
KB of best tokens per rank, or 131 KB of candidates. Steps with logit processors, logprobs, or rows with top_p or min_p
but without top_k read the whole logits.
"""

import numpy as np
import torch
from torch import Tensor

from engine.distributed.world import World
from engine.sampling.columns import Columns
from kernels.sampling.columns import DeviceColumns
from kernels.sampling.float_order import NAN_KEY, key_value_of, keys
from kernels.sampling.sample import sample

MAX_K = 64


def largest_top_k(columns: Columns, slots: np.ndarray) -> int | None:
    """Return the largest top_k of rows with truncation, 0 if there are none. None if some row needs all logits."""
    random = slots[columns.temperature[slots] > 0]
    k = columns.top_k[random]
    if ((columns.top_p[random] < 1.0) | (columns.min_p[random] > 0.0))[k == 0].any():
        return None
    return int(k.max(initial=0))


def best_of_shards(
    logits: Tensor, first: int, world: World, slot: Tensor, lengths: Tensor, columns: DeviceColumns
) -> tuple[Tensor, Tensor]:
    """logits: [rows, own columns] fp32, of the tokens from `first` on → ids int32 and scores fp32 [rows], without
    truncation, equal on all ranks."""
    ids, scores, *_ = sample(logits, slot, lengths, columns, truncated=False, first_token=first)
    gathered = world.all_gather(torch.stack((keys(scores), ids + first)))
    scores_by_rank, ids_by_rank = gathered[:, 0], gathered[:, 1]
    best = scores_by_rank.amax(0)  # NaN has the highest key
    chosen = torch.where(scores_by_rank == best, ids_by_rank, NAN_KEY).amin(0)
    score = key_value_of(best)
    return torch.where(score.isfinite(), chosen, 0), score


def candidates_of_shards(logits: Tensor, first: int, vocab: int, world: World) -> Tensor:
    """logits: [rows, own columns] fp32, of the tokens from `first` on → [rows, vocab] fp32: the logits of at least the
    best MAX_K tokens, -inf for others. Equal logits are ordered by token, as in truncation."""
    rows, own = logits.shape
    token = torch.arange(own, device=logits.device)
    # The logit's order in the upper half, then the lower token: all keys differ, unlike logits.
    order = (keys(logits).long() << 32) | (own - token)
    most = min(MAX_K, -(-vocab // world.size))
    at = order.topk(min(most, own), 1).indices
    at = at[:, torch.arange(most, device=at.device).clamp(max=own - 1)]  # a smaller share repeats its last token
    gathered = world.all_gather(torch.stack((logits.gather(1, at).view(torch.int32), (at + first).int())))
    values, ids = (part.transpose(0, 1).flatten(1) for part in gathered.unbind(1))
    whole = torch.full((rows, vocab), -torch.inf, device=logits.device)
    return whole.scatter_(1, ids.long(), values.view(torch.float32))
