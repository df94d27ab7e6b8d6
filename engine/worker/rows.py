"""Convert a plan's rows to columns, and assemble the result of a step."""

from dataclasses import dataclass

import numpy as np

from engine.api.golden import LogitFingerprint
from engine.api.messages import Logprob
from engine.core.plan import StepPlan, StepResult
from engine.sampling.pipeline import Sampled


@dataclass(frozen=True)
class PlanRows:
    """Columns with one entry per row."""

    slots: np.ndarray
    first: np.ndarray
    count: np.ndarray
    sampling: np.ndarray  # indexes of the rows that sample a token

    @property
    def ends(self) -> np.ndarray:
        """Position after each row's last one, where its sampled token is written."""
        return self.first + self.count


@dataclass(frozen=True)
class EncoderInputs:
    """Encoder inputs that a step reads, with one entry each."""

    rows: np.ndarray  # index of the row
    slots: np.ndarray
    count: np.ndarray  # tokens


def split_encoder_inputs(rows: PlanRows, sources: np.ndarray) -> tuple[PlanRows, EncoderInputs]:
    """Split rows into the decoder's tokens and the encoder inputs that are read first. sources: [slots], length of the
    encoder input at the beginning of each sequence, which the first row computes completely."""
    own = sources[rows.slots]
    enters = rows.first < own
    first = np.maximum(rows.first, own)
    encoder_inputs = EncoderInputs(np.flatnonzero(enters), rows.slots[enters], own[enters])
    return PlanRows(rows.slots, first, rows.ends - first, rows.sampling), encoder_inputs


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
    fingerprints: list[LogitFingerprint],
) -> StepResult:
    """Assemble the result. fingerprints: fingerprints of the rows that sample a token, or empty."""
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
        dict(zip(where, fingerprints, strict=False)),
    )
