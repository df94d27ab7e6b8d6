"""A step on a GPU. The host runs ahead: it uploads a plan's changes, launches the step and continues with the next
plan.
Only the reader of a result waits for the device, one step later.

Sampled tokens are not sent back to the device: the step that samples them writes them where the next step reads them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import cast

import numpy as np
import torch
from torch import Tensor

from engine.api.errors import NOT_FINITE
from engine.core.plan import Masks, PendingMasks, StepPlan, StepResult, wait
from engine.distributed.world import SINGLE, World
from engine.kv.layout import Layout
from engine.layers.fused.model import FusedModel
from engine.sampling.device import DeviceSampler, Drawn, SamplingStep
from engine.sampling.rows import Rows
from engine.sampling.shards import MAX_K, best_of_shards, candidates_of_shards, largest_top_k
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
from kernels.sampling.sample import sample
from kernels.step_inputs import NEXT_TOKENS


@dataclass(frozen=True)
class Outputs:
    """Outputs of a step on the device."""

    hidden: Tensor  # [tokens, hidden]
    logits: Tensor | None  # [rows, vocab] fp32, this rank's columns of it; None if a row has several tokens
    lengths: Tensor  # [rows] int32
    bad: Tensor  # [rows] int32, 1 if a hidden state of the row is not finite
    drawn: Tensor | None = None
    """[2, rows] int32 of captured decode steps: the token of each row and the bits of its score, for rows without logit
    processors. The tokens are in the request table already."""
    kept: Tensor | None = None  # [tokens, layers · hidden], inputs of the layers that a head for drafts reads
    routes: Tensor | None = None  # [tokens, experts of all layers] int32, if they are kept

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in _tensors(self))

    @property
    def draft_inputs(self) -> Tensor:
        """Hidden states that a head for drafts reads."""
        return self.hidden if self.kept is None else self.kept

    def copied_to(self, shared: "Outputs") -> "Outputs":
        """Copy the outputs to the first rows of `shared` and return these rows."""
        tokens, rows = len(self.hidden), len(self.lengths)
        place = Outputs(
            shared.hidden[:tokens],
            None if shared.logits is None else shared.logits[:rows],
            shared.lengths[:rows],
            shared.bad[:rows],
            None if shared.drawn is None else shared.drawn[:, :rows],
            None if shared.kept is None else shared.kept[:tokens],
            None if shared.routes is None else shared.routes[:tokens],
        )
        for own, to in zip(_tensors(self), _tensors(place), strict=True):
            to.copy_(own)
        return place


def _tensors(outputs: Outputs) -> list[Tensor]:
    every = (getattr(outputs, one.name) for one in fields(outputs))
    return [one for one in every if one is not None]


def shared_outputs(largest: Outputs) -> Outputs:
    """Return empty buffers for the outputs of up to as many tokens and rows as `largest` has."""
    made = {one.name: getattr(largest, one.name) for one in fields(largest)}
    return Outputs(**{name: None if one is None else torch.empty_like(one) for name, one in made.items()})


@dataclass(frozen=True)
class SampledStep:
    """Sampled tokens of a step. `logits`: a copy for fingerprints, if requested."""

    step: SamplingStep
    drawn: Drawn
    logits: tuple[Tensor, ...]


class CapturedSteps:
    """Captured steps of one kind. `run(size)` launches one; its outputs are copied to buffers that all sizes share."""

    def __init__(self, sizes: Sequence[int], run: Callable[[int], Outputs], recorder: Recorder | None) -> None:
        self._launches, self._shared = run, cast(Outputs | None, None)
        self._graphs: Graphs[Outputs] = Graphs(sizes, self._run, recorder)
        self.size_for, self.replay = self._graphs.size_for, self._graphs.replay

    @property
    def sizes(self) -> tuple[int, ...]:
        return self._graphs.sizes

    def capture(self, budget: int, world: World, progress: Callable[[float], None]) -> int:
        """Capture steps in at most `budget` bytes, including the buffers of their outputs. Return the bytes used.

        Ranks keep the sizes that all of them captured, so that all pad a step to the same size."""
        if not self._graphs.captures:
            return 0
        self._shared = shared_outputs(self._launches(self.sizes[-1]))
        taken = self._shared.nbytes + self._graphs.capture(budget - self._shared.nbytes, progress)
        if world.size > 1:
            own = torch.tensor(self._graphs.has, dtype=torch.int32, device=self._shared.hidden.device)
            self._graphs.keep(world.all_gather(own).bool().all(0).tolist())
        return taken

    def _run(self, size: int) -> Outputs:
        outputs = self._launches(size)
        return outputs if self._shared is None else outputs.copied_to(self._shared)


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
        mixed_graph_sizes: Sequence[int] = (),
        mixed_recorder: Recorder | None = None,
        draft: Drafter | None = None,
    ) -> None:
        """graph_sizes: rows of the decode steps that `capture` captures with `recorder`, if the device has one. states:
        of a recurrent model. media: of a model that reads more than text. mixed_graph_sizes: tokens of the steps with
        rows of several tokens that are captured with `mixed_recorder`. draft: model that drafts tokens after each step;
        the host then waits for the step."""
        self._model, self._pages = model, pages
        self._host, self._table = table, device_table
        self._upload = StepUpload(device_table, device_table.tokens.shape[0])
        self._states, self._media, self._draft = states, media, draft
        own = () if states is None else states.layers
        self._steps = StagedSteps(device_table, self._upload, layout, pages, own, model.adapters.num_adapters)
        self._sampler = DeviceSampler(model.vocabulary.part.vocab, pages.device)
        self._results = Results(pages.device)
        self._decode_graphs = CapturedSteps(graph_sizes, self._decode, recorder)
        # Positions on several axes and encoder inputs come from the host, step by step.
        plain = device_table.sources is None and device_table.rope_deltas is None
        self._mixed_graphs = CapturedSteps(mixed_graph_sizes if plain else (), self._mixed, mixed_recorder)

    @torch.inference_mode()
    def capture(
        self, budget: int, world: World = SINGLE, progress: Callable[[float], None] = lambda fraction: None
    ) -> int:
        """Capture decode steps, then mixed ones, in at most `budget` bytes. Return the bytes used."""
        decode, mixed = self._decode_graphs, self._mixed_graphs
        share = len(decode.sizes) / max(1, len(decode.sizes) + len(mixed.sizes))
        taken = decode.capture(budget, world, lambda fraction: progress(share * fraction))
        return taken + mixed.capture(budget - taken, world, lambda fraction: progress(share + (1 - share) * fraction))

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
        sampled = self._sample(plan, rows, out, masks)
        # Copied, because the next captured step overwrites these outputs, possibly before they are read.
        arriving = self._results.fetch((out.bad[:count].clone(), sampled.drawn.found, *sampled.logits))
        routed, arriving_routes = self._host.routed_rows(rows.slots), None
        if routed and out.routes is not None:
            arriving_routes = self._results.fetch((out.routes[: int(rows.count.sum())].clone(),))
        scored = score_prompts(rows, self._host, out.hidden, self._model.logits)  # waits for the device, if requested

        def result() -> StepResult:
            bad, found, *sampled_logits = arriving.wait()
            failed = dict.fromkeys(np.flatnonzero(bad).tolist(), NOT_FINITE) | media.failed
            fingerprints = [logit_fingerprint(row) for logits in sampled_logits for row in logits]
            made = step_result(plan, rows, sampled.step.read(sampled.drawn, found), scored, failed, fingerprints)
            if arriving_routes is not None:
                made = replace(made, routes=routes_of_rows(rows, routed, *arriving_routes.wait()))
            return made if media.counts is None else replace(made, media=media.counts)

        if self._draft is None:
            return result
        found = result()
        # Passes of the draft model read the tokens of the host's table.
        ids = sampled.drawn.ids[: len(rows.positions)].cpu().numpy()
        self._host.write(rows.slots[rows.sampling], rows.positions, ids)
        found = replace(found, drafts=self._draft.run(plan, found, out.draft_inputs))
        return lambda: found

    def _sample(self, plan: StepPlan, rows: PlanRows, out: Outputs, masks: Masks | PendingMasks) -> SampledStep:
        """Sample tokens and write them to the request table, unless the captured step did both."""
        prepared = self._sampler.prepare(self._sampled_rows(rows, wait(masks)))
        vocabulary = self._model.vocabulary
        divided = vocabulary.world.size > 1
        if out.drawn is not None and rows.one_each and prepared.is_plain and not (divided and prepared.truncated):
            assert out.logits is not None, "captured steps have logits of every row"
            kept = (vocabulary.joined(out.logits[: len(rows.slots)]).clone(),) if plan.fingerprinted else ()
            # Copied always, unlike by `flatten`: the next captured step overwrites these outputs.
            found = torch.cat(out.drawn.unbind())
            return SampledStep(prepared, Drawn(found[: out.drawn.shape[1]], found), kept)
        slot, lengths, logits = self._upload.slot[: len(rows.slots)], out.lengths[: len(rows.slots)], out.logits
        if not rows.one_each or logits is None:
            device = self._pages.device
            at, positions, last = indexes(np.stack((rows.sampling, rows.positions, rows.last)), device).unbind()
            slot, lengths = slot[at], positions.int()
            logits = self._model.own_logits(out.hidden[last]) if logits is None else logits[at]
        logits = logits[: len(slot)]
        if divided and prepared.is_plain and not plan.fingerprinted:
            most = largest_top_k(self._host.columns, rows.slots[rows.sampling])
            if most is not None and most <= MAX_K:
                return self._sample_shards(prepared, logits, slot, lengths, truncated=most > 0)
        logits = vocabulary.joined(logits)
        kept = (logits.float().clone(),) if plan.fingerprinted else ()  # sampling modifies logits in place
        drawn = prepared(logits, slot, lengths, self._table.tokens, self._table.columns)
        NEXT_TOKENS(self._table.tokens, slot, lengths, drawn.ids)
        return SampledStep(prepared, drawn, kept)

    def _sample_shards(
        self, step: SamplingStep, logits: Tensor, slot: Tensor, lengths: Tensor, *, truncated: bool
    ) -> SampledStep:
        """Sample without gathering the logits of all ranks. truncated: some row has top_k."""
        vocabulary, columns = self._model.vocabulary, self._table.columns
        own = logits, vocabulary.first, vocabulary.world
        ids, scores = best_of_shards(*own, slot, lengths, columns)
        if truncated:
            whole = candidates_of_shards(logits, vocabulary.first, vocabulary.part.vocab, vocabulary.world)
            cut_ids, cut_scores, *_ = sample(whole, slot, lengths, columns, truncated=True)
            line = slot.long()
            cut = (columns.top_k[line] > 0) & (columns.temperature[line] > 0)
            ids, scores = torch.where(cut, cut_ids, ids), torch.where(cut, cut_scores, scores)
        NEXT_TOKENS(self._table.tokens, slot, lengths, ids)
        return SampledStep(step, Drawn(ids, torch.cat((ids, scores.view(torch.int32)))), ())

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
        tokens = int(rows.count.sum())
        if media.is_empty and (encoder_inputs is None or not len(encoder_inputs.slots)):
            graphs, wanted = (self._decode_graphs, count) if alone else (self._mixed_graphs, tokens)
            size = graphs.size_for(wanted)
            if size is not None:
                return graphs.replay(size)
        singles = bool((rows.count == 1).any())
        return self._run(count, tokens, singles=singles, spans=not alone, encoder_inputs=encoder_inputs, media=media)

    def _decode(self, size: int) -> Outputs:
        """Run a step of this many rows with at most one token each, and sample their tokens."""
        out = self._run(size, size, singles=True, spans=False)
        assert out.logits is not None, "every row has one token"
        slot, columns, vocabulary = self._upload.slot[:size], self._table.columns, self._model.vocabulary
        if vocabulary.world.size > 1:
            own = out.logits, vocabulary.first, vocabulary.world
            ids, scores = best_of_shards(*own, slot, out.lengths, columns)
        else:
            ids, scores, *_ = sample(out.logits, slot, out.lengths, columns, truncated=True)
        # Rows that sample no token read one from the table in the next step: it must not be overwritten.
        NEXT_TOKENS(self._table.tokens, slot, out.lengths * self._upload.samples[:size], ids)
        return replace(out, drawn=torch.stack((ids, scores.view(torch.int32))))

    def _mixed(self, size: int) -> Outputs:
        """Run a step of this many tokens, in at most as many rows."""
        return self._run(min(size, self._table.tokens.shape[0]), size, singles=True, spans=True)

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
        logits = None if spans else self._model.own_logits(hidden)
        bad = FINITE_ROWS(hidden, step.query_start)
        if encoder_inputs is not None and found is not None:
            at = indexes(encoder_inputs.rows, bad.device)
            bad[at] = torch.maximum(bad[at], found)
        return Outputs(hidden, logits, step.lengths, bad, kept=kept, routes=routes)
