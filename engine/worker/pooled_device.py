"""A step of a pooling model on a GPU. As in device.py, the host runs ahead and only the reader of a result waits.

Rows with the same parameters are finished together: vectors of prompts that this step completes, and vectors of single
tokens, which are kept on the host until their prompt is complete.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.api.errors import NOT_FINITE
from engine.api.messages import Pooled, Pooling
from engine.core.plan import Masks, PendingMasks, StepPlan, StepResult
from engine.kv.layout import Layout
from engine.layers.fused.model import FusedModel
from engine.layers.fused.step import DeviceStep
from engine.layers.fused_pooler import FusedPooler
from engine.layers.pooler import OF_EACH_TOKEN
from engine.worker.device_step import StagedSteps, indexes
from engine.worker.device_table import DeviceTable, StepUpload
from engine.worker.media import NO_MEDIA, MediaStore
from engine.worker.pooled import follow, packed
from engine.worker.results import PendingTransfer, Results
from engine.worker.rows import PlanRows, plan_rows
from engine.worker.states import States
from kernels.finite import FINITE_ROWS


@dataclass(frozen=True)
class PendingTokens:
    """Rows of one of the tensors that are being copied to the host."""

    arriving: PendingTransfer
    number: int  # index of the tensor
    rows: slice

    def read(self) -> np.ndarray:
        return self.arriving.wait()[self.number][self.rows]


@dataclass
class OpenPrompt:
    """A partially computed prompt."""

    pooling: Pooling
    tokens: int
    pieces: list[PendingTokens] = field(default_factory=list)  # vectors of its tokens so far, for per-token tasks
    of_item: Tensor | None = None  # vector of an image, which replaces pooling and stages

    @property
    def key(self) -> "PoolingKey":
        asked = self.pooling
        return PoolingKey(
            asked.task in OF_EACH_TOKEN, asked.dimensions, asked.activate is not False, self.of_item is not None
        )


class PoolingKey(NamedTuple):
    """Parameters that rows must share to be finished together."""

    of_each_token: bool
    dimensions: int | None
    activated: bool
    of_item: bool = False


@dataclass(frozen=True)
class RowGroup:
    """Rows of a step with the same parameters: those that complete their prompt, or all rows for per-token tasks."""

    key: PoolingKey
    rows: np.ndarray
    counts: np.ndarray  # number of vectors of each row: 1, or its tokens of this step


class PooledDeviceRunner:
    def __init__(
        self,
        model: FusedModel,
        pooler: FusedPooler,
        layout: Layout,
        pages: Tensor,
        device_table: DeviceTable,
        states: States | None = None,
        media: MediaStore | None = None,
    ) -> None:
        """states: of a recurrent model. media: of a model that reads more than text."""
        self._media = media
        self._model, self._pooler, self._device = model, pooler, pages.device
        self._upload = StepUpload(device_table, device_table.tokens.shape[0])
        self._states = states
        own = () if states is None else states.layers
        self._steps = StagedSteps(device_table, self._upload, layout, pages, own, model.adapters.num_adapters)
        self._results = Results(pages.device)
        self._open: dict[int, OpenPrompt] = {}

    def start(self, plan: StepPlan, masks: Masks | PendingMasks) -> Callable[[], StepResult]:
        rows = plan_rows(plan)
        if self._media is not None:
            self._media.apply(plan)
        self._upload.send(plan, rows, None)
        follow(plan, self._open, lambda new, pooling: OpenPrompt(pooling, new.prompt_tokens))
        if not len(rows.slots):
            return lambda: StepResult(plan.step, ())
        self._upload.check(plan)
        alone = rows.count == 1
        media = NO_MEDIA if self._media is None else self._media.inputs(rows)
        of_items = {} if self._media is None else self._media.vectors(media)
        step = self._steps.step(
            len(rows.slots),
            int(rows.count.sum()),
            singles=bool(alone.any()),
            spans=not alone.all(),
            media=NO_MEDIA if self._media is not None and self._media.is_vector else media,
        )
        if self._states is not None:
            self._states.restore(plan)
        hidden = self._model.forward(step)
        if self._states is not None:
            self._states.save(plan)
        prompts = [self._open[slot] for slot in rows.slots.tolist()]
        starts = (np.cumsum(rows.count) - rows.count).tolist()
        for prompt, start in zip(prompts, starts, strict=True):
            prompt.of_item = of_items.get(start)
        groups = _group_rows(prompts, rows)
        finished = self._finished(groups, prompts, rows, step, hidden)
        arriving = self._results.fetch((FINITE_ROWS(hidden, step.query_start), *finished))
        found = _found(groups, prompts, rows, arriving)

        def result() -> StepResult:
            failed = dict.fromkeys(np.flatnonzero(arriving.wait()[0]).tolist(), NOT_FINITE) | media.failed
            pooled = {row: read() for row, read in found.items() if row not in failed}
            return StepResult(plan.step, (-1,) * len(plan.rows), failed=failed, pooled=pooled, media=media.counts)

        return result

    def _finished(
        self,
        groups: Sequence[RowGroup],
        prompts: Sequence[OpenPrompt],
        rows: PlanRows,
        step: DeviceStep,
        hidden: Tensor,
    ) -> list[Tensor]:
        """Return [vectors or tokens, width] fp32 for each group of rows."""
        vectors = None
        if not all(prompt.key.of_each_token for prompt in prompts):
            first = self._upload.first[: len(prompts)]
            vectors = self._pooler.gather(hidden, step.query_start, step.slot, first)
        made = []
        for some in groups:
            if some.key.of_item:
                x = torch.stack([tensor for row in some.rows if (tensor := prompts[row].of_item) is not None]).float()
                made.append(self._pooler.end(x, prompts[some.rows[0]].pooling))
                continue
            if some.key.of_each_token:
                starts = (np.cumsum(rows.count) - rows.count)[some.rows]
                tokens = np.repeat(starts - (np.cumsum(some.counts) - some.counts), some.counts)
                x = self._chosen(hidden, tokens + np.arange(len(tokens))).float()
            else:
                assert vectors is not None, "some row needs a vector"
                x = self._chosen(vectors, some.rows)
            made.append(self._pooler.finish(x, prompts[some.rows[0]].pooling))
        return made

    def _chosen(self, x: Tensor, rows: np.ndarray) -> Tensor:
        """Return some rows in ascending order; usually these are all rows."""
        return x if len(rows) == len(x) else x[indexes(rows, self._device)]


def _group_rows(prompts: Sequence[OpenPrompt], rows: PlanRows) -> list[RowGroup]:
    found: dict[PoolingKey, list[int]] = {}
    for row, (prompt, end) in enumerate(zip(prompts, rows.ends.tolist(), strict=True)):
        if prompt.key.of_each_token or end == prompt.tokens:
            found.setdefault(prompt.key, []).append(row)
    return [
        RowGroup(key, np.array(which), rows.count[which] if key.of_each_token else np.ones(len(which), np.int64))
        for key, which in found.items()
    ]


def _found(
    groups: Sequence[RowGroup], prompts: Sequence[OpenPrompt], rows: PlanRows, arriving: PendingTransfer
) -> dict[int, Callable[[], Pooled]]:
    """Return functions that read the result of each row that completes its prompt. Pieces of other rows are kept."""
    found: dict[int, Callable[[], Pooled]] = {}
    for number, some in enumerate(groups, 1):
        ends = np.cumsum(some.counts)
        for row, start, end in zip(some.rows.tolist(), (ends - some.counts).tolist(), ends.tolist(), strict=True):
            prompt, piece = prompts[row], PendingTokens(arriving, number, slice(start, end))
            if not some.key.of_each_token:
                found[row] = lambda piece=piece: packed(piece.read()[0])
                continue
            prompt.pieces.append(piece)
            if rows.ends[row] == prompt.tokens:
                found[row] = lambda pieces=tuple(prompt.pieces): packed(np.concatenate([one.read() for one in pieces]))
    return found
