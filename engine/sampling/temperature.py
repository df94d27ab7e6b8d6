"""Divide logits by the temperature; greedy rows are unchanged."""

import numpy as np
from torch import Tensor

from engine.sampling.rows import Edit, Rows


def temperature(rows: Rows) -> Edit | None:
    values = rows.columns.temperature[rows.slots]
    values = np.where(values == 0.0, np.float32(1.0), values)
    if (values == 1.0).all():
        return None
    divisor = rows.to_device(values)[:, None]

    def edit(logits: Tensor) -> None:
        logits /= divisor

    return edit
