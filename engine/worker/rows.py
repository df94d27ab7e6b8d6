"""A plan's rows as columns, and the result of a step put together again."""

from dataclasses import dataclass

import numpy as np

from engine.api.golden import LogitFingerprint
from engine.api.messages import Logprob
from engine.core.plan import StepPlan, StepResult
from engine.sampling.pipeline import Sampled


@dataclass(frozen=True)
class PlanRows:
    """One entry a row."""

    slots: np.ndarray
    first: np.ndarray
    count: np.ndarray
    sampling: np.ndarray  # indexes of the rows that draw a token

    @property
    def ends(self) -> np.ndarray:
        """Position after each row's last one: where its token goes."""
        return self.first + self.count


@dataclass(frozen=True)
class Entering:
    """Sources that a step reads, one entry each: of which of its rows, in which slot, and how many tokens."""

    rows: np.ndarray
    slots: np.ndarray
    count: np.ndarray


def behind_sources(rows: PlanRows, sources: np.ndarray) -> tuple[PlanRows, Entering]:
    """The rows of a decoder's own tokens, and the sources that an encoder reads first. sources: [slots], tokens of the
    source that each sequence begins with, which its first row computes as a whole."""
    own = sources[rows.slots]
    enters = rows.first < own
    first = np.maximum(rows.first, own)
    entering = Entering(np.flatnonzero(enters), rows.slots[enters], own[enters])
    return PlanRows(rows.slots, first, rows.ends - first, rows.sampling), entering


def plan_rows(plan: StepPlan) -> PlanRows:
    fields = np.array([(row.slot, row.first, row.count, row.sample) for row in plan.rows], np.int64).reshape(-1, 4)
    slots, first, count, sample = np.ascontiguousarray(fields.T)
    return PlanRows(slots, first, count, np.flatnonzero(sample))


def step_result(
    plan: StepPlan,
    rows: PlanRows,
    sampled: Sampled,
    scored: dict[int, tuple[Logprob, ...]],
    failed: dict[int, str],
    digests: list[LogitFingerprint],
) -> StepResult:
    """`digests`: of the rows that draw a token, or none."""
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
        dict(zip(where, digests, strict=False)),
    )
