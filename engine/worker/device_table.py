"""The request table on a device, by slot, and its changes by a plan: one upload per step.

All columns are in one range of 32-bit words, so that every change is a run of words at an offset. The host writes the
rows of a step and the runs of its changes to pinned memory; one copy transfers them and one kernel applies them. A step
that has not uploaded its changes is refused.
"""

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from engine.core.plan import StepPlan
from engine.kv.layout import Layout, blocks_of
from engine.sampling.columns import Columns
from engine.sampling.device_columns import staged
from engine.worker.rows import PlanRows
from kernels.sampling.columns import FIELDS, DeviceColumns
from kernels.step_inputs import STAGED_WRITES

_ALIGNED = 32  # words: columns start at multiples of 128 bytes
_IN_FLIGHT = 4  # number of host buffers; a buffer is reused only after its upload has finished
_RUN = 3  # words that describe a run: offset in the table, length, offset of its words in the upload

NO_DELTAS: Mapping[int, int] = {}
Run = tuple[int, np.ndarray]  # (offset in the table's memory, words)


class DeviceTable:
    """Columns of all slots, int32 or bit-cast to it. Their addresses never change.

    tokens: [slots, max_context + 1] ids.
    tables: [groups, slots, blocks].
    rope_lengths: [slots].
    columns: sampling parameters.
    segments: [slots, segments - 1], first positions of all segments but the first; None without segment embeddings.
    sources: [slots], length of the encoder input; None without an encoder.
    rope_deltas: [slots], rotary position of the reply's tokens minus their position; None without M-RoPE.
    adapters: [slots], LoRA adapter, -1 for none; None for a model without adapters."""

    def __init__(
        self,
        *,
        slots: int,
        max_context: int,
        layout: Layout,
        device: torch.device,
        segments: int = 0,
        encoder_decoder: bool = False,
        rope_deltas: bool = False,
        adapters: bool = False,
    ) -> None:
        """segments: number of segment embeddings of the model. encoder_decoder: encoder-decoder model. rope_deltas:
        model with M-RoPE. adapters: model with LoRA adapters."""
        # One more than a request can have: a step may be planned before the request is known to be complete.
        width = aligned(max_context + 1)
        blocks = aligned(blocks_of(max_context + 1, layout.block_tokens))
        groups = len(layout.groups)
        sizes = [slots * width, groups * slots * blocks, aligned(slots), len(FIELDS) * aligned(slots)]
        begins = max(0, segments - 1)
        sizes += [slots * begins, slots if encoder_decoder else 0, slots if rope_deltas else 0]
        sizes += [slots if adapters else 0]
        starts = np.cumsum([0, *map(aligned, sizes)]).tolist()
        self.memory = torch.zeros(starts[-1], dtype=torch.int32, device=device)
        pieces = [self.memory[start : start + size] for start, size in zip(starts, sizes, strict=False)]
        self.tokens = pieces[0].view(slots, width)
        self.tables = pieces[1].view(groups, slots, blocks)
        self.rope_lengths = pieces[2]
        fields = pieces[3].view(len(FIELDS), -1)
        self.columns = DeviceColumns.of(fields)
        self.segments = pieces[4].view(slots, begins) if segments else None
        self.sources = pieces[5] if encoder_decoder else None
        self.rope_deltas = pieces[6] if rope_deltas else None
        self.adapters = pieces[7] if adapters else None
        self._starts, self._width, self._blocks, self._line = starts, width, blocks, fields.shape[1]
        self._filled = np.zeros((slots, groups), np.int64)
        self._slots = slots

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    def changes(self, plan: StepPlan, columns: Columns | None, deltas: Mapping[int, int] = NO_DELTAS) -> Iterator[Run]:
        """Yield the changes of a plan. `columns` has its new requests already; pooling models have no columns. deltas:
        `rope_deltas` of new requests that are not 0, by slot."""
        token_start, table_start, rope_start, field_start, segment_start, source_start, *rest = self._starts[:8]
        delta_start, adapter_start = rest
        begins = 0 if self.segments is None else self.segments.shape[1]
        for new in plan.new:
            self._filled[new.slot] = 0
            yield token_start + new.slot * self._width, np.array(new.ids, np.int32)
            yield rope_start + new.slot, np.array([new.rope_length], np.int32)
            if begins:
                yield segment_start + new.slot * begins, _begins(new.segments, begins)
            if self.sources is not None:
                yield source_start + new.slot, np.array([new.source], np.int32)
            if self.rope_deltas is not None:
                yield delta_start + new.slot, np.array([deltas.get(new.slot, 0)], np.int32)
            if self.adapters is not None:
                yield adapter_start + new.slot, np.array([new.adapter], np.int32)
        if plan.new and columns is not None:
            slots = np.array([new.slot for new in plan.new])
            for field, values in enumerate(staged(columns, slots)):
                for slot, value in zip(slots.tolist(), values, strict=True):
                    yield field_start + field * self._line + slot, value.reshape(1)
        for row in plan.rows:
            if row.drafts:
                start = row.first + row.count - len(row.drafts)
                yield token_start + row.slot * self._width + start, np.array(row.drafts, np.int32)
            for group, blocks in enumerate(row.blocks):
                if blocks:
                    start = int(self._filled[row.slot, group])
                    place = (group * self._slots + row.slot) * self._blocks + start
                    yield table_start + place, np.array(blocks, np.int32)
                    self._filled[row.slot, group] += len(blocks)


