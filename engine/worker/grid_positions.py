"""Positions of M-RoPE: three for each token of a prompt, in time, height and width.

The three positions of a text token are equal. A token of an image has the positions of its place in the grid, counted
from the text before it. The text after it continues after the longer side of the grid. The reply continues after the
largest position of the prompt, so its positions differ from the indexes of its tokens by a constant. Source:
transformers modeling_qwen2_vl.py, modeling_qwen2_5_vl.py and modeling_qwen3_vl.py (get_rope_index).
"""

from dataclasses import dataclass

import numpy as np

from engine.api.media import INTERLEAVED, MediaItem, MediaTensor
from engine.models.parts import GridPositions

DTYPES = {"float32": "<f4", "int64": "<i8"}


def as_array(tensor: MediaTensor) -> np.ndarray:
    """Return a read-only array."""
    return np.frombuffer(tensor.data, DTYPES[tensor.dtype]).reshape(tensor.shape)


@dataclass(frozen=True)
class PromptPositions:
    """M-RoPE positions of a sequence."""

    prompt: np.ndarray  # [prompt tokens, 3] int64
    delta: int  # position of a later token minus its index

    def of(self, first: int, count: int) -> np.ndarray:
        """Return the positions of some tokens, [count, 3]."""
        known = self.prompt[first : first + count]
        rest = np.arange(first + len(known), first + count) + self.delta
        return np.concatenate((known, np.repeat(rest[:, None], 3, 1)))


def prompt_positions(tokens: int, items: tuple[MediaItem, ...], declared: GridPositions) -> PromptPositions:
    """Return the positions of a prompt of this many tokens."""
    found = np.empty((tokens, 3), np.int64)
    at = following = 0  # index of the next token, and its position
    base: int | None = None  # first position of the pieces of a video with its sound, after one of them
    for item in items:
        if INTERLEAVED in item.tensors:
            ((first, count),) = item.spans
            if base is None or first > at:
                # The two tokens before the pieces share a position, and so do the two after them.
                own = _text(first - at, base is not None, True)
                found[at:first] = (following + own)[:, None]
                base = following = following + int(own.max(initial=-1)) + 1
            places = base + _piece(item, count, declared)
            found[first : first + count] = places
            following, at = int(places.max()) + 1, first + count
            continue
        if item.modality == "audio":
            continue  # it has positions of text
        if base is not None:
            own = _text(item.spans[0][0] - at, True, False)
            found[at : at + len(own)] = (following + own)[:, None]
            following, at, base = following + int(own.max(initial=-1)) + 1, at + len(own), None
        for grid, (first, count) in zip(_grids(item, declared), item.spans, strict=False):
            found[at:first] = (following + np.arange(first - at))[:, None]
            following += first - at
            places = grid[:count]
            found[first : first + len(places)] = following + places
            found[first + len(places) : first + count] = following
            following += int(places[:, 0 if declared.after_time else 1 :].max(initial=-1)) + 1
            at = first + count
    found[at:] = (following + _text(tokens - at, base is not None, False))[:, None]
    return PromptPositions(found, int(found.max(initial=-1)) + 1 - tokens)


def _text(count: int, follows: bool, precedes: bool) -> np.ndarray:
    """Return the places of tokens of text. follows: pieces of a video with its sound; precedes: such pieces."""
    places = np.arange(count)
    if follows:
        places[1:] -= 1
    if precedes and count > 1:
        places[-1] -= 1
    return places


def _piece(item: MediaItem, count: int, declared: GridPositions) -> np.ndarray:
    """Return the places of the tokens of a piece of a video with its sound, [count, 3]."""
    first = int(as_array(item.tensors[INTERLEAVED])[0])
    if item.modality == "audio":
        return np.repeat(first + np.arange(count)[:, None], 3, 1)
    (grid,) = _grids(item, declared, first)
    return grid


def _grids(item: MediaItem, declared: GridPositions, begin: int = 0) -> list[np.ndarray]:
    """Return the places of the tokens of each span, [tokens, 3]. begin: number of the first frame."""
    shapes = as_array(item.tensors["video_grid_thw" if item.modality == "video" else "image_grid_thw"]).reshape(-1, 3)
    seconds = item.tensors.get("second_per_grid_ts")
    scale = 1.0
    if item.modality == "video" and declared.time == "seconds" and seconds is not None:
        scale = float(as_array(seconds).reshape(-1)[0]) * declared.tokens_per_second
    places = []
    for frames, height, width in shapes.tolist():
        rows, columns = height // declared.side, width // declared.side
        grid = np.stack(np.meshgrid(np.arange(frames), np.arange(rows), np.arange(columns), indexing="ij"), -1)
        grid[..., 0] = ((begin + grid[..., 0]) * scale).astype(np.int64)
        if declared.time == "separate":
            grid[..., 0] = 0
        places += [frame.reshape(-1, 3) for frame in grid]
    return places if len(item.spans) == len(places) else [np.concatenate(places)]
