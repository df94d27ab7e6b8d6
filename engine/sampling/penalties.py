"""Penalties on tokens that occurred: repetition over prompt and reply, frequency and presence over the reply.

repetition r:  logit / r if logit > 0 else logit · r        (Keskar et al. 2019, CTRL)
others:        logit - frequency · count - presence · [count > 0]

Only tokens that occurred are modified: the cost depends on the length of the sequences, not on the vocabulary.
"""

import numpy as np
import torch
from torch import Tensor

from engine.sampling.rows import LogitProcessor, Rows


def repetition_penalty(rows: Rows) -> LogitProcessor | None:
    penalty = rows.columns.repetition[rows.slots]
    users = np.flatnonzero(penalty != 1.0)
    if not len(users):
        return None
    at, strength = rows.to_device(users)[:, None], rows.to_device(penalty[users])[:, None]
    ids, _ = rows.history(users)

    def process(logits: Tensor) -> None:
        seen = logits[at, ids]
        logits[at, ids] = torch.where(seen > 0, seen / strength, seen * strength)

    return process


def reply_penalties(rows: Rows) -> LogitProcessor | None:
    """Return the processor of frequency and presence penalties."""
    frequency, presence = rows.columns.frequency[rows.slots], rows.columns.presence[rows.slots]
    begun = rows.lengths > rows.columns.prompt_tokens[rows.slots]
    users = np.flatnonzero(((frequency != 0) | (presence != 0)) & begun)
    if not len(users):
        return None
    at = rows.to_device(users)[:, None]
    per_count, once = rows.to_device(frequency[users])[:, None], rows.to_device(presence[users])[:, None]
    ids, reply = rows.history(users)

    def process(logits: Tensor) -> None:
        counts = logits.new_zeros(len(users), logits.shape[1]).scatter_add_(1, ids, reply.float()).gather(1, ids)
        logits[at, ids] = logits[at, ids] - per_count * counts - once * (counts > 0)

    return process
