"""Divide logits by the temperature; greedy rows are unchanged."""

import numpy as np
from torch import Tensor

from engine.sampling.rows import LogitProcessor, Rows


def temperature(rows: Rows) -> LogitProcessor | None:
    values = rows.columns.temperature[rows.slots]
    values = np.where(values == 0.0, np.float32(1.0), values)
    if (values == 1.0).all():
        return None
    divisor = rows.to_device(values)[:, None]

    def process(logits: Tensor) -> None:
        logits /= divisor

    return process
