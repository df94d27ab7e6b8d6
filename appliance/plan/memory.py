"""Bytes of one engine by part: weights, workspace, KV cache. Pure arithmetic over the model's declaration.

budget = memory_share · free / engines  ≥  weights + workspace + cache
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from engine.kv.layout import Layout
from engine.models.checkpoint import Checkpoint
from engine.models.parts import MLP, Attention, Block, Body, Model, bodies
from engine.models.ranks import rank_share

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "int8": 1}
# Resident memory of an engine process before any weight: interpreter, torch and its libraries, arenas of threads. On a
# GPU it is what the libraries' handles and the allocator's rounding take of the device beside the context.
FIXED_BYTES = {"cpu": 400 * 2**20, "cuda": 512 * 2**20}
CPU_CACHE_BYTES = 4 * 2**30
GRAPH_BYTES = 8 * 2**20  # of one captured step, whatever its size


@dataclass(frozen=True)
class Memory:
    """Of one engine, in bytes unless named otherwise. `blocks` counts the null block; `tokens` is the longest sequence
    that the cache could hold, `whole_contexts` how many requests of `max_context` tokens fit at once."""

    free: int
    budget: int
    weights: int
    workspace: int
    cache: int
    block_bytes: int
    blocks: int
    tokens: int
    whole_contexts: int

    @property
    def total(self) -> int:
        return self.weights + self.workspace + self.cache


def rank_weight_bytes(checkpoint: Checkpoint, weights: int, ranks: int) -> int:
    """What one rank holds of so many bytes of weights: parts that are cut, divided; the others whole."""
    return math.ceil(weights * rank_share(checkpoint.model, ranks))


def workspace_bytes(model: Model, *, device: str, step_tokens: int, rows: int, element_bytes: int) -> int:
    """What a step needs beside weights and cache: activations of its widest layer, float32 logits of the rows it
    samples (logits, probabilities, and their sorted copy with indices), and the process itself."""
    widest = max((_activations(block) for block in model.blocks), default=0) + 4 * model.embed.hidden
    return FIXED_BYTES[device] + step_tokens * widest * element_bytes + logits_bytes(model, min(rows, step_tokens))


def logits_bytes(model: Model, rows: int) -> int:
    """Logits in float32, probabilities, and their sorted copy with indices."""
    return rows * model.embed.vocab * 4 * 5


def graph_bytes(model: Model, *, sizes: Sequence[int], element_bytes: int) -> int:
    """What captured decode steps take: the activations and logits of the largest, which the smaller ones share, and
    their descriptions."""
    rows = max(sizes, default=0)
    widest = max((_activations(block) for block in model.blocks), default=0) + 4 * model.embed.hidden
    return rows * (widest * element_bytes + model.embed.vocab * 4) + len(sizes) * GRAPH_BYTES


def _activations(block: Block) -> int:
    """Elements per token that the widest body of a block holds at once."""
    return max((_width(body) for branch in block for body in bodies(branch)), default=0)


def _width(body: Body) -> int:
    match body:
        case Attention():
            return 2 * (2 * body.heads + 2 * body.kv_heads) * body.head_dim
        case MLP():
            return 3 * body.inner
    # A token has a row for each expert that it takes; packed, as matrix tiles read them, they take half as much again.
    packed = 2 * max(body.hidden, body.inner)
    shared = 0 if body.shared is None else 3 * body.shared.inner
    return body.chosen * (3 * body.inner + body.hidden + packed) + shared


def longest_sequence(layout: Layout, blocks: int, most: int) -> int:
    """The most tokens, up to `most`, that one request can have in a pool of so many blocks, the null block counted."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if layout.blocks_for(middle) < blocks:
            low = middle
        else:
            high = middle - 1
    return low


def pool_bytes(layout: Layout, tokens: int, sequences: int = 1) -> int:
    """Bytes of a pool that holds so many requests of so many tokens, and the null block."""
    return (sequences * layout.blocks_for(tokens) + 1) * layout.block_bytes


def spell_bytes(count: int) -> str:
    """`3.2 GiB`"""
    for size, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
