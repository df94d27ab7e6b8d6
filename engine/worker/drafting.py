"""Drafts by a model: after a step, it computes the tokens of the step and then drafts the next ones.

The draft model has pages of its own under the target's block ids, so that blocks of cached prefixes have the keys and
values of both models. Each step of the target is followed by one pass over the same tokens, which also samples the
first draft of each row, and by one pass for each further draft. Drafts are sampled like the target's tokens, with the
noise of their seed and position (engine/sampling/noise.py): equal logits give equal tokens.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.core.plan import Row, StepPlan, StepResult
from engine.layers.batch import Batch, MediaRows
from engine.layers.fused.model import FusedModel
from engine.layers.fused.step import DeviceStep
from engine.layers.model import TextModel
from engine.sampling.noise import Noise
from engine.sampling.pipeline import Prepared
from engine.sampling.rows import Rows
from engine.worker.batch import build_batch
from engine.worker.media import MediaStore
from engine.worker.table import RequestTable


class Drafter(Protocol):
    """Computes drafts in a HostRunner."""

    def run(self, plan: StepPlan, result: StepResult, hidden: Tensor) -> dict[int, tuple[int, ...]]:
        """Compute the tokens of a step whose result is in the table. Return the drafts of each row that has some.
        hidden: [tokens, hidden], of the step, or the states of the layers that a head reads, side by side."""


@dataclass(frozen=True)
class DraftRow:
    """Positions [first, end) that a pass computes of a row, and the tokens that are drafted after them."""

    index: int  # of the row in the plan
    slot: int
    first: int
    end: int
    drafts: int


class FusedDraft:
    """A draft model with Triton kernels, which has the interface of `TextModel` that passes use."""

    kept_states: Tensor | None = None

    def __init__(self, text_model: TextModel) -> None:
        self.model, self.layout, self.draft_head = text_model.model, text_model.layout, text_model.draft_head
        self._fused = FusedModel(text_model)

    @torch.inference_mode()
    def forward(self, batch: Batch, pages: Tensor) -> Tensor:
        """Implement `TextModel.forward`. The block tables of the step have a row for each row of the batch."""
        rows = torch.arange(batch.rows, dtype=torch.int32, device=pages.device)
        step = DeviceStep(
            ids=batch.ids.int(),
            positions=batch.positions.int(),
            rope_lengths=batch.rope_lengths.int(),
            slot_mapping=torch.stack(batch.slot_mapping).int(),
            slot=rows,
            query_start=batch.query_start.int(),
            lengths=batch.lengths.int(),
            tables=torch.stack(batch.tables).int(),
            pages=pages,
            singles=1 in batch.count,
            spans=max(batch.count) > 1,
            draft_inputs=batch.states,
            media=batch.media,
        )
        hidden, self.kept_states, _ = self._fused.forward_all(step)
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Implement `TextModel.logits`."""
        return self._fused.logits(hidden)