class StepUpload:
    """The rows of a step at a fixed address on the device, which captured graphs read, and their upload.

    slot, first: [rows] int32. query_start: [rows + 1] int32. samples: [rows] int32, 1 for rows that sample a token.
    All have the maximum number of rows of a step."""

    def __init__(self, table: DeviceTable, rows: int) -> None:
        self._table = table
        self._rows = aligned(rows + 1)
        self._head = 4 * self._rows
        device = table.memory.device
        # Room for the longest request and everything small.
        self._capacity = self._head + aligned(table.tokens.shape[1] + 64 * rows + 4096)
        pinned = device.type == "cuda"
        self._hosts = [torch.zeros(self._capacity, dtype=torch.int32, pin_memory=pinned) for _ in range(_IN_FLIGHT)]
        self._free = [torch.cuda.Event() for _ in range(_IN_FLIGHT)] if pinned else None
        self._turn = 0
        self.memory = torch.zeros(self._capacity, dtype=torch.int32, device=device)
        self.slot, self.first, self.query_start, self.samples = self.memory[: self._head].view(4, self._rows).unbind()
        self._staged = -1

    def send(
        self, plan: StepPlan, rows: PlanRows, columns: Columns | None, deltas: Mapping[int, int] = NO_DELTAS
    ) -> None:
        """Upload the rows and apply the plan's changes to the table. deltas: see `DeviceTable.changes`."""
        runs = list(self._table.changes(plan, columns, deltas))
        head = self._packed_rows(rows)
        at = 0
        while True:
            host = self._next()
            words = host.numpy()
            words[: self._head] = head
            count, at, used = self._pack(words, runs, at)
            self.memory[:used].copy_(host[:used], non_blocking=True)
            if self._free is not None:
                self._free[self._turn].record()
            if count:
                STAGED_WRITES(self._table.memory, self._runs, count)
            if at == len(runs):
                break
        self._staged = plan.step

    def check(self, plan: StepPlan) -> None:
        assert self._staged == plan.step, f"step {plan.step} runs, but the last upload was for step {self._staged}"

    @property
    def _runs(self) -> Tensor:
        return self.memory[self._head :]

    def _packed_rows(self, rows: PlanRows) -> np.ndarray:
        """Return the rows as words. Rows beyond the plan's have no tokens and slot 0."""
        head = np.zeros((4, self._rows), np.int32)
        count = len(rows.slots)
        head[0, :count], head[1, :count] = rows.slots, rows.first
        ends = np.cumsum(rows.count)
        head[2, 1 : count + 1] = ends
        head[2, count + 1 :] = ends[-1] if count else 0
        head[3, rows.sampling] = 1
        return head.reshape(-1)

    def _next(self) -> Tensor:
        self._turn = (self._turn + 1) % _IN_FLIGHT
        if self._free is not None:
            self._free[self._turn].synchronize()  # returns at once, unless four uploads are in flight
        return self._hosts[self._turn]

    def _pack(self, words: np.ndarray, runs: list[Run], at: int) -> tuple[int, int, int]:
        """Write as many runs as fit, beginning with `at`. Return their number, the next run, and the words used."""
        room, chosen = self._capacity - self._head, at
        size = 0
        while chosen < len(runs) and size + _RUN + len(runs[chosen][1]) <= room:
            size += _RUN + len(runs[chosen][1])
            chosen += 1
        assert chosen > at or at == len(runs), "an upload has room for the longest request"
        count = chosen - at
        source = _RUN * count
        header = words[self._head : self._head + source].reshape(count, _RUN)
        for number, (place, values) in enumerate(runs[at:chosen]):
            header[number] = place, len(values), source
            words[self._head + source : self._head + source + len(values)] = values
            source += len(values)
        return count, chosen, self._head + source


def _begins(segments: tuple[int, ...], count: int) -> np.ndarray:
    """Return the first positions of all segments but the first, given their lengths. Missing segments get a position
    that no prompt has."""
    found = np.full(count, np.iinfo(np.int32).max, np.int32)
    starts = np.cumsum(segments[:-1], dtype=np.int32)
    found[: len(starts)] = starts
    return found


def aligned(count: int) -> int:
    """Round up to a multiple of the alignment."""
    return -(-count // _ALIGNED) * _ALIGNED
