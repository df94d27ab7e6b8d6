"""`bad_words`: the last token of a banned word is impossible where the reply ends with the word's other tokens."""

import numpy as np
import torch
from torch import Tensor

from engine.sampling.rows import Edit, Rows


def bad_words(rows: Rows) -> Edit | None:
    users = rows.using(rows.columns.bad_words)
    if not users:
        return None
    words = [rows.columns.bad_words[int(rows.slots[row])] for row in users]
    longest = max(word.prefixes.shape[1] for word in words)
    prefixes = [np.pad(w.prefixes, ((0, 0), (longest - w.prefixes.shape[1], 0)), constant_values=-1) for w in words]
    prefix, last = np.concatenate(prefixes), np.concatenate([word.lasts for word in words])
    row = np.repeat(users, [len(word.lasts) for word in words])
    slots = rows.slots[row]
    places = rows.lengths[row][:, None] - longest + np.arange(longest)
    fits = ((prefix < 0) | (places >= rows.columns.prompt_tokens[slots][:, None])).all(1)
    row, slots, last, prefix, places = row[fits], slots[fits], last[fits], prefix[fits], places[fits].clip(0)
    at, ids, expected = rows.to_device(row), rows.to_device(last), rows.to_device(prefix)
    where = rows.to_device(slots)[:, None], rows.to_device(places)

    def edit(logits: Tensor) -> None:
        complete = ((rows.tokens[where] == expected) | (expected < 0)).all(1)
        # two words may end with the same token, one complete and one not: adding leaves no order between them
        logits.index_put_((at, ids), torch.where(complete, -torch.inf, 0.0), accumulate=True)

    return edit
