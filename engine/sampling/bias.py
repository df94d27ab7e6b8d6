"""`logit_bias`: add a number to the logits of some tokens."""

import numpy as np
from torch import Tensor

from engine.sampling.rows import LogitProcessor, Rows, flat


def logit_bias(rows: Rows) -> LogitProcessor | None:
    users = rows.using(rows.columns.bias)
    if not users:
        return None
    entries = [rows.columns.bias[int(rows.slots[row])] for row in users]
    at, ids = map(rows.to_device, flat(users, [ids for ids, _ in entries]))
    values = rows.to_device(np.concatenate([values for _, values in entries]))

    def process(logits: Tensor) -> None:
        logits[at, ids] += values

    return process
