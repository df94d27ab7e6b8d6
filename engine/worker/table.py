"""The request table: data of each running request, by slot. A plan contains only changes to it."""

import numpy as np

from engine.core.plan import NewRow, StepPlan
from engine.kv.layout import NULL_BLOCK, Layout, blocks_of
from engine.media.spectrogram import Samples, read_spectrogram
from engine.sampling.columns import Columns


class RequestTable:
    """Columns of `slots` requests, on the host. Token ids at positions that no plan has reached are stale."""

    def __init__(self, *, slots: int, max_context: int, layout: Layout, vocab: int) -> None:
        # One more than a request can have: a step may be planned before the request is known to be complete.
        width = max_context + 1
        self.tokens = np.zeros((slots, width), np.int32)
        self.rope_lengths = np.zeros(slots, np.int64)
        self.sources = np.zeros(slots, np.int64)  # length of the encoder input
        self.adapters = np.full(slots, -1, np.int32)  # number of the adapter; -1: none
        blocks = blocks_of(width, layout.block_tokens)
        self.tables = tuple(np.full((slots, blocks), NULL_BLOCK, np.int32) for _ in layout.groups)
        self._filled = np.zeros((slots, len(layout.groups)), np.int64)
        self.columns = Columns(slots, vocab)
        self.spectrograms: dict[int, Samples] = {}  # of requests whose encoder input is audio, until it is computed

    @property
    def nbytes(self) -> int:
        """Size of all columns."""
        arrays = (
            self.tokens,
            self.rope_lengths,
            self.sources,
            self.adapters,
            *self.tables,
            self._filled,
            *self.columns.arrays,
        )
        return sum(array.nbytes for array in arrays)

    def apply(self, plan: StepPlan) -> None:
        for slot in plan.dropped:
            self.columns.clear(slot)
            self.spectrograms.pop(slot, None)
        for new in plan.new:
            self._enter(new)
        for row in plan.rows:
            if any(row.blocks):
                self._append(row.slot, row.blocks)
            if row.drafts:
                end = row.first + row.count
                self.tokens[row.slot, end - len(row.drafts) : end] = row.drafts

    def write(self, slots: np.ndarray, positions: np.ndarray, ids: np.ndarray) -> None:
        """Write sampled tokens of these slots."""
        self.tokens[slots, positions] = ids

    def rows_to_score(self, slots: np.ndarray) -> list[int]:
        """Return the indexes of rows that request logprobs of their prompt."""
        requests = self.columns.prompt_logprobs
        return [row for row, slot in enumerate(slots.tolist()) if slot in requests] if requests else []

    def routed_rows(self, slots: np.ndarray) -> list[int]:
        """Return the indexes of rows that return the selected experts."""
        routed = self.columns.routed
        return [row for row, slot in enumerate(slots.tolist()) if slot in routed] if routed else []

    def _enter(self, new: NewRow) -> None:
        self.tokens[new.slot, : len(new.ids)] = new.ids
        self.rope_lengths[new.slot] = new.rope_length
        self.sources[new.slot] = new.source
        self.adapters[new.slot] = new.adapter
        self.spectrograms.pop(new.slot, None)
        if new.source and new.media:
            self.spectrograms[new.slot] = read_spectrogram(new.media[0])
        self._filled[new.slot] = 0
        for table in self.tables:
            table[new.slot] = NULL_BLOCK
        self.columns.write(new.slot, new.sampling, prompt_tokens=new.prompt_tokens, stop_ids=new.stop_ids)

    def _append(self, slot: int, blocks: tuple[tuple[int, ...], ...]) -> None:
        for group, (table, added) in enumerate(zip(self.tables, blocks, strict=True)):
            start = self._filled[slot, group]
            table[slot, start : start + len(added)] = added
            self._filled[slot, group] += len(added)
