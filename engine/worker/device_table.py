"""What a device keeps of each running request, by slot, and how a plan changes it: one upload a step.

One range of 32-bit words holds all columns, so that any change is a run of words at a place. The host writes the rows
of a step and the runs of its changes into pinned memory; one copy brings them over and one kernel puts them in place.
What was staged takes effect there and not before; a step that forgets to stage its changes is refused.
"""

from collections.abc import Iterator

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

_ALIGNED = 32  # words: columns begin at multiples of 128 bytes
_IN_FLIGHT = 4  # uploads whose memory is not written again before they are done
_RUN = 3  # words that describe a run: place, length, where its words stand

Run = tuple[int, np.ndarray]  # place in the table's memory, words


class DeviceTable:
    """`tokens`: [slots, max_context + 1] ids; `tables`: [groups, slots, blocks]; `rope_lengths`: [slots]; `columns`:
    sampling; `segments`: [slots, segments - 1], where those but the first begin, None for a model without rows for
    them; `sources`: [slots], tokens that an encoder reads, None for a model without one in front. All int32 or bit-cast
    from it, for the life of the engine at one place."""

    def __init__(
        self,
        *,
        slots: int,
        max_context: int,
        layout: Layout,
        device: torch.device,
        segments: int = 0,
        sourced: bool = False,
    ) -> None:
        """segments: for which the model has a row each. sourced: there is an encoder in front."""
        # one more than a request can have: a step planned before its request turned out to be full still writes there
        width = aligned(max_context + 1)
        blocks = aligned(blocks_of(max_context + 1, layout.block_tokens))
        groups = len(layout.groups)
        sizes = [slots * width, groups * slots * blocks, aligned(slots), len(FIELDS) * aligned(slots)]
        begins = max(0, segments - 1)
        sizes += [slots * begins, slots if sourced else 0]
        starts = np.cumsum([0, *map(aligned, sizes)]).tolist()
        self.memory = torch.zeros(starts[-1], dtype=torch.int32, device=device)
        pieces = [self.memory[start : start + size] for start, size in zip(starts, sizes, strict=False)]
        self.tokens = pieces[0].view(slots, width)
        self.tables = pieces[1].view(groups, slots, blocks)
        self.rope_lengths = pieces[2]
        fields = pieces[3].view(len(FIELDS), -1)
        self.columns = DeviceColumns.of(fields)
        self.segments = pieces[4].view(slots, begins) if segments else None
        self.sources = pieces[5] if sourced else None
        self._starts, self._width, self._blocks, self._line = starts, width, blocks, fields.shape[1]
        self._filled = np.zeros((slots, groups), np.int64)
        self._slots = slots

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    def changes(self, plan: StepPlan, columns: Columns | None) -> Iterator[Run]:
        """What this plan changes, `columns` knowing its new requests already; None where nothing is drawn."""
        token_start, table_start, rope_start, field_start, segment_start, source_start = self._starts[:6]
        begins = 0 if self.segments is None else self.segments.shape[1]
        for new in plan.new:
            self._filled[new.slot] = 0
            yield token_start + new.slot * self._width, np.array(new.ids, np.int32)
            yield rope_start + new.slot, np.array([new.rope_length], np.int32)
            if begins:
                yield segment_start + new.slot * begins, _begins(new.segments, begins)
            if self.sources is not None:
                yield source_start + new.slot, np.array([new.source], np.int32)
        if plan.new and columns is not None:
            slots = np.array([new.slot for new in plan.new])
            for field, values in enumerate(staged(columns, slots)):
                for slot, value in zip(slots.tolist(), values, strict=True):
                    yield field_start + field * self._line + slot, value.reshape(1)
        for row in plan.rows:
            for group, blocks in enumerate(row.blocks):
                if blocks:
                    start = int(self._filled[row.slot, group])
                    place = (group * self._slots + row.slot) * self._blocks + start
                    yield table_start + place, np.array(blocks, np.int32)
                    self._filled[row.slot, group] += len(blocks)


class StepUpload:
    """The rows of a step at one place on the device, which a captured graph reads, and the way there.

    `slot`, `first`: [rows] int32; `query_start`: [rows + 1] int32, for as many rows as a step can have."""

    def __init__(self, table: DeviceTable, rows: int) -> None:
        self._table = table
        self._rows = aligned(rows + 1)
        self._head = 3 * self._rows
        device = table.memory.device
        # room for the longest request and everything small
        self._capacity = self._head + aligned(table.tokens.shape[1] + 64 * rows + 4096)
        pinned = device.type == "cuda"
        self._hosts = [torch.zeros(self._capacity, dtype=torch.int32, pin_memory=pinned) for _ in range(_IN_FLIGHT)]
        self._free = [torch.cuda.Event() for _ in range(_IN_FLIGHT)] if pinned else None
        self._turn = 0
        self.memory = torch.zeros(self._capacity, dtype=torch.int32, device=device)
        self.slot, self.first, self.query_start = self.memory[: self._head].view(3, self._rows).unbind()
        self._staged = -1

    def send(self, plan: StepPlan, rows: PlanRows, columns: Columns | None) -> None:
        """Puts the plan's changes in place and its rows where a step reads them."""
        runs = list(self._table.changes(plan, columns))
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
        assert self._staged == plan.step, f"step {plan.step} runs on what step {self._staged} staged"

    @property
    def _runs(self) -> Tensor:
        return self.memory[self._head :]

    def _packed_rows(self, rows: PlanRows) -> np.ndarray:
        """Rows behind the plan's have no tokens, on slot 0."""
        head = np.zeros((3, self._rows), np.int32)
        count = len(rows.slots)
        head[0, :count], head[1, :count] = rows.slots, rows.first
        ends = np.cumsum(rows.count)
        head[2, 1 : count + 1] = ends
        head[2, count + 1 :] = ends[-1] if count else 0
        return head.reshape(-1)

    def _next(self) -> Tensor:
        self._turn = (self._turn + 1) % _IN_FLIGHT
        if self._free is not None:
            self._free[self._turn].synchronize()  # done long ago, unless four uploads are on their way
        return self._hosts[self._turn]

    def _pack(self, words: np.ndarray, runs: list[Run], at: int) -> tuple[int, int, int]:
        """Writes as many of the runs from `at` on as fit: their number, the next one, and the words in use."""
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
    """First positions of the segments behind the first, of so many tokens each; of those that are not there, one that
    no prompt has."""
    found = np.full(count, np.iinfo(np.int32).max, np.int32)
    starts = np.cumsum(segments[:-1], dtype=np.int32)
    found[: len(starts)] = starts
    return found


def aligned(count: int) -> int:
    """So many words, or as many more that what follows is aligned too."""
    return -(-count // _ALIGNED) * _ALIGNED
