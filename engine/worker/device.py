"""A step on a GPU. The host runs ahead: it uploads a plan's changes, launches the step and continues with the next
plan.
Only the reader of a result waits for the device, one step later.

Sampled tokens are not sent back to the device: the step that samples them writes them where the next step reads them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from engine.api.errors import NOT_FINITE
from engine.core.plan import Masks, PendingMasks, StepPlan, StepResult, wait
from engine.distributed.world import SINGLE, World
from engine.kv.layout import Layout
from engine.layers.fused import FusedModel
from engine.sampling.device import DeviceSampler
from engine.sampling.rows import Rows
from engine.worker.device_step import StagedSteps, indexes
from engine.worker.device_table import DeviceTable, StepUpload
from engine.worker.drafting import Drafter
from engine.worker.graphs import Graphs, Recorder
from engine.worker.logit_fingerprint import logit_fingerprint
from engine.worker.media import NO_MEDIA, MediaStore, StepMedia, without_deltas
from engine.worker.results import Results
from engine.worker.rows import EncoderInputs, PlanRows, plan_rows, routes_of_rows, split_encoder_inputs, step_result
from engine.worker.scoring import score_prompts
from engine.worker.states import States
from engine.worker.table import RequestTable
from kernels.finite import FINITE_ROWS
from kernels.step_inputs import NEXT_TOKENS


@dataclass(frozen=True)
class Outputs:
    """Outputs of a step on the device."""

    hidden: Tensor  # [tokens, hidden]
    logits: Tensor | None  # [rows, vocab] fp32; None if a row has several tokens
    lengths: Tensor  # [rows] int32
    bad: Tensor  # [rows] int32, 1 if a hidden state of the row is not finite
    routes: Tensor | None = None  # [tokens, experts of all layers] int32, if they are kept
    kept: Tensor | None = None  # [tokens, layers · hidden], inputs of the layers that a head for drafts reads

    @property
    def nbytes(self) -> int:
        every = self.hidden, self.logits, self.lengths, self.bad, self.kept, self.routes
        return sum(one.nbytes for one in every if one is not None)

    @property
    def draft_inputs(self) -> Tensor:
        """Hidden states that a head for drafts reads."""
        return self.hidden if self.kept is None else self.kept

    def copied_to(self, shared: "Outputs") -> "Outputs":
        """Copy the outputs to the first rows of `shared` and return these rows."""
        rows = len(self.hidden)
        assert self.logits is not None and shared.logits is not None, "captured steps have logits of every row"
        kept = Outputs(shared.hidden[:rows], shared.logits[:rows], shared.lengths[:rows], shared.bad[:rows])
        assert kept.logits is not None
        kept.hidden.copy_(self.hidden)
        kept.logits.copy_(self.logits)
        kept.lengths.copy_(self.lengths)
        kept.bad.copy_(self.bad)
        copied = {}
        for name in ("kept", "routes"):
            own, other = getattr(self, name), getattr(shared, name)
            if own is not None and other is not None:
                copied[name] = other[:rows].copy_(own)
        return replace(kept, **copied)


def shared_outputs(largest: Outputs) -> Outputs:
    """Return empty buffers for the outputs of up to as many rows as `largest` has."""
    assert largest.logits is not None, "captured steps have logits of every row"
    kept, routes = (None if one is None else torch.empty_like(one) for one in (largest.kept, largest.routes))
    made = Outputs(*map(torch.empty_like, (largest.hidden, largest.logits, largest.lengths, largest.bad)))
    return replace(made, kept=kept, routes=routes)


class DeviceRunner:
    def __init__(
        self,
        model: FusedModel,
        layout: Layout,
        pages: Tensor,
        table: RequestTable,
        device_table: DeviceTable,
        graph_sizes: Sequence[int] = (),
        recorder: Recorder | None = None,
        states: States | None = None,
        media: MediaStore | None = None,
        draft: Drafter | None = None,
    ) -> None:
        """graph_sizes: rows of the decode steps that `capture` captures with `recorder`, if the device has one. states:
        of a recurrent model. media: of a model that reads more than text. draft: model that drafts tokens after each
        step; the host then waits for the step."""
        self._model, self._pages = model, pages
        self._host, self._table = table, device_table
        self._upload = StepUpload(device_table, device_table.tokens.shape[0])
        self._states, self._media, self._draft = states, media, draft
        own = () if states is None else states.layers
        self._steps = StagedSteps(device_table, self._upload, layout, pages, own, model.adapters.num_adapters)
        self._sampler = DeviceSampler(model.vocabulary.part.vocab, pages.device)
        self._results = Results(pages.device)
        self._graphs: Graphs[Outputs] = Graphs(graph_sizes, self._decode, recorder)
        self._shared: Outputs | None = (
            None  # buffers of the largest graph, to which every captured step copies its outputs
        )

    @torch.inference_mode()
    def capture(
        self, budget: int, world: World = SINGLE, progress: Callable[[float], None] = lambda fraction: None
    ) -> int:
        """Capture decode steps in at most `budget` bytes, including the buffers of their outputs. Return the bytes
        used.

        Ranks keep the sizes that all of them captured, so that all pad a step to the same size."""
        if not self._graphs.captures:
            return 0
        self._shared = shared_outputs(self._decode(self._graphs.sizes[-1]))
        taken = self._shared.nbytes + self._graphs.capture(budget - self._shared.nbytes, progress)
        own = torch.tensor(self._graphs.has, dtype=torch.int32, device=self._pages.device)
        self._graphs.keep(world.all_gather(own).bool().all(0).tolist())
        return taken

    def start(self, plan: StepPlan, masks: Masks | PendingMasks) -> Callable[[], StepResult]:
        self._host.apply(plan)
        rows, encoder_inputs = plan_rows(plan), None
        if self._table.sources is not None:
            rows, encoder_inputs = split_encoder_inputs(rows, self._host.sources)
        deltas: Mapping[int, int] = {}
        if self._media is not None:
            self._media.apply(plan)
            deltas = self._media.deltas
        self._upload.send(plan, rows, self._host.columns, deltas)
        if not len(rows.slots):
            return lambda: StepResult(plan.step, ())
        self._upload.check(plan)
        count = len(rows.slots)
        if self._states is not None:
            self._states.restore(plan)
        media = NO_MEDIA if self._media is None else self._media.inputs(rows)
        out = self._forward(rows, encoder_inputs, without_deltas(media))
        if self._states is not None:
            self._states.save(plan)
        slot, lengths, logits = self._upload.slot[:count], out.lengths[:count], out.logits
        if not rows.one_each or logits is None:
            at = indexes(rows.sampling, self._pages.device)
            slot = slot[at]
            lengths = indexes(rows.positions, self._pages.device).int()
            last = indexes(rows.last, self._pages.device)
            logits = self._model.logits(out.hidden[last]) if logits is None else logits[at]
        logits = logits[: len(slot)]
        kept = (logits.float().clone(),) if plan.fingerprinted else ()  # sampling modifies logits in place
        prepared = self._sampler.prepare(self._sampled_rows(rows, wait(masks)))
        drawn = prepared(logits, slot, lengths, self._table.tokens, self._table.columns)
        NEXT_TOKENS(self._table.tokens, slot, lengths, drawn.ids)
        # Copied, because the next captured step overwrites these outputs, possibly before they are read.
        arriving = self._results.fetch((out.bad[:count].clone(), drawn.found, *kept))
        routed, arriving_routes = self._host.routed_rows(rows.slots), None
        if routed and out.routes is not None:
            arriving_routes = self._results.fetch((out.routes[: int(rows.count.sum())].clone(),))
        scored = score_prompts(rows, self._host, out.hidden, self._model.logits)  # waits for the device, if requested

        def result() -> StepResult:
            bad, found, *sampled_logits = arriving.wait()
            failed = dict.fromkeys(np.flatnonzero(bad).tolist(), NOT_FINITE) | media.failed
            fingerprints = [logit_fingerprint(row) for logits in sampled_logits for row in logits]
            made = step_result(plan, rows, prepared.read(drawn, found), scored, failed, fingerprints)
            if arriving_routes is not None:
                made = replace(made, routes=routes_of_rows(rows, routed, *arriving_routes.wait()))
            return made if media.counts is None else replace(made, media=media.counts)

        if self._draft is None:
            return result
        found = result()
        # Passes of the draft model read the tokens of the host's table.
        self._host.write(rows.slots[rows.sampling], rows.positions, drawn.ids.cpu().numpy())
        found = replace(found, drafts=self._draft.run(plan, found, out.draft_inputs))
        return lambda: found

    def _sampled_rows(self, rows: PlanRows, masks: Masks) -> Rows:
        return Rows(
            rows.slots[rows.sampling],
            rows.positions,
            self._host.columns,
            self._host.tokens,
            masks,
            self._pages.device,
        )

    def _forward(self, rows: PlanRows, encoder_inputs: EncoderInputs | None, media: StepMedia) -> Outputs:
        count = len(rows.slots)
        alone = bool((rows.count == 1).all())
        steady = alone and (encoder_inputs is None or not len(encoder_inputs.slots))
        steady = steady and media.is_empty
        size = self._graphs.size_for(count) if steady else None
        if size is not None:
            return self._graphs.replay(size)
        singles, tokens = bool((rows.count == 1).any()), int(rows.count.sum())
        return self._run(count, tokens, singles=singles, spans=not alone, encoder_inputs=encoder_inputs, media=media)

    def _decode(self, size: int) -> Outputs:
        """Run a step of this many rows with at most one token each. Return its outputs, in shared buffers if any."""
        outputs = self._run(size, size, singles=True, spans=False)
        return outputs if self._shared is None else outputs.copied_to(self._shared)

    def _run(
        self,
        rows: int,
        tokens: int,
        *,
        singles: bool,
        spans: bool,
        encoder_inputs: EncoderInputs | None = None,
        media: StepMedia = NO_MEDIA,
    ) -> Outputs:
        step = self._steps.step(rows, tokens, singles=singles, spans=spans, encoder_inputs=encoder_inputs, media=media)
        found = None
        if step.encoder_inputs is not None:
            # Checked here, because non-finite keys and values are written to pages as zeros.
            found = FINITE_ROWS(self._model.encode_inputs(step.encoder_inputs), step.encoder_inputs.query_start)
        hidden, kept, routes = self._model.forward_all(step)
        logits = None if spans else self._model.logits(hidden)
        bad = FINITE_ROWS(hidden, step.query_start)
        if encoder_inputs is not None and found is not None:
            at = indexes(encoder_inputs.rows, bad.device)
            bad[at] = torch.maximum(bad[at], found)
        return Outputs(hidden, logits, step.lengths, bad, kept=kept, routes=routes)
