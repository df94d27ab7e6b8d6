"""Build a step's tensors on the device from the request table and the uploaded rows."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from engine.kv.layout import Layout
from engine.layers.fused.step import CrossAttentionInputs, DeviceStep
from engine.layers.states import LayerStates
from engine.worker.device_table import DeviceTable, StepUpload, aligned
from engine.worker.media import NO_MEDIA, StepMedia
from engine.worker.rows import EncoderInputs
from kernels.cross_attention_inputs import CROSS_ATTENTION_INPUTS
from kernels.step_adapters import STEP_ADAPTERS
from kernels.step_inputs import STEP_INPUTS
from kernels.step_segments import STEP_SEGMENTS


@dataclass(frozen=True)
class StagedSteps:
    table: DeviceTable
    upload: StepUpload
    layout: Layout
    pages: Tensor
    states: LayerStates = ()
    num_adapters: int = 0  # LoRA adapters of the model, or slots for them

    def step(
        self,
        rows: int,
        tokens: int,
        *,
        singles: bool,
        spans: bool,
        encoder_inputs: EncoderInputs | None = None,
        media: StepMedia = NO_MEDIA,
    ) -> DeviceStep:
        """Build the step from the first `rows` rows in `upload`. `tokens` includes padding. entering: encoder inputs
        that
        the step reads (encoder-decoder)."""
        table, upload = self.table, self.upload
        slot, first, query_start = upload.slot[:rows], upload.first[:rows], upload.query_start[: rows + 1]
        step = self._step(slot, first, query_start, tokens, singles=singles, spans=spans)
        if media.rows is not None or media.axes is not None or media.spans is not None:
            device = self.pages.device
            axes, own = (None if one is None else integers(one, device) for one in (media.axes, media.spans))
            return replace(step, media=media.rows, axes=axes, bidirectional=own)
        if table.rope_deltas is not None and not spans:
            return replace(step, rope_deltas=table.rope_deltas[slot.long()])
        if table.sources is None:
            return step
        decoder_starts, positions, *each = CROSS_ATTENTION_INPUTS(table.sources, step.positions, slot, query_start)
        slots, lengths, starts = each
        read = None if encoder_inputs is None or not len(encoder_inputs.slots) else self._sources(encoder_inputs)
        return replace(
            step,
            positions=positions,
            cross_attention=CrossAttentionInputs(decoder_starts, slots, starts, lengths),
            encoder_inputs=read,
        )

    def _sources(self, encoder_inputs: EncoderInputs) -> DeviceStep:
        """Build the step of the encoder inputs. Its rows are uploaded separately, without waiting for the device."""
        rows = len(encoder_inputs.slots)
        head = np.zeros((3, aligned(rows + 1)), np.int32)
        head[0, :rows], head[2, 1 : rows + 1] = encoder_inputs.slots, np.cumsum(encoder_inputs.count)
        slot, first, query_start = torch.from_numpy(head).to(self.pages.device, non_blocking=True).unbind()
        tokens = int(encoder_inputs.count.sum())
        return self._step(slot[:rows], first[:rows], query_start[: rows + 1], tokens, singles=False, spans=False)

    def _step(
        self, slot: Tensor, first: Tensor, query_start: Tensor, tokens: int, *, singles: bool, spans: bool
    ) -> DeviceStep:
        table = self.table
        ids, positions, rope_lengths, lengths, slot_mapping = STEP_INPUTS(
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
        adapters = None
        if table.adapters is not None:
            adapters = STEP_ADAPTERS(table.adapters, slot, query_start, tokens, self.num_adapters)
        return DeviceStep(
            ids=ids,
            positions=positions,
            rope_lengths=rope_lengths,
            slot_mapping=slot_mapping,
            slot=slot,
            first=first,
            states=self.states,
            query_start=query_start,
            lengths=lengths,
            tables=table.tables,
            pages=self.pages,
            singles=singles,
            spans=spans,
            segments=segments,
            adapters=adapters,
        )


def integers(values: np.ndarray, device: torch.device) -> Tensor:
    """Return int32 on the device, in stream order; the host does not wait."""
    return torch.from_numpy(np.ascontiguousarray(values, np.int32)).to(device, non_blocking=True)


def indexes(values: np.ndarray, device: torch.device) -> Tensor:
    """Return [n] int64 on the device, in stream order; the host does not wait."""
    return torch.from_numpy(np.ascontiguousarray(values, np.int64)).to(device, non_blocking=True)