class Passes:
    """Passes of a draft model over rows.

    pages: KV pool of the draft model, with a block for each of the target's blocks and each group of its layers.
    group: number of the target's block table that the draft model uses.
    vocab: number of the target's logits. noise: of the target's sampling.
    ahead: positions between a token that the model reads and the position that it computes."""

    def __init__(
        self,
        model: TextModel | FusedDraft,
        pages: Tensor,
        table: RequestTable,
        noise: Noise,
        *,
        group: int,
        vocab: int,
        ahead: int,
    ) -> None:
        self._model, self._pages, self._table, self._noise = model, pages, table, noise
        self._blocks, groups = table.tables[group], len(model.layout.groups)
        # A block has a page for each group of layers, at consecutive numbers.
        self._tables = tuple(np.zeros_like(self._blocks) for _ in range(groups)) if groups > 1 else (self._blocks,)
        self._vocab, self._ahead = vocab, ahead

    @property
    def tokens(self) -> np.ndarray:
        """[slots, positions], of the request table."""
        return self._table.tokens

    @property
    def nbytes(self) -> int:
        """Size of the pages."""
        return self._pages.nbytes

    def begin(self, slots: Sequence[int]) -> None:
        """Read the block tables of these slots before the first pass of a step."""
        if len(self._tables) > 1:
            for group, own in enumerate(self._tables):
                own[slots] = self._blocks[slots] * len(self._tables) + group

    def forward(self, rows: Sequence[DraftRow], states: Tensor | None = None, media: MediaRows | None = None) -> Tensor:
        """Return the hidden states of all tokens of the rows. states: [tokens, hidden], for a prediction head. media:
        embeddings of images, which replace the embeddings of their tokens."""
        table, first = self._table, np.array([row.first for row in rows])
        batch = build_batch(
            np.array([row.slot for row in rows]),
            first,
            np.array([row.end for row in rows]) - first,
            tokens=table.tokens[:, self._ahead :],
            rope_lengths=table.rope_lengths,
            tables=self._tables,
            block_tokens=self._model.layout.block_tokens,
            device=self._pages.device,
        )
        last = self._model.model.embed.vocab - 1
        if last < self._vocab - 1:  # ids beyond the draft model's vocabulary are padding of the target's
            batch = replace(batch, ids=batch.ids.clamp(max=last))
        return self._model.forward(replace(batch, states=states, media=media), self._pages)

    def head_states(self, states: Tensor) -> Tensor:
        """Return the inputs of a head for these hidden states of the target, [tokens, hidden]."""
        head = self._model.draft_head
        return states if head is None or not len(states) else head.project(states)

    @property
    def own_states(self) -> Tensor | None:
        """Hidden states of the last pass that a head reads for further drafts, if they differ from its output."""
        return self._model.kept_states

    def draft(self, hidden: Tensor, rows: Sequence[DraftRow]) -> list[DraftRow | None]:
        """Sample a token after each row and write it to the table. Return the rows that compute these tokens; None
        where none could be sampled. hidden: [rows, hidden], after the last position of each."""
        logits, head = self._model.logits(hidden), self._model.draft_head
        if head is not None and head.ids is not None:
            every = logits.new_full((len(logits), self._vocab), -torch.inf)
            logits = every.index_copy_(1, head.ids, logits)
        elif logits.shape[1] != self._vocab:
            missing = self._vocab - logits.shape[1]
            logits = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf).contiguous()
        columns = copy.copy(self._table.columns)
        columns.logprobs = {}
        slots = np.array([row.slot for row in rows])
        positions = np.array([row.end for row in rows]) + self._ahead
        sampled_rows = Rows(slots, positions, columns, self._table.tokens, device=self._pages.device)
        sampled = Prepared(sampled_rows, self._noise).finish(logits)
        made: list[DraftRow | None] = []
        for number, (row, token) in enumerate(zip(rows, sampled.ids, strict=True)):
            if number in sampled.failed:
                made.append(None)
                continue
            self._table.tokens[row.slot, row.end + self._ahead] = token
            made.append(replace(row, first=row.end, end=row.end + 1, drafts=row.drafts - 1))
        return made

    def token(self, row: DraftRow) -> int:
        """Return the draft that a row of one position reads."""
        return int(self._table.tokens[row.slot, row.first + self._ahead])


class DraftModel:
    """A second model. It computes each position of the target, and the positions of drafts.

    Positions of drafts are tentative: their keys and values are kept if the draft is accepted."""

    def __init__(self, passes: Passes) -> None:
        self.passes = passes
        self._computed: dict[int, int] = {}  # by slot: positions before it are computed, with tokens that are known
        self._tentative: dict[int, list[int]] = {}  # by slot: drafts at the positions after it that are computed, too

    def run(self, plan: StepPlan, result: StepResult, hidden: Tensor) -> dict[int, tuple[int, ...]]:
        """Implement `Drafter.run`."""
        for new in plan.new:
            self._tentative.pop(new.slot, None)
            self._computed.pop(new.slot, None)
        self.passes.begin([row.slot for row in plan.rows])
        rows = list(self._rows(plan, result))
        drafts: dict[int, tuple[int, ...]] = {}
        while rows:
            own = self.passes.forward(rows)
            last = np.cumsum([row.end - row.first for row in rows]) - 1
            at = [number for number, row in enumerate(rows) if row.drafts]
            if not at:
                break
            made = self.passes.draft(own[torch.from_numpy(last[at]).to(own.device)], [rows[number] for number in at])
            rows = [row for row in made if row is not None]
            for row in rows:
                token = self.passes.token(row)
                drafts[row.index] = (*drafts.get(row.index, ()), token)
                if row.drafts:
                    self._tentative.setdefault(row.slot, []).append(token)
            rows = [row for row in rows if row.drafts]
        return drafts

    def _rows(self, plan: StepPlan, result: StepResult) -> Iterator[DraftRow]:
        for index, row in enumerate(plan.rows):
            if index in result.failed:
                continue
            # The token that the row sampled last is computed only if drafts follow it.
            end = known_end(row, index, result) + (row.lookahead > 0)
            first = self._confirmed(row, end)
            self._computed[row.slot] = end
            if first < end:
                yield DraftRow(index, row.slot, first, end, row.lookahead)

    def _confirmed(self, row: Row, end: int) -> int:
        """Return the first position before `end` that is not computed for the known token."""
        position = self._computed.get(row.slot, row.first)
        known = self.passes.tokens[row.slot]
        for token in self._tentative.pop(row.slot, ()):
            if position == end or token != known[position]:
                break
            position += 1
        return min(position, end)


