"""`bad_words`: mask the last token of a banned word if the reply ends with the word's preceding tokens.

Only the reply counts: a word that begins in the prompt is not banned.
"""

import numpy as np
import torch
from torch import Tensor

from engine.sampling.rows import LogitProcessor, Rows


def bad_words(rows: Rows) -> LogitProcessor | None:
    users = rows.using(rows.columns.bad_words)
    if not users:
        return None
    words = [rows.columns.bad_words[int(rows.slots[row])] for row in users]
    longest = max(word.prefixes.shape[1] for word in words)
    prefixes = [np.pad(w.prefixes, ((0, 0), (longest - w.prefixes.shape[1], 0)), constant_values=-1) for w in words]
    prefix, last = np.concatenate(prefixes), np.concatenate([word.lasts for word in words])
    row = np.repeat(users, [len(word.lasts) for word in words])
    places = rows.lengths[row][:, None] - longest + np.arange(longest)
    in_reply = places >= rows.columns.prompt_tokens[rows.slots[row]][:, None]
    equal = rows.tokens[rows.slots[row][:, None], places.clip(0)] == prefix
    complete = ((prefix < 0) | (in_reply & equal)).all(1)
    if not complete.any():
        return None
    at, ids = rows.to_device(row[complete]), rows.to_device(last[complete])

    def process(logits: Tensor) -> None:
        logits[at, ids] = -torch.inf

    return process
