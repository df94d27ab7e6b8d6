"""A step on a CPU, or with torch on any device: table, batch, model, sampling and result, one after another."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from engine.api.errors import NOT_FINITE
from engine.core.plan import Masks, PendingMasks, StepPlan, StepResult, wait
from engine.kv.layout import Layout
from engine.layers.batch import Batch
from engine.layers.foreign import ForeignModel
from engine.layers.model import TextModel
from engine.sampling.noise import Noise
from engine.sampling.pipeline import Prepared
from engine.sampling.rows import Rows
from engine.worker.alignment import Aligner
from engine.worker.batch import build_batch
from engine.worker.drafting import Drafter
from engine.worker.logit_fingerprint import logit_fingerprint
from engine.worker.media import NO_MEDIA, MediaStore, StepMedia
from engine.worker.rows import PlanRows, plan_rows, routes_of_rows, step_result
from engine.worker.scoring import score_prompts
from engine.worker.states import States
from engine.worker.table import RequestTable


class HostRunner:
    """Runs steps synchronously. The host knows all inputs, including tokens that were just sampled."""

    def __init__(
        self,
        text_model: TextModel | ForeignModel,
        layout: Layout,
        pages: Tensor,
        table: RequestTable,
        states: States,
        media: MediaStore | None = None,
        draft: Drafter | None = None,
    ) -> None:
        """media: of a model that reads more than text. draft: model that drafts tokens after each step."""
        self._text_model, self._layout, self._pages, self._table = text_model, layout, pages, table
        self._states, self._media, self._draft = states, media, draft
        model = text_model.model
        self._aligner = None
        if isinstance(text_model, TextModel) and model.encoder is not None and model.encoder.alignment is not None:
            native = text_model.target.team is not None
            self._aligner = Aligner(text_model.program, model.encoder, layout, text_model.world, native=native)
        self._noise = Noise(text_model.model.embed.vocab, pages.device, text_model.target.team)

    def start(self, plan: StepPlan, masks: Masks | PendingMasks) -> Callable[[], StepResult]:
        result = self._run(plan, masks)
        return lambda: result

    def _run(self, plan: StepPlan, masks: Masks | PendingMasks) -> StepResult:
        self._table.apply(plan)
        if self._media is not None:
            self._media.apply(plan)
        if self._aligner is not None:
            self._aligner.apply(plan)
        rows = plan_rows(plan)
        if not len(rows.slots):
            return StepResult(plan.step, ())
        media, batch = NO_MEDIA, self._batch(rows)
        if self._media is not None:
            media = self._media.inputs(rows)
            batch = with_media(batch, media)
        self._states.restore(plan)
        hidden = self._text_model.forward(batch, self._pages, self._states.layers)
        self._states.save(plan)
        failed = rows_not_finite(hidden, batch) | media.failed
        # The batch has only the decoder's tokens of a row, so tokens are counted back from its last one.
        back = torch.from_numpy(rows.ends[rows.sampling] - rows.positions).to(hidden.device)
        last = batch.last[torch.from_numpy(rows.sampling).to(hidden.device)] - back
        logits = self._text_model.logits(hidden[last])
        fingerprints = (
            [logit_fingerprint(row) for row in logits.cpu().numpy()] if plan.fingerprinted else []
        )  # before sampling, which modifies logits in place
        sampled = Prepared(self._sampled_rows(rows, wait(masks)), self._noise).finish(logits)
        self._table.write(rows.slots[rows.sampling], rows.positions, np.array(sampled.ids, np.int64))
        # At most as many positions as requests: logits for these are planned, and compiled kernels have buffers for
        # them.
        at_once = len(self._table.columns.seed)
        scored = score_prompts(rows, self._table, hidden, self._text_model.logits, self._noise.team, at_once)
        result = step_result(plan, rows, sampled, scored, failed, fingerprints)
        routed = self._table.routed_rows(rows.slots)
        if routed and (routes := self._text_model.routes_of_step(batch.tokens)) is not None:
            result = replace(result, routes=routes_of_rows(rows, routed, routes.cpu().numpy()))
        if self._aligner is not None and self._table.columns.alignment:
            queries = self._text_model.queries
            assert queries is not None, "the program keeps the queries of alignment heads"
            result = replace(result, alignments=self._aligner.run(rows, queries, self._table, self._pages))
        if self._draft is not None:
            kept = self._text_model.kept_states
            result = replace(result, drafts=self._draft.run(plan, result, hidden if kept is None else kept))
        return result if media.counts is None else replace(result, media=media.counts)

    def _batch(self, rows: PlanRows) -> Batch:
        table = self._table
        batch = build_batch(
            rows.slots,
            rows.first,
            rows.count,
            tokens=table.tokens,
            rope_lengths=table.rope_lengths,
            tables=table.tables,
            block_tokens=self._layout.block_tokens,
            adapters=table.adapters if self._text_model.adapters.layers else None,
            sources=table.sources if self._text_model.program.encoder else None,
            device=self._pages.device,
        )
        audio = self._text_model.model.audio
        if audio is None or batch.encoder_inputs is None:
            return batch
        silence = np.zeros((audio.mels, audio.frames), np.float32)  # steps of the warm-up have no audio
        entering = rows.slots[rows.first < table.sources[rows.slots]].tolist()
        windows = np.stack([table.spectrograms.pop(slot, silence) for slot in entering])
        inputs = replace(batch.encoder_inputs, spectrograms=torch.from_numpy(windows).to(self._pages.device))
        return replace(batch, encoder_inputs=inputs)

    def _sampled_rows(self, rows: PlanRows, masks: Masks) -> Rows:
        return Rows(
            rows.slots[rows.sampling],
            rows.positions,
            self._table.columns,
            self._table.tokens,
            masks,
            self._pages.device,
        )


def with_media(batch: Batch, media: StepMedia) -> Batch:
    axes, spans = (
        None if one is None else torch.from_numpy(one).to(batch.ids.device) for one in (media.axes, media.spans)
    )
    return replace(batch, media=media.rows, axes=axes, spans=spans)


def rows_not_finite(hidden: Tensor, batch: Batch) -> dict[int, str]:
    """Return rows with a NaN or infinity at some position, including chunks that sample no token."""
    if math.isfinite(hidden.sum()):  # one cheap operation in the usual case
        return {}
    finite = hidden.isfinite().all(1)
    bad = torch.searchsorted(batch.query_start, (~finite).nonzero()[:, 0], right=True) - 1
    return dict.fromkeys(bad.tolist(), NOT_FINITE)
