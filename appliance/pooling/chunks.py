"""Vectors of tokens to vectors of parts: means over so many tokens (late chunking)."""

from engine.api.messages import Pooled


def averaged(pooled: Pooled, *, size: int, unit: bool) -> Pooled:
    """The mean of every `size` rows, the last of as many as are left; of unit length if it is wanted."""
    import numpy as np

    rows = np.frombuffer(pooled.values, "<f4").reshape(pooled.shape).astype(np.float64)
    means = np.stack([rows[start : start + size].mean(axis=0) for start in range(0, len(rows), size)])
    if unit:
        lengths = np.linalg.norm(means, axis=1, keepdims=True)
        means = means / np.where(lengths > 0, lengths, 1.0)
    return Pooled(means.shape, means.astype("<f4").tobytes())
