"""Means of vectors: of the tokens of a part (late chunking), and of the pieces of a text longer than a window."""

from collections.abc import Sequence
from typing import Any

from engine.api.messages import Pooled


def averaged(pooled: Pooled, *, size: int, unit: bool) -> Pooled:
    """The mean of every `size` rows, the last of as many as are left; of unit length if it is wanted."""
    import numpy as np

    rows = np.frombuffer(pooled.values, "<f4").reshape(pooled.shape).astype(np.float64)
    means = np.stack([rows[start : start + size].mean(axis=0) for start in range(0, len(rows), size)])
    return _vectors(means, unit)


def weighted(vectors: Sequence[Pooled], weights: Sequence[int], *, unit: bool) -> Pooled:
    """The mean of vectors, each as often as its weight says."""
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
