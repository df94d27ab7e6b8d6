"""A step's tensors, made on the device from the request table and the rows that were staged."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.kv.layout import Layout
from engine.layers.fused import DeviceStep
from engine.worker.device_table import DeviceTable, StepUpload
from kernels.step_inputs import STEP_INPUTS
from kernels.step_segments import STEP_SEGMENTS


@dataclass(frozen=True)
class StagedSteps:
    table: DeviceTable
    upload: StepUpload
    layout: Layout
    pages: Tensor

    def step(self, rows: int, tokens: int, *, singles: bool, spans: bool) -> DeviceStep:
        """Of the first so many rows that `upload` holds, with so many tokens, padding among them."""
        table, upload = self.table, self.upload
        slot, first, query_start = upload.slot[:rows], upload.first[:rows], upload.query_start[: rows + 1]
        ids, positions, rope_lengths, lengths, places = STEP_INPUTS(
            table.tokens,
            table.rope_lengths,
            table.tables,
            slot,
            first,
            query_start,
            tokens,
            self.layout.block_tokens,
        )
        segments = None
        if table.segments is not None:
            segments = STEP_SEGMENTS(table.segments, slot, first, query_start, tokens)
        return DeviceStep(
            ids=ids,
            positions=positions,
            rope_lengths=rope_lengths,
            places=places,
            slot=slot,
            query_start=query_start,
            lengths=lengths,
            tables=table.tables,
            pages=self.pages,
            singles=singles,
            spans=spans,
            segments=segments,
        )


def indexes(values: np.ndarray, device: torch.device) -> Tensor:
    """[n] int64 on the device, in the order of its work; the host does not wait."""
    return torch.from_numpy(np.ascontiguousarray(values, np.int64)).to(device, non_blocking=True)
