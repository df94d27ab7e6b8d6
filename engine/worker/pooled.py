"""A step of a pooling model: no tokens are sampled, and a complete prompt is pooled to a vector."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
from torch import Tensor

from engine.api.messages import Pooled, Pooling
from engine.core.plan import Masks, NewRow, PendingMasks, StepPlan, StepResult
from engine.kv.layout import Layout
from engine.layers.batch import Batch
from engine.layers.model import TextModel
from engine.layers.pooler import PoolingState
from engine.worker.batch import build_batch
from engine.worker.host import rows_not_finite, with_media
from engine.worker.media import NO_MEDIA, MediaStore
from engine.worker.rows import PlanRows, plan_rows
from engine.worker.states import States
from engine.worker.table import RequestTable

T = TypeVar("T")


@dataclass
class OpenPrompt:
    """A partially computed prompt."""

    pooling: Pooling
    tokens: int
    segments: tuple[int, ...]
    gathered: PoolingState = field(default_factory=PoolingState)


class PooledRunner:
    """Runs steps synchronously, like HostRunner. The state of partially computed prompts is kept by slot."""

    def __init__(
        self,
        text_model: TextModel,
        layout: Layout,
        pages: Tensor,
        table: RequestTable,
        states: States,
        media: MediaStore | None = None,
    ) -> None:
        """media: of a model that reads more than text."""
        assert text_model.pooler is not None, "only for pooling models"
        self._states, self._media = states, media
        self._text_model, self._pooler = text_model, text_model.pooler
        self._layout, self._pages, self._table = layout, pages, table
        self._has_segments = text_model.model.embed.segments is not None
        self._open: dict[int, OpenPrompt] = {}

    def start(self, plan: StepPlan, masks: Masks | PendingMasks) -> Callable[[], StepResult]:
        self._take(plan)
        rows = plan_rows(plan)
        if not len(rows.slots):
            return lambda: StepResult(plan.step, ())
        media, batch = NO_MEDIA, self._batch(rows)
        if self._media is not None:
            media = self._media.inputs(rows)
            batch = batch if self._media.is_vector else with_media(batch, media)
        self._states.restore(plan)
        hidden = self._text_model.forward(batch, self._pages, self._states.layers)
        self._states.save(plan)
        failed = rows_not_finite(hidden, batch) | media.failed
        of_items = {} if self._media is None else self._media.vectors(media)
        found: dict[int, Tensor] = {}
        starts = np.cumsum(rows.count) - rows.count
        for row, (slot, start) in enumerate(zip(rows.slots.tolist(), starts.tolist(), strict=True)):
            mine = self._open[slot]
            mine.gathered.of_item = of_items.get(start)
            self._pooler.gather(mine.gathered, hidden[start : start + int(rows.count[row])], mine.pooling)
            if rows.ends[row] == mine.tokens and row not in failed:
                found[row] = self._pooler.finish(mine.gathered, mine.pooling)
        return lambda: replace(_result(plan, found, failed), media=media.counts)

    def _take(self, plan: StepPlan) -> None:
        self._table.apply(plan)
        if self._media is not None:
            self._media.apply(plan)
        follow(plan, self._open, lambda new, pooling: OpenPrompt(pooling, new.prompt_tokens, new.segments))

    def _batch(self, rows: PlanRows) -> Batch:
        table = self._table
        return build_batch(
            rows.slots,
            rows.first,
            rows.count,
            tokens=table.tokens,
            rope_lengths=table.rope_lengths,
            tables=table.tables,
            block_tokens=self._layout.block_tokens,
            adapters=table.adapters if self._text_model.adapters.layers else None,
            segments=self._segments(rows) if self._has_segments else None,
            device=self._text_model.device,
        )

    def _segments(self, rows: PlanRows) -> np.ndarray:
        """Return the segment of each token of the step. A model with segments computes each prompt in one step."""
        pieces = []
        for slot, count in zip(rows.slots.tolist(), rows.count.tolist(), strict=True):
            segments = self._open[slot].segments
            pieces.append(np.repeat(np.arange(len(segments)), segments) if segments else np.zeros(count, np.int64))
        return np.concatenate(pieces)


def follow(plan: StepPlan, prompts: dict[int, T], opened: Callable[[NewRow, Pooling], T]) -> None:
    """Update the prompts that are being computed, by slot, for this plan."""
    for slot in plan.dropped:
        prompts.pop(slot, None)
    for new in plan.new:
        assert new.pooling is not None, "the scheduler admits only pooling requests for a pooling model"
        prompts[new.slot] = opened(new, new.pooling)


def _result(plan: StepPlan, found: dict[int, Tensor], failed: dict[int, str]) -> StepResult:
    pooled = {row: packed(values.float().numpy(force=True)) for row, values in found.items() if row not in failed}
    return StepResult(plan.step, (-1,) * len(plan.rows), failed=failed, pooled=pooled)


def packed(values: np.ndarray) -> Pooled:
    return Pooled(values.shape, values.astype("<f4", copy=False).tobytes())
