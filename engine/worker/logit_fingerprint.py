"""Fingerprints of logits (engine/api/golden.py), computed on the host in float64, in the same way for all devices."""

import hashlib
from functools import cache

import numpy as np

from engine.api.golden import LogitFingerprint

TOP = 8
NUM_SIGN_SUMS = 4
_KEY = b"slipway: signs of golden digests"


def logit_fingerprint(logits: np.ndarray) -> LogitFingerprint:
    """Return the fingerprint of [vocab] float32 logits."""
    row = np.ascontiguousarray(logits, np.float32)
    values = row.astype(np.float64)
    count = min(TOP, len(values))
    best = np.argpartition(-values, count - 1)[:count]
    best = best[np.lexsort((best, -values[best]))]
    highest = float(values[best[0]])
    with np.errstate(over="ignore", invalid="ignore"):
        return LogitFingerprint(
            hashlib.blake2b(row.tobytes(), digest_size=8).hexdigest(),
            _short(highest + np.log(np.exp(values - highest).sum())),
            _short(values.std()),
            tuple(best.tolist()),
            tuple(map(_short, values[best])),
            tuple(map(_short, _signs(len(values)) @ values / np.sqrt(len(values)))),
        )


def _short(value: float) -> float:
    """Round to eight digits: the precision of float32, in a readable length."""
    return float(f"{value:.8g}")


@cache
def _signs(vocab: int) -> np.ndarray:
    """Return [NUM_SIGN_SUMS, vocab] of 1 and -1, identical in every process and version."""
    count = NUM_SIGN_SUMS * vocab
    bits = np.unpackbits(np.frombuffer(hashlib.shake_256(_KEY).digest(-(-count // 8)), np.uint8))[:count]
    return (bits.astype(np.int8) * 2 - 1).reshape(NUM_SIGN_SUMS, vocab)
