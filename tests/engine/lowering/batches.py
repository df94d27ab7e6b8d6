"""A batch of one prompt."""

import numpy as np

from engine.kv.layout import Layout
from engine.layers.batch import Batch
from engine.worker.batch import build_batch


def prompt(ids: list[int], form: Layout) -> Batch:
    """Return the batch of a prompt that is computed in one step, in blocks 1, 2, …"""
    blocks = -(-len(ids) // form.block_tokens)
    own = np.arange(1, blocks + 1, dtype=np.int32)[None]
    return build_batch(
        np.array([0]),
        np.array([0]),
        np.array([len(ids)]),
        tokens=np.array([ids], np.int32),
        rope_lengths=np.array([len(ids)]),
        tables=[own + number * blocks for number, _ in enumerate(form.groups)],
        block_tokens=form.block_tokens,
    )
