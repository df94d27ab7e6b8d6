"""Toy pooling model in numpy; tests compare the gateway's replies with its values."""

import hashlib

import numpy as np

from engine.api.messages import Delta, Pooled, Submit, Timing

WIDTH = 16
LABELS = ("calm", "glad", "sad")


def _noise(name: str, *shape: int) -> np.ndarray:
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    return np.random.default_rng(seed).standard_normal(shape)


def tokens(ids, segments=()) -> np.ndarray:
    """Return a vector of each token, computed from its id, position and segment."""
    kinds = np.repeat(np.arange(len(segments)), segments) if segments else np.zeros(len(ids), int)
    places = zip(ids, kinds, strict=True)
    return np.stack([_noise(f"{token}/{kind}", WIDTH) + 0.1 * at for at, (token, kind) in enumerate(places)])


def unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


def softmax(rows: np.ndarray) -> np.ndarray:
    powers = np.exp(rows - rows.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def values(submit: Submit, labels: int = len(LABELS)) -> np.ndarray:
    """Return the model's output for a prompt."""
    pooling = submit.pooling
    rows = tokens(submit.prompt, submit.segments)
    whole = pooling.task in ("embed", "classify")
    if whole:
        rows = rows.mean(axis=0)
    if "embed" in pooling.task:
        rows = rows[..., : pooling.dimensions]
        return rows if pooling.activate is False else unit(rows)
    logits = rows @ _noise("head", WIDTH, labels)
    if pooling.activate is False:
        return logits
    return softmax(logits) if labels > 1 else 1 / (1 + np.exp(-logits))


def answer(submit: Submit, labels: int = len(LABELS), cached: int = 0) -> list[Delta]:
    result = values(submit, labels).astype("<f4")
    pooled = Pooled(result.shape, result.tobytes())
    return [
        Delta(submit.id, finish="stop", pooled=pooled, timing=Timing(cached_tokens=cached, written_tokens=2 * cached))
    ]
