"""`min_tokens`: mask end and stop tokens until the reply has that many tokens.

They stay allowed if no other token is (a complete grammar, a short list of allowed tokens): a reply that ends early is
better than one that fails.
"""

import numpy as np
import torch
from torch import Tensor

from engine.sampling.rows import LogitProcessor, Rows, flat


def min_tokens(rows: Rows) -> LogitProcessor | None:
    columns = rows.columns
    early = rows.lengths - columns.prompt_tokens[rows.slots] < columns.min_tokens[rows.slots]
    users = [row for row in rows.using(columns.stop_ids) if early[row]]
    if not users:
        return None
    numbers, ids = flat(list(range(len(users))), [columns.stop_ids[int(rows.slots[row])] for row in users])
    whole = rows.to_device(np.array(users))
    at, among, ids_there = whole[rows.to_device(numbers)], rows.to_device(numbers), rows.to_device(ids)

    def process(logits: Tensor) -> None:
        before = logits[at, ids_there]
        logits[at, ids_there] = -torch.inf
        stuck = logits[whole].amax(-1) == -torch.inf
        logits[at, ids_there] = torch.where(stuck[among], before, -torch.inf)

    return process
