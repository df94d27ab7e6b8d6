"""`allowed_token_ids`: mask every other token."""

import numpy as np
import torch
from torch import Tensor

from engine.sampling.rows import LogitProcessor, Rows, flat


def allowed_token_ids(rows: Rows) -> LogitProcessor | None:
    users = rows.using(rows.columns.allowed)
    if not users:
        return None
    at, ids = map(rows.to_device, flat(users, [rows.columns.allowed[int(rows.slots[row])] for row in users]))
    whole = rows.to_device(np.array(users))

    def process(logits: Tensor) -> None:
        kept = logits[at, ids]
        logits[whole] = -torch.inf
        logits[at, ids] = kept

    return process
