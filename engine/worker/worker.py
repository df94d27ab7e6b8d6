"""Runs plans: table, batch, model, sampling, result. One thread, so steps run in the order in which they came."""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.api.messages import Logprob
from engine.core.plan import StepPlan, StepResult
from engine.kv.layout import Layout
from engine.layers.model import TextModel
from engine.models.parts import Model
from engine.sampling.logprobs import logprobs
from engine.sampling.noise import Noise
from engine.sampling.pipeline import NOT_FINITE, Prepared, Sampled
from engine.sampling.rows import Rows
from engine.worker.batch import Batch, build_batch
from engine.worker.table import RequestTable

SCORED_AT_ONCE = 64  # prompt positions whose logits stand in memory together: 64 x 152k float32 are 39 MB


@dataclass(frozen=True)
class PlanRows:
    """A plan's rows as columns, one entry a row."""

    slots: np.ndarray
    first: np.ndarray
    count: np.ndarray
    sampling: np.ndarray  # indexes of the rows that draw a token

    @property
    def ends(self) -> np.ndarray:
        """Position after each row's last one: where its token goes."""
        return self.first + self.count


def plan_rows(plan: StepPlan) -> PlanRows:
    fields = np.array([(row.slot, row.first, row.count, row.sample) for row in plan.rows], np.int64).reshape(-1, 4)
    slots, first, count, sample = np.ascontiguousarray(fields.T)
    return PlanRows(slots, first, count, np.flatnonzero(sample))


class Worker:
    """`model` and `layout` are declarations; the rest of the public attributes are sizes as really allocated."""

    def __init__(
        self,
        *,
        model: Model,
        text_model: TextModel,
        layout: Layout,
        pages: Tensor,
        table: RequestTable,
        threads: int,
        seconds: dict[str, float],
    ) -> None:
        self.model, self.layout, self.seconds = model, layout, seconds
        self.blocks = len(pages)
        self.weight_bytes = text_model.weight_bytes
        self.kv_bytes = pages.nbytes
        self._text_model, self._pages, self._table = text_model, pages, table
        self._noise = Noise(model.embed.vocab, pages.device, text_model.target.team)
        # torch keeps the number of threads per calling thread
        self._thread = ThreadPoolExecutor(1, "worker", initializer=torch.set_num_threads, initargs=(threads,))

    def start(self, plan: StepPlan, masks: dict[int, np.ndarray]) -> Future[StepResult]:
        """Queues a step. `masks`: allowed tokens by index of the plan's row (see `engine.structured`)."""
        return self._thread.submit(self._run, plan, masks)

    def close(self) -> None:
        self._thread.shutdown()

    def _run(self, plan: StepPlan, masks: dict[int, np.ndarray]) -> StepResult:
        with torch.inference_mode():
            self._table.apply(plan)
            rows = plan_rows(plan)
            if not len(rows.slots):
                return StepResult(plan.step, ())
            batch = self._batch(rows)
            prepared = Prepared(self._sampled_rows(rows, masks), self._noise)
            hidden = self._text_model.forward(batch, self._pages)
            failed = _rows_not_finite(hidden, batch)
            at = torch.from_numpy(rows.sampling).to(hidden.device)
            sampled = prepared.finish(self._text_model.logits(hidden[batch.last[at]]))
            self._table.write(rows.slots[rows.sampling], rows.ends[rows.sampling], np.array(sampled.ids, np.int64))
            scored = {row: self._score(row, rows, batch, hidden) for row in self._rows_to_score(rows)}
            return _result(plan, rows, sampled, scored, failed)

    def _batch(self, rows: PlanRows) -> Batch:
        table = self._table
        return build_batch(
            rows.slots,
            rows.first,
            rows.count,
            tokens=table.tokens,
            rope_lengths=table.rope_lengths,
            tables=table.tables,
            block_tokens=self.layout.block_tokens,
            device=self._pages.device,
        )

    def _sampled_rows(self, rows: PlanRows, masks: dict[int, np.ndarray]) -> Rows:
        return Rows(
            rows.slots[rows.sampling],
            rows.ends[rows.sampling],
            self._table.columns,
            self._table.tokens,
            {number: masks[row] for number, row in enumerate(rows.sampling.tolist()) if row in masks} if masks else {},
            self._pages.device,
        )

    def _rows_to_score(self, rows: PlanRows) -> list[int]:
        asked = self._table.columns.prompt_logprobs
        return [row for row, slot in enumerate(rows.slots.tolist()) if slot in asked] if asked else []

    def _score(self, row: int, rows: PlanRows, batch: Batch, hidden: Tensor) -> tuple[Logprob, ...]:
        """Prompt tokens at positions first + 1 … first + count: each is scored by the position before it, so the last
        one may belong to the next chunk."""
        slot, first = int(rows.slots[row]), int(rows.first[row])
        columns = self._table.columns
        end = min(int(rows.ends[row]), int(columns.prompt_tokens[slot]) - 1)
        ids = torch.from_numpy(self._table.tokens[slot, first + 1 : end + 1].astype(np.int64)).to(hidden.device)
        start = int(batch.query_start[row])
        found: list[Logprob] = []
        for at in range(0, len(ids), SCORED_AT_ONCE):
            part = ids[at : at + SCORED_AT_ONCE]
            logits = self._text_model.logits(hidden[start + at : start + at + len(part)])
            found += logprobs(logits, part, [columns.prompt_logprobs[slot]] * len(part))
        return tuple(found)


def _rows_not_finite(hidden: Tensor, batch: Batch) -> dict[int, str]:
    """Rows of which some position came out as NaN or infinity, a chunk that draws no token among them."""
    finite = hidden.isfinite().all(1)
    if finite.all():
        return {}
    bad = torch.searchsorted(batch.query_start, (~finite).nonzero()[:, 0], right=True) - 1
    return dict.fromkeys(bad.tolist(), NOT_FINITE)


def _result(
    plan: StepPlan,
    rows: PlanRows,
    sampled: Sampled,
    scored: dict[int, tuple[Logprob, ...]],
    failed: dict[int, str],
) -> StepResult:
    where = rows.sampling.tolist()
    ids = [-1] * len(plan.rows)
    for row, token in zip(where, sampled.ids, strict=True):
        ids[row] = token
    return StepResult(
        plan.step,
        tuple(ids),
        {where[number]: found for number, found in sampled.logprobs.items()},
        scored,
        {where[number]: reason for number, reason in sampled.failed.items()} | failed,
    )
