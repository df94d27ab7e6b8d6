"""Averaging of vectors: over chunks of tokens (late chunking), and over the pieces of a text longer than the window."""

from collections.abc import Sequence
from typing import Any

from engine.api.messages import Pooled


def averaged(pooled: Pooled, *, size: int, unit: bool) -> Pooled:
    """Return the mean of every `size` rows (fewer in the last chunk), of unit length if `unit`."""
    import numpy as np

    rows = np.frombuffer(pooled.values, "<f4").reshape(pooled.shape).astype(np.float64)
    means = np.stack([rows[start : start + size].mean(axis=0) for start in range(0, len(rows), size)])
    return _vectors(means, unit)


def weighted(vectors: Sequence[Pooled], weights: Sequence[int], *, unit: bool) -> Pooled:
    """Return the weighted mean of vectors, of unit length if `unit`."""
    if len(vectors) == 1:
        return vectors[0]
    import numpy as np

    rows = np.stack([np.frombuffer(each.values, "<f4") for each in vectors]).astype(np.float64)
    return _vectors(np.average(rows, axis=0, weights=list(weights)), unit)


def _vectors(values: Any, unit: bool) -> Pooled:
    import numpy as np

    if unit:
        lengths = np.linalg.norm(values, axis=-1, keepdims=True)
        values = values / np.where(lengths > 0, lengths, 1.0)
    return Pooled(values.shape, values.astype("<f4").tobytes())
