"""Memory of kept embeddings of media, and of the largest step of a tower, without its weights.

The tower of a step has the patches of up to `step_tokens` embeddings. A single item with more embeddings takes more.
"""

import math
from dataclasses import dataclass

from engine.lowering.measures import attends, attention_operations, buffer_widths, multiplied
from engine.lowering.program import Program
from engine.lowering.tower import Stage, TowerProgram, lower_tower
from engine.models.parts import (
    AttentionPool,
    AudioEmbedding,
    AveragePool,
    AverageRows,
    ChunkedAudio,
    ClassRow,
    Conformer,
    JoinRows,
    LocalConformer,
    Media,
    Merge,
    Perceiver,
    QFormer,
    Querying,
    Resampler,
    WindowMerge,
)


@dataclass(frozen=True)
class TowerSizes:
    """Sizes of a tower for each embedding of a step."""

    patches: int
    elements: int  # of all buffers, keys and values of a layer, and pixels


def tower_sizes(media: Media) -> TowerSizes:
    """Return the sizes for an embedding: the sums over all towers. All buffers of a program are counted, although torch
    frees them earlier."""
    each = [_sizes(one) for one in media.towers]
    return TowerSizes(max((one.patches for one in each), default=0), sum(one.elements for one in each))


def _sizes(media: Media) -> TowerSizes:
    tower = lower_tower(media)
    # Embeddings of frames are scaled down to a quarter (LLaVA-OneVision).
    patches = _patches(tower) * (4 if media.tiles is not None and media.video_token is not None else 1)
    elements = patches * (_inputs(media, tower) + _elements(tower.tower))
    for projector in tower.projectors:
        rows = patches
        for stage in projector.stages:
            if isinstance(stage, Program):
                elements += max(1, rows) * _elements(stage)
            else:
                rows //= _rows(stage)
                copies = 3 if isinstance(stage, Querying) else 1  # rows, keys and values
                elements += rows * _rows(stage) * projector.width * copies
    return TowerSizes(patches, elements)


def tower_operations(media: Media, length: int) -> int:
    """Return the operations for an embedding of an item with `length` embeddings: of its patches and of the projectors.

    Attention in windows counts as attention in the whole item. Convolutions of audio are not counted."""
    return max((_operations(one, length) for one in media.towers), default=0)


def _operations(media: Media, length: int) -> int:
    tower = lower_tower(media)
    patches = _patches(tower)
    total = patches * (2 * multiplied(tower.tower.ops) + attention_operations(tower.tower.ops, patches * length))
    if isinstance(media.tower.patches, Conformer | LocalConformer):
        total += patches * _conformer_operations(media.tower.patches)
    if tower.patches is not None:
        total += patches * 2 * multiplied(tower.patches.ops)
    for projector in tower.projectors:
        rows = patches
        for stage in projector.stages:
            if isinstance(stage, Program):
                total += rows * 2 * multiplied(stage.ops)
            else:
                rows //= _rows(stage)
    return total


def _conformer_operations(part: Conformer | LocalConformer) -> int:
    """Return the operations for a position, without the convolutions of spectrograms."""
    size = part.hidden
    if isinstance(part, LocalConformer):
        filters, mlps = size * part.kernel, 2 * 8 * size**2
    else:
        filters, mlps = size * part.multiplier * (part.kernel + size), 2 * 3 * part.intermediate_size * size
    return part.layers * 2 * (mlps + 7 * size**2 + filters + 2 * part.window * size)


def _patches(tower: TowerProgram) -> int:
    """Return the patches that projectors join to an embedding."""
    return max((math.prod(map(_rows, projector.stages)) for projector in tower.projectors), default=1)


def _rows(stage: Stage) -> int:
    """Return the number of rows that a stage joins."""
    match stage:
        case Merge(side=side) | AveragePool(side=side):
            return side**2
        case AverageRows(count=count) | JoinRows(count=count):
            return count
        case ClassRow() | AttentionPool() | WindowMerge():
            return stage.rows
        case Resampler(queries=queries):
            return max(math.ceil(patches / count) for patches, count in queries)
        case QFormer(queries=count, rows=rows) | Perceiver(queries=count, rows=rows):
            return math.ceil(rows / count)
    return 1


def _inputs(media: Media, tower: TowerProgram) -> int:
    """Return the elements of a patch and of its embedding, or of two frames of a spectrogram and of the results of both
    convolutions."""
    patches = media.tower.patches
    if isinstance(patches, ChunkedAudio):
        # The results of the first two convolutions, the largest ones, for a position of a chunk.
        first, second = ((patches.mels + 1) // 2 * (patches.chunk + 1) // 2) * patches.channels, patches.channels
        second *= (patches.mels + 3) // 4 * (patches.chunk + 3) // 4
        return (patches.mels * patches.chunk + 2 * first + 2 * second) // patches.reduced(patches.chunk)
    if isinstance(patches, Conformer):
        # The result of the first convolution for a position, before and after the activation; buffers of a block; and
        # the scores of a position.
        first = (patches.reduction + 1) // 2 * ((patches.mels + 1) // 2) * patches.channels
        block = 4 * patches.intermediate_size + (8 + 2 * patches.multiplier) * patches.hidden
        return patches.mels * patches.reduction + 2 * first + block + 3 * patches.heads * patches.window
    if isinstance(patches, LocalConformer):
        # The first convolution counts twice, as above. Keys and values are copied for each window.
        first = 2 * 2 * patches.bands * patches.channels[0]
        block = (4 * 4 + 8 + 4 * patches.window) * patches.hidden
        return 16 * patches.bands + 2 * first + block
    if isinstance(patches, AudioEmbedding):
        return 2 * patches.mels + 4 * patches.hidden
    assert tower.patches is not None, "patches have a program"
    return patches.pixels + _elements(tower.patches)


def embedding_copies(ranks: int) -> int:
    """Return the number of copies of a step's embeddings: the computed and the kept ones, and with several ranks also a
    rank's buffer and the gathered buffers of all ranks."""
    return 2 if ranks == 1 else 3 + ranks


def media_bytes(media: Media, step_tokens: int, cache_bytes: int, element_bytes: int, ranks: int = 1) -> int:
    """Return the bytes of kept embeddings and of the largest step on a rank, whose embeddings are computed and then
    copied."""
    each = embedding_copies(ranks) * media.width + tower_sizes(media).elements
    return cache_bytes + media.step_embeddings(step_tokens) * each * element_bytes


def _elements(program: Program) -> int:
    """Return the elements for each row."""
    keys = max((2 * op.kv_heads * op.key_dim for op in attends(program.ops)), default=0)
    return sum(buffer_widths(program.ops).values()) + keys
