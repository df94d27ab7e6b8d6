"""Conversion of a request's host columns to the device's sampling columns."""

from collections.abc import Sequence

import numpy as np

from engine.sampling.columns import Columns
from kernels.sampling.columns import FIELDS


def staged(columns: Columns, slots: Sequence[int]) -> np.ndarray:
    """Return [FIELDS, slots] int32: the bits to write to these slots of the device's columns."""
    at = np.asarray(slots, np.int64)
    with np.errstate(divide="ignore"):  # min_p 0 gives -inf, which keeps every token
        log_min_p = np.log(columns.min_p[at])
    top_p, log_min_p, seed = (_words(part) for part in (columns.top_p[at], log_min_p, columns.seed[at]))
    values = {
        "temperature": columns.temperature[at],
        "top_k": columns.top_k[at].astype(np.int32),
        "top_p_low": top_p[0],
        "top_p_high": top_p[1],
        "log_min_p_low": log_min_p[0],
        "log_min_p_high": log_min_p[1],
        "seed_low": seed[0],
        "seed_high": seed[1],
        "repetition": columns.repetition[at],
        "frequency": columns.frequency[at],
        "presence": columns.presence[at],
        "prompt_tokens": columns.prompt_tokens[at].astype(np.int32),
    }
    return np.stack([np.ascontiguousarray(values[name]).view(np.int32) for name in FIELDS])


def _words(values: np.ndarray) -> np.ndarray:
    """Return [2, n] int32: lower and upper halves of 64-bit numbers."""
    return values.astype(values.dtype.newbyteorder("<")).view("<i4").reshape(-1, 2).T