class PredictionHeads:
    """Prediction or EAGLE heads of the target. At position p, head i reads a hidden state and the token p + i + 1, and
    predicts the next token. Head i drafts token i. The last head drafts further ones from its own hidden states.

    The first head reads the hidden states of the target. Later heads read them too, or those of the previous head.

    Head i computes its last i positions from drafts. The next step computes them again with known tokens: it begins
    `len(passes) - 1` positions earlier, with the kept states of the target. The last positions of a cached prefix were
    computed with the next tokens of another request.

    media: of a target that reads media. A token of an item that no step has needed yet is read as text."""

    def __init__(self, passes: Sequence[Passes], media: MediaStore | None = None, *, of_target: bool = False) -> None:
        """of_target: later heads read the states of the target."""
        self.passes, self._media, self._of_target = tuple(passes), media, of_target
        self._kept: dict[int, tuple[int, Tensor]] = {}  # by slot: end of the known positions, and the last states

    def run(self, plan: StepPlan, result: StepResult, hidden: Tensor) -> dict[int, tuple[int, ...]]:
        """Implement `Drafter.run`."""
        for new in plan.new:
            self._kept.pop(new.slot, None)
        for passes in self.passes:
            passes.begin([row.slot for row in plan.rows])
        rows, states = self._rows(plan, result, hidden)
        own, drafts = states, dict[int, tuple[int, ...]]()
        for number, passes in enumerate(self.passes):
            # The tokens of the last positions are drafts, if there are some.
            parts = [row if row.drafts else replace(row, end=max(row.first, row.end - number)) for row in rows]
            at = [index for index, part in enumerate(parts) if part.first < part.end]
            if not at:
                return drafts
            rows, parts = [rows[index] for index in at], [parts[index] for index in at]
            states = [states[index][: part.end - part.first] for index, part in zip(at, parts, strict=True)]
            left, own = _drafted(passes, parts, states, drafts, self._media_of(parts, number))
            rows = [replace(row, drafts=one) for row, one in zip(rows, left, strict=True)]
            states = states if self._of_target else own
        while going := [index for index, row in enumerate(rows) if row.drafts]:
            states = [own[index][-1:] for index in going]
            parts = [replace(rows[index], first=rows[index].end, end=rows[index].end + 1) for index in going]
            left, own = _drafted(self.passes[-1], parts, states, drafts)
            rows = [replace(row, drafts=one) for row, one in zip(parts, left, strict=True)]
        return drafts

    def _rows(self, plan: StepPlan, result: StepResult, hidden: Tensor) -> tuple[list[DraftRow], list[Tensor]]:
        """Return the positions that the heads compute of each row, with the hidden states of the target."""
        rows, states, start = list[DraftRow](), list[Tensor](), 0
        for index, row in enumerate(plan.rows):
            if index not in result.failed:
                end = known_end(row, index, result)
                rows.append(DraftRow(index, row.slot, row.first, end, row.lookahead))
                states.append(hidden[start : start + end - row.first])
            start += row.count
        if not rows:
            return rows, states
        states = list(self.passes[0].head_states(torch.cat(states)).split([len(one) for one in states]))
        if again := len(self.passes) - 1:
            for number, row in enumerate(rows):
                end, kept = self._kept.get(row.slot, (row.first, states[number][:0]))
                assert end >= row.first, "positions are computed in order"
                before = kept[: max(0, len(kept) - (end - row.first))]
                states[number] = torch.cat((before, states[number]))
                rows[number] = replace(row, first=row.first - len(before))
                self._kept[row.slot] = row.end, states[number][-again:].clone()
        return rows, states

    def _media_of(self, rows: Sequence[DraftRow], number: int) -> MediaRows | None:
        """Return the embeddings of the tokens that a head reads at the positions of these rows."""
        if self._media is None:
            return None
        return self._media.kept_rows([(row.slot, row.first + number + 1, row.end - row.first) for row in rows])


def _drafted(
    passes: Passes,
    rows: Sequence[DraftRow],
    states: Sequence[Tensor],
    drafts: dict[int, tuple[int, ...]],
    media: MediaRows | None = None,
) -> tuple[list[int], list[Tensor]]:
    """Compute rows of a head, and draft a token after each row that has some left. Return the numbers of drafts that
    are left, and the hidden states that the head gives to the next one."""
    own = passes.forward(rows, torch.cat(list(states)), media)
    further = passes.own_states
    sizes = [row.end - row.first for row in rows]
    left, at = [row.drafts for row in rows], [number for number, row in enumerate(rows) if row.drafts]
    if at:
        ends = torch.from_numpy(np.cumsum(sizes)[at] - 1).to(own.device)
        for number, made in zip(at, passes.draft(own[ends], [rows[number] for number in at]), strict=True):
            left[number] = 0 if made is None else made.drafts
            if made is not None:
                drafts[made.index] = (*drafts.get(made.index, ()), passes.token(made))
    return left, list((own if further is None else further).split(sizes))


def known_end(row: Row, index: int, result: StepResult) -> int:
    """Return the position after those that a row computed for known tokens."""
    if not row.sample:
        return row.first + row.count
    return row.first + row.count + len(result.tokens(index)) - len(row.drafts) - 1
