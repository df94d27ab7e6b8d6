"""Media of running requests: their tensors by slot, and the embeddings that the tower computes from them.

An item is computed completely when a step first needs one of its embeddings. Its embeddings are kept for other requests
with the same item, the least recently used ones first to go, and in any case until the prompt has passed it.
"""

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.api.media import MediaItem
from engine.core.plan import MediaCounts, NewRow, StepPlan
from engine.layers.batch import MediaRows
from engine.models.parts import Media
from engine.worker.grid_positions import PromptPositions, as_array, prompt_positions
from engine.worker.rows import PlanRows


class Tower(Protocol):
    """Computes embeddings."""

    def encode(self, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """Return the embeddings of each item, [tokens, Media.width]."""


@dataclass
class OpenMedia:
    """Media of a request in the table."""

    items: tuple[MediaItem, ...]
    end: int  # position after the last of their tokens
    positions: PromptPositions | None
    prompt_tokens: int
    begun: set[bytes] = field(default_factory=set)  # digests whose embeddings a step needed

    def begin(self, digest: bytes) -> bool:
        """Return whether this is the first step of the request that needs the embeddings of this item."""
        is_first = digest not in self.begun
        self.begun.add(digest)
        return is_first


@dataclass(frozen=True)
class StepMedia:
    """Inputs of a step from media. Arrays are None if no token needs them."""

    rows: MediaRows | None = None
    axes: np.ndarray | None = None  # [tokens, 3] int64
    spans: np.ndarray | None = None  # [tokens, 2] int64
    failed: dict[int, str] = field(default_factory=dict)  # rows whose items do not fit their prompts
    counts: MediaCounts | None = None
    replies: bool = False  # all tokens follow their prompts, so their `axes` differ from their positions by a constant

    @property
    def is_empty(self) -> bool:
        """Return whether the step has no input from media."""
        return self.rows is None and self.axes is None and self.spans is None


def without_deltas(media: StepMedia) -> StepMedia:
    """Return the inputs for a device that adds the deltas of M-RoPE itself to the positions of replies."""
    return replace(media, axes=None) if media.replies else media


NO_MEDIA = StepMedia()


@dataclass(frozen=True)
class _Piece:
    """Tokens of an item in a step."""

    row: int
    token: int  # first one in the step
    item: MediaItem
    first: int  # first embedding
    count: int


class MediaStore:
    def __init__(self, media: Media, tower: Tower, dtype: torch.dtype, device: torch.device, cache_bytes: int) -> None:
        """cache_bytes: limit of the embeddings that are kept for other requests."""
        self._media, self._tower, self._dtype, self._device = media, tower, dtype, device
        self._most, self._size = cache_bytes, 0
        self._open: dict[int, OpenMedia] = {}
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()

    @property
    def is_vector(self) -> bool:
        """An embedding is the vector of a prompt, which the text model does not read."""
        return self._media.is_vector

    def vectors(self, media: StepMedia) -> dict[int, Tensor]:
        """Return the vectors of images of the step, by the number of their token."""
        if not self.is_vector or media.rows is None:
            return {}
        return dict(zip(media.rows.tokens.tolist(), media.rows.embeddings, strict=True))

    @property
    def nbytes(self) -> int:
        """Size of the embeddings that are kept."""
        return self._size

    def apply(self, plan: StepPlan) -> None:
        """Follow the requests that leave and enter the table."""
        for slot in plan.dropped:
            self._open.pop(slot, None)
        for new in plan.new:
            if new.media or self._media.attention == "prefix":
                self._open[new.slot] = self._opened(new)

    def inputs(self, rows: PlanRows) -> StepMedia:
        """Return the inputs of a step. Computes the embeddings that it needs first."""
        if not self._open:
            return NO_MEDIA
        starts = (np.cumsum(rows.count) - rows.count).tolist()
        total = int(rows.count.sum())
        places = list(zip(rows.slots.tolist(), rows.first.tolist(), rows.count.tolist(), starts, strict=True))
        pieces = [piece for number, place in enumerate(places) for piece in self._pieces(number, *place)]
        media, failed, counts = self._embedded(pieces, {piece.row: places[piece.row][0] for piece in pieces})
        self._evict(self._needed_next(places))
        replies = all(count == 1 and self._follows_prompt(slot, first) for slot, first, count, _ in places)
        return StepMedia(media, self._axes(places, total), self._spans(places, total), failed, counts, replies)

    def kept_rows(self, places: Sequence[tuple[int, int, int]]) -> MediaRows | None:
        """Return the embeddings that are kept of the tokens of rows: (slot, first position, count)."""
        tokens, chosen, start = [], [], 0
        for number, (slot, first, count) in enumerate(places):
            for piece in self._pieces(number, slot, first, count, start):
                if (found := self._kept.get(piece.item.digest)) is not None:
                    tokens.append(np.arange(piece.token, piece.token + piece.count))
                    chosen.append(found[piece.first : piece.first + piece.count])
            start += count
        if not chosen:
            return None
        return MediaRows(torch.from_numpy(np.concatenate(tokens)).to(self._device), torch.cat(chosen))

    @property
    def deltas(self) -> dict[int, int]:
        """Return the difference of M-RoPE positions of a reply's tokens and their positions, by slot."""
        found = ((slot, mine.positions) for slot, mine in self._open.items())
        return {slot: positions.delta for slot, positions in found if positions is not None}

    def _follows_prompt(self, slot: int, position: int) -> bool:
        mine = self._open.get(slot)
        return mine is None or position >= mine.prompt_tokens

    def _opened(self, new: NewRow) -> OpenMedia:
        positions = None
        if self._media.positions is not None:
            positions = prompt_positions(new.prompt_tokens, new.media, self._media.positions)
        end = max((sum(item.spans[-1]) for item in new.media), default=0)
        return OpenMedia(new.media, end, positions, new.prompt_tokens)

    def _pieces(self, row: int, slot: int, first: int, count: int, token: int) -> list[_Piece]:
        mine = self._open.get(slot)
        if mine is None or first >= mine.end:
            return []
        found = []
        for item in mine.items:
            done = 0
            for start, size in item.spans:
                low, high = max(first, start), min(first + count, start + size)
                if low < high:
                    found.append(_Piece(row, token + low - first, item, done + low - start, high - low))
                done += size
        return found

    def _embedded(
        self, pieces: Sequence[_Piece], slots: Mapping[int, int]
    ) -> tuple[MediaRows | None, dict[int, str], MediaCounts | None]:
        """Return the embeddings of these tokens, the rows whose items the tower cannot read or that have another number
        of embeddings than tokens, and counts. slots: by row."""
        if not pieces:
            return None, {}, None
        items = {piece.item.digest: piece.item for piece in pieces}
        missing = [item for digest, item in items.items() if digest not in self._kept]
        begun = sum(self._open[slots[piece.row]].begin(piece.item.digest) for piece in pieces)
        began = time.perf_counter()
        refused = self._encode(missing)
        counts = MediaCounts(len(missing), max(0, begun - len(missing)), time.perf_counter() - began)
        failed: dict[int, str] = {}
        chosen, tokens = [], []
        for piece in pieces:
            if piece.item.digest in refused:
                failed[piece.row] = refused[piece.item.digest]
                continue
            embeddings = self._kept[piece.item.digest]
            self._kept.move_to_end(piece.item.digest)
            expected = sum(size for _, size in piece.item.spans)
            if len(embeddings) != expected:
                failed[piece.row] = (
                    f"the {piece.item.modality} has {len(embeddings)} embeddings, but {expected} tokens in the prompt"
                )
                continue
            chosen.append(embeddings[piece.first : piece.first + piece.count])
            tokens.append(np.arange(piece.token, piece.token + piece.count))
        if not chosen:
            return None, failed, counts
        indexes = torch.from_numpy(np.concatenate(tokens)).to(self._device, non_blocking=True)
        return MediaRows(indexes, torch.cat(chosen)), failed, counts

    def _encode(self, items: Sequence[MediaItem]) -> dict[bytes, str]:
        """Compute the embeddings of these items. Return why the tower cannot read an item, by digest."""
        try:
            self._keep(items)
        except ValueError as error:
            if len(items) == 1:
                return {items[0].digest: str(error)}
            # The others are computed alone, because the error does not name the item.
            return {digest: why for item in items for digest, why in self._encode([item]).items()}
        return {}

    def _keep(self, items: Sequence[MediaItem]) -> None:
        if not items:
            return
        inputs = [
            {name: torch.from_numpy(as_array(tensor).copy()).to(self._device) for name, tensor in item.tensors.items()}
            for item in items
        ]
        for item, embeddings in zip(items, self._tower.encode(inputs), strict=True):
            kept = embeddings.to(self._dtype).clone()
            self._kept[item.digest] = kept
            self._size += kept.nbytes

    def _needed_next(self, places: Sequence[tuple[int, int, int, int]]) -> set[bytes]:
        """Return the items in whose tokens the rows of a step end."""
        found = set()
        for slot, first, count, _ in places:
            mine = self._open.get(slot)
            if mine is not None:
                end = first + count
                found.update(item.digest for item in mine.items if item.spans[0][0] < end < sum(item.spans[-1]))
        return found

    def _evict(self, needed: set[bytes]) -> None:
        for digest in [one for one in self._kept if one not in needed]:
            if self._size <= self._most:
                return
            self._size -= self._kept.pop(digest).nbytes

    def _axes(self, places: Sequence[tuple[int, int, int, int]], total: int) -> np.ndarray | None:
        """Return the M-RoPE positions of the tokens, or None if all are the tokens' positions."""
        if self._media.positions is None or not any(slot in self._open for slot, *_ in places):
            return None
        axes = np.empty((total, 3), np.int64)
        for slot, first, count, token in places:
            mine = self._open.get(slot)
            if mine is None or mine.positions is None:
                axes[token : token + count] = np.arange(first, first + count)[:, None]
            else:
                axes[token : token + count] = mine.positions.of(first, count)
        return axes

    def _spans(self, places: Sequence[tuple[int, int, int, int]], total: int) -> np.ndarray | None:
        """Return the span of each token, or None if no token has one."""
        if self._media.attention == "causal":
            return None
        spans, some = np.zeros((total, 2), np.int64), False
        for slot, first, count, token in places:
            mine = self._open.get(slot)
            if mine is None:
                continue
            own = [(0, mine.prompt_tokens)] if self._media.attention == "prefix" else []
            if self._media.attention == "item":
                visual = (item for item in mine.items if item.modality != "audio")
                own = [(start, start + size) for item in visual for start, size in item.spans]
            for start, end in own:
                low, high = max(first, start), min(first + count, end)
                if low < high:
                    spans[token + low - first : token + high - first] = start, end
                    some = True
        return spans if some else None
