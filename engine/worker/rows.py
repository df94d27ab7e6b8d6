"""Convert a plan's rows to columns, and assemble the result of a step."""

from dataclasses import dataclass

import numpy as np

from engine.api.golden import LogitFingerprint
from engine.api.messages import Logprob
from engine.core.plan import StepPlan, StepResult
from engine.sampling.pipeline import Sampled


@dataclass(frozen=True)
class PlanRows:
    """Columns with one entry per row, and `sampling` and `positions` with one entry per sampled token."""

    slots: np.ndarray
    first: np.ndarray
    count: np.ndarray
    sampling: np.ndarray  # index of the row, several times for a row with drafts
    positions: np.ndarray  # position of the token
    drafted: bool = False  # a row has drafts

    @property
    def last(self) -> np.ndarray:
        """Index, among the tokens of the step, of the token before each sampled one."""
        return (np.cumsum(self.count) - self.ends)[self.sampling] + self.positions - 1

    @property
    def one_each(self) -> bool:
        """True if every row has one token and samples one."""
        return len(self.sampling) == len(self.slots) == int(self.count.sum())

    @property
    def ends(self) -> np.ndarray:
        """Position after each row's last one."""
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
    return PlanRows(rows.slots, first, rows.ends - first, rows.sampling, rows.positions, rows.drafted), encoder_inputs


def plan_rows(plan: StepPlan) -> PlanRows:
    fields = np.array(
        [(row.slot, row.first, row.count, 1 + len(row.drafts) if row.sample else 0) for row in plan.rows], np.int64
    ).reshape(-1, 4)
    slots, first, count, samples = np.ascontiguousarray(fields.T)
    if not (samples > 1).any():
        sampling = np.flatnonzero(samples)
        return PlanRows(slots, first, count, sampling, (first + count)[sampling])
    sampling = np.repeat(np.arange(len(samples)), samples)
    number = np.arange(len(sampling)) - np.repeat(np.cumsum(samples) - samples, samples)
    return PlanRows(slots, first, count, sampling, (first + count - samples + 1)[sampling] + number, drafted=True)


def routes_of_rows(rows: PlanRows, wanted: list[int], routes: np.ndarray) -> dict[int, tuple[bytes, ...]]:
    """Return the experts of each position of the wanted rows. routes: [tokens, experts] of the step."""
    starts, narrow = np.cumsum(rows.count) - rows.count, routes.astype("<u2")
    return {row: tuple(one.tobytes() for one in narrow[starts[row] : starts[row] + rows.count[row]]) for row in wanted}


def step_result(
    plan: StepPlan,
    rows: PlanRows,
    sampled: Sampled,
    scored: dict[int, tuple[Logprob, ...]],
    failed: dict[int, str],
    fingerprints: list[LogitFingerprint],
) -> StepResult:
    """Assemble the result. fingerprints: fingerprints of the rows that sample a token, or empty."""
    if not rows.drafted:
        return _undrafted_result(plan, rows, sampled, scored, failed, fingerprints)
    ids, further = [-1] * len(plan.rows), dict[int, tuple[int, ...]]()
    logprobs, failures = dict[int, tuple[Logprob, ...]](), dict(failed)
    start = 0
    for number, row in enumerate(plan.rows):
        if not row.sample:
            continue
        if row.drafts:
            failures.pop(number, None)  # decided by the logits of each of its tokens
        if start in sampled.failed:
            failures[number] = sampled.failed[start]
        end = start + _num_tokens(sampled, start, row.drafts)
        ids[number] = sampled.ids[start]
        if end > start + 1:
            further[number] = tuple(sampled.ids[start + 1 : end])
        if start in sampled.logprobs:
            logprobs[number] = tuple(sampled.logprobs[at] for at in range(start, end))
        start += row.samples
    found = {int(rows.sampling[at]): one for at, one in enumerate(fingerprints)}
    return StepResult(plan.step, tuple(ids), further, logprobs, scored, failures, found)


def _num_tokens(sampled: Sampled, start: int, drafts: tuple[int, ...]) -> int:
    """Return the number of tokens of a row: those up to the first that differs from its draft, or before the first that
    could not be sampled, which the next step tries again. `start`: number of its first sample."""
    count = 1
    for at, draft in enumerate(drafts, start):
        if sampled.ids[at] != draft or at + 1 in sampled.failed:
            break
        count += 1
    return count


def _undrafted_result(
    plan: StepPlan,
    rows: PlanRows,
    sampled: Sampled,
    scored: dict[int, tuple[Logprob, ...]],
    failed: dict[int, str],
    fingerprints: list[LogitFingerprint],
) -> StepResult:
    where = rows.sampling.tolist()
    ids = [-1] * len(plan.rows)
    for row, token in zip(where, sampled.ids, strict=True):
        ids[row] = token
    return StepResult(
        plan.step,
        tuple(ids),
        {},
        {where[number]: (found,) for number, found in sampled.logprobs.items()},
        scored,
        {where[number]: reason for number, reason in sampled.failed.items()} | failed,
        dict(zip(where, fingerprints, strict=False)),
    )
