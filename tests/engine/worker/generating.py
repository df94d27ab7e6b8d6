"""Requests of a worker that generate together, one token of each a step."""

from typing import Any

import torch

from engine.api.messages import Sampling
from engine.core.plan import NewRow, Row, StepPlan
from engine.worker.worker import Worker

VOCAB, BLOCK = 1000, 16
GREEDY = Sampling(temperature=0.0, logprobs=0)


def silent(phase: str, fraction: float) -> None:
    """Ignore progress reports."""


class Requests:
    """Random prompts and the steps that generate from them. `sources`: number of encoder input tokens per prompt."""

    def __init__(
        self, worker: Worker, lengths: list[int], sampling: Sampling = GREEDY, sources: list[int] | None = None
    ) -> None:
        self.worker, self.step, self.sampling = worker, 0, sampling
        draw = torch.Generator().manual_seed(len(lengths))
        self.ids = [torch.randint(0, VOCAB, (length,), generator=draw).tolist() for length in lengths]
        self.sources = sources or [0] * len(lengths)
        self.blocks = [0] * len(lengths)
        self.taken = 1
        self.done = [0] * len(lengths)

    def _row(self, slot: int, count: int) -> Row:
        end = self.done[slot] + count
        need = -(-end // BLOCK)
        fresh = tuple(range(self.taken, self.taken + need - self.blocks[slot]))
        self.taken += len(fresh)
        self.blocks[slot] = need
        row = Row(slot, self.done[slot], count, True, (fresh,))
        self.done[slot] = end
        return row

    def prefill(self) -> Any:
        self.step += 1
        new = tuple(
            NewRow(slot, tuple(ids), len(ids), self.sampling, (), len(ids), source=source)
            for slot, (ids, source) in enumerate(zip(self.ids, self.sources, strict=True))
        )
        rows = tuple(self._row(slot, len(ids)) for slot, ids in enumerate(self.ids))
        return self.worker.start(StepPlan(self.step, new, (), rows), {})

    def decode(self) -> Any:
        self.step += 1
        rows = tuple(self._row(slot, 1) for slot in range(len(self.ids)))
        return self.worker.start(StepPlan(self.step, (), (), rows), {})

    def generate(self, steps: int) -> list[list[int]]:
        handles = [self.prefill(), *(self.decode() for _ in range(steps))]
        return [list(column) for column in zip(*(handle.result().sampled for handle in handles), strict=True)]
