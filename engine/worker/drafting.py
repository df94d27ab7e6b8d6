"""Drafts by a model: after a step, it computes the tokens of the step and then drafts the next ones.

The draft model has pages of its own under the target's block ids, so that blocks of cached prefixes have the keys and
values of both models. Each step of the target is followed by one pass of the draft model over the same tokens, which
also samples the first draft of each row, and by one pass for each further draft. Drafts are sampled like the target's
tokens, with the noise of their seed and position (engine/sampling/noise.py): equal logits give equal tokens.

Positions of drafts are tentative: keys and values that were computed for a draft are kept if it is accepted.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from engine.core.plan import Row, StepPlan, StepResult
from engine.layers.model import TextModel
from engine.sampling.noise import Noise
from engine.sampling.pipeline import Prepared
from engine.sampling.rows import Rows
from engine.worker.batch import build_batch
from engine.worker.table import RequestTable


@dataclass(frozen=True)
class DraftRow:
    """Positions [first, end) that the draft model computes of a row, and the tokens that it drafts after them."""

    index: int  # of the row in the plan
    slot: int
    first: int
    end: int
    drafts: int


class DraftModel:
    """A draft model of a HostRunner.

    pages: KV pool of the draft model, with a block for each of the target's blocks and each group of its layers.
    group: number of the target's block table that the draft model uses.
    vocab: number of the target's logits. noise: of the target's sampling."""

    def __init__(
        self, model: TextModel, pages: Tensor, table: RequestTable, noise: Noise, *, group: int, vocab: int
    ) -> None:
        self._model, self._pages, self._table, self._noise = model, pages, table, noise
        self._blocks, groups = table.tables[group], len(model.layout.groups)
        # A block has a page for each group of layers, at consecutive numbers.
        self._tables = tuple(np.zeros_like(self._blocks) for _ in range(groups)) if groups > 1 else (self._blocks,)
        self._vocab = vocab
        self._computed: dict[int, int] = {}  # by slot: positions before it are computed, with tokens that are known
        self._tentative: dict[int, list[int]] = {}  # by slot: drafts at the positions after it that are computed, too

    def run(self, plan: StepPlan, result: StepResult) -> dict[int, tuple[int, ...]]:
        """Compute the tokens of a step whose result is in the table. Return the drafts of each row that has some."""
        for new in plan.new:
            self._tentative.pop(new.slot, None)
            self._computed.pop(new.slot, None)
        if len(self._tables) > 1:
            slots = [row.slot for row in plan.rows]
            for group, own in enumerate(self._tables):
                own[slots] = self._blocks[slots] * len(self._tables) + group
        rows = list(self._rows(plan, result))
        drafts: dict[int, list[int]] = {row.index: [] for row in rows if row.drafts}
        while rows:
            hidden = self._forward(rows)
            last = np.cumsum([row.end - row.first for row in rows]) - 1
            at = [number for number, row in enumerate(rows) if row.drafts]
            if not at:
                break
            rows = [rows[number] for number in at]
            tokens = self._sample(hidden[torch.from_numpy(last[at]).to(hidden.device)], rows)
            rows = [self._next(row, token) for row, token in zip(rows, tokens, strict=True) if token is not None]
            for row in rows:
                drafts[row.index].append(int(self._table.tokens[row.slot, row.first]))
                if row.drafts:
                    self._tentative.setdefault(row.slot, []).append(drafts[row.index][-1])
            rows = [row for row in rows if row.drafts]
        return {index: tuple(tokens) for index, tokens in drafts.items() if tokens}

    def _rows(self, plan: StepPlan, result: StepResult) -> Iterator[DraftRow]:
        for index, row in enumerate(plan.rows):
            if index in result.failed:
                continue
            end, drafts = row.first + row.count, 0
            if row.sample:
                end += len(result.tokens(index)) - len(row.drafts) - 1
                drafts = row.lookahead
            first = self._confirmed(row, end + (drafts > 0))
            end += drafts > 0  # the sampled token is computed, too
            self._computed[row.slot] = end
            if first < end:
                yield DraftRow(index, row.slot, first, end, drafts)

    def _confirmed(self, row: Row, end: int) -> int:
        """Return the first position before `end` that is not computed for the known token."""
        position = self._computed.get(row.slot, row.first)
        known = self._table.tokens[row.slot]
        for token in self._tentative.pop(row.slot, ()):
            if position == end or token != known[position]:
                break
            position += 1
        return min(position, end)

    def _next(self, row: DraftRow, token: int) -> DraftRow:
        """Write a draft to the table, and return the row that computes it."""
        self._table.tokens[row.slot, row.end] = token
        return replace(row, first=row.end, end=row.end + 1, drafts=row.drafts - 1)

    def _forward(self, rows: list[DraftRow]) -> Tensor:
        table, first = self._table, np.array([row.first for row in rows])
        batch = build_batch(
            np.array([row.slot for row in rows]),
            first,
            np.array([row.end for row in rows]) - first,
            tokens=table.tokens,
            rope_lengths=table.rope_lengths,
            tables=self._tables,
            block_tokens=self._model.layout.block_tokens,
            device=self._pages.device,
        )
        last = self._model.model.embed.vocab - 1
        if last < self._vocab - 1:  # ids beyond the draft model's vocabulary are padding of the target's
            batch = replace(batch, ids=batch.ids.clamp(max=last))
        return self._model.forward(batch, self._pages)

    def _sample(self, hidden: Tensor, rows: list[DraftRow]) -> list[int | None]:
        """Sample a token after each row; None if none could be sampled."""
        logits = self._model.logits(hidden)
        if logits.shape[1] != self._vocab:
            missing = self._vocab - logits.shape[1]
            logits = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf).contiguous()
        columns = copy.copy(self._table.columns)
        columns.logprobs = {}
        positions = np.array([row.end for row in rows])
        slots = np.array([row.slot for row in rows])
        sampled = Prepared(
            Rows(slots, positions, columns, self._table.tokens, device=self._pages.device), self._noise
        ).finish(logits)
        return [None if at in sampled.failed else token for at, token in enumerate(sampled.ids)]

