"""Memory of kept embeddings of media, and of the largest step of a tower, without its weights.

The tower of a step has the patches of up to `step_tokens` embeddings. A single item with more embeddings takes more.
"""

import math
from dataclasses import dataclass, replace

from engine.lowering.measures import WHOLE_BLOCK, attends, attention_operations, buffer_widths, multiplied
from engine.lowering.operations import AttendContext, AttendLocal
from engine.lowering.program import Program
from engine.lowering.querying import QueryProgram
from engine.lowering.tower import Stage, TowerProgram, lower_tower
from engine.models.parts import (
    AttentionPool,
    AudioEmbedding,
    AveragePool,
    AverageRows,
    ChunkedAudio,
    ClassRow,
    JoinRows,
    LocalAttention,
    Media,
    Merge,
    NormedAudio,
    Perceiver,
    QFormer,
    Querying,
    Resampler,
    SubsampledAudio,
    WindowMerge,
)

CONVOLVED_POSITIONS = 256
"""Positions of a clip whose spectrogram is convolved at once (Phi-4). The first convolution of a long clip would take
gigabytes: it has 160 times as many numbers as the hidden states."""


@dataclass(frozen=True)
class TowerSizes:
    """Sizes of a tower for each embedding of a step."""

    patches: int
    elements: int  # of all buffers, keys and values of a layer, and pixels
    convolved: int = 0  # elements of a position of a clip while its spectrogram is convolved
    clip_window: int = 0  # `Tower.clip_window`
    row: int = 0  # elements of a position that fills a window

    def of_clips(self, tokens: int) -> int:
        """Return the elements of a step with this many embeddings that are not in proportion to them: of convolutions,
        and of the positions that fill the last windows of clips."""
        filled = tokens // (self.clip_window + 1) * (self.clip_window - 1) if self.clip_window else 0
        return min(tokens, CONVOLVED_POSITIONS + 1) * self.convolved + filled * self.row


def tower_sizes(media: Media) -> TowerSizes:
    """Return the sizes for an embedding: the sums over all towers. All buffers of a program are counted, although torch
    frees them earlier."""
    each = [_sizes(one) for one in media.towers]
    last = each[-1] if each else TowerSizes(0, 0)  # the tower of audio, if there is one
    return replace(
        last, patches=max((one.patches for one in each), default=0), elements=sum(one.elements for one in each)
    )


def _sizes(media: Media) -> TowerSizes:
    tower = lower_tower(media)
    # Embeddings of frames are scaled down to a quarter (LLaVA-OneVision).
    patches = _patches(tower) * (4 if media.tiles is not None and media.video_token is not None else 1)
    elements = patches * (_inputs(media, tower) + _elements(tower.tower))
    for projector in tower.projectors:
        rows = patches
        for stage in projector.stages:
            before, rows = rows, rows // _rows(stage)
            if isinstance(stage, Program):
                elements += max(1, rows) * _elements(stage)
            elif isinstance(stage, QueryProgram):
                # Copied are the rows of squares, or keys and values next to the queries' own.
                together = stage.part.rows if isinstance(stage.part, WindowMerge) else WHOLE_BLOCK
                elements += before * (_elements(stage.context, together) + stage.context.out.width)
                elements += max(1, rows) * (_elements(stage.program) + stage.part.hidden)
            else:
                elements += before * projector.width
    parts, window = media.tower.patches, media.tower.clip_window
    convolved = 0
    if isinstance(parts, SubsampledAudio):
        # The result of the first convolution, before and after the activation.
        convolved = parts.reduction * ((parts.mels + 1) // 2) * parts.channels
    return TowerSizes(patches, elements, convolved, window, _elements(tower.tower) if window else 0)


def tower_operations(media: Media, length: int) -> int:
    """Return the operations for an embedding of an item with `length` embeddings: of its patches and of the projectors.

    Attention in windows counts as attention in the whole item. Convolutions of audio are not counted."""
    return max((_operations(one, length) for one in media.towers), default=0)


def _operations(media: Media, length: int) -> int:
    tower = lower_tower(media)
    patches = _patches(tower)
    total = patches * (2 * multiplied(tower.tower.ops) + attention_operations(tower.tower.ops, patches * length))
    if tower.patches is not None:
        total += patches * 2 * multiplied(tower.patches.ops)
    for projector in tower.projectors:
        rows = patches
        for stage in projector.stages:
            before, rows = rows, rows // _rows(stage)
            if isinstance(stage, Program):
                total += rows * 2 * multiplied(stage.ops)
            elif isinstance(stage, QueryProgram):
                reads = [op.part for op in stage.program.ops if isinstance(op, AttendContext)]
                scores = 4 * _query_count(stage.part) * sum(part.heads * part.head_dim for part in reads)
                total += before * (2 * multiplied(stage.context.ops) + scores)
                total += max(1, rows) * 2 * multiplied(stage.program.ops)
    return total


def _query_count(part: Querying) -> int:
    """Return the number of queries of a frame."""
    match part:
        case Resampler(queries=queries):
            return max(count for _, count in queries)
        case QFormer(queries=count) | Perceiver(queries=count):
            return count
    return 1


def _patches(tower: TowerProgram) -> int:
    """Return the patches that projectors join to an embedding."""
    return max((math.prod(map(_rows, projector.stages)) for projector in tower.projectors), default=1)


def _rows(stage: Stage) -> int:
    """Return the number of rows that a stage joins."""
    match stage.part if isinstance(stage, QueryProgram) else stage:
        case Merge(side=side) | AveragePool(side=side):
            return side**2
        case AverageRows(count=count) | JoinRows(count=count):
            return count
        case ClassRow(rows=rows) | AttentionPool(rows=rows) | WindowMerge(rows=rows):
            return rows
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
    if isinstance(patches, SubsampledAudio):
        return 3 * patches.mels * patches.reduction + patches.hidden  # frames, and two steps of their normalisation
    if isinstance(patches, NormedAudio):
        # Two frames of a position, and the results of both convolutions before and after their norm and ReLU.
        first, second = (bands * size for bands, size in zip((4, 1), patches.channels, strict=True))
        return 16 * patches.bands + 3 * patches.bands * (first + second) + patches.hidden
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
    sizes, tokens = tower_sizes(media), media.step_embeddings(step_tokens)
    each = embedding_copies(ranks) * media.width + sizes.elements
    return cache_bytes + (tokens * each + sizes.of_clips(tokens)) * element_bytes


def _elements(program: Program, together: int = WHOLE_BLOCK) -> int:
    """Return the elements for each row. together: rows that attend to one another, and fill blocks of keys and
    values."""
    blocks = math.ceil(together / WHOLE_BLOCK)
    keys = max((2 * op.kv_heads * op.key_dim for op in attends(program.ops)), default=0)
    keys = math.ceil(keys * blocks * WHOLE_BLOCK / together)
    near = max((_local_elements(op.weight.part) for op in program.ops if isinstance(op, AttendLocal)), default=0)
    return sum(buffer_widths(program.ops).values()) + keys + near


def _local_elements(part: LocalAttention) -> int:
    """Return the elements of torch's local attention: of q, k and v, of the keys and values of two blocks, and of
    scores."""
    return 8 * part.hidden + 8 * part.heads * part.window
