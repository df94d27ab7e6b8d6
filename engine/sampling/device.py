"""Sampling on a device without waiting for it: the stages of `pipeline.py` as launches, in the same order.

grammar mask -> (raw logprobs) -> LOGIT_PROCESSORS (see device_stages.py) -> temperature, truncation, sampling ->
(processed logprobs)

The host determines which stages are in use and uploads their parameters. The outputs of a step are one tensor.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.api.errors import NOT_FINITE, NOTHING_LEFT
from engine.api.messages import Logprob
from engine.sampling.columns import LogprobRequest
from engine.sampling.device_stages import (
    LogitProcessor,
    State,
    Upload,
    allowed_token_ids,
    bad_words,
    logit_bias,
    min_tokens,
    penalties,
    token_mask,
)
from engine.sampling.logprobs import with_ids
from engine.sampling.pipeline import Sampled
from engine.sampling.rows import Rows
from kernels.sampling.columns import DeviceColumns
from kernels.sampling.sample import sample
from kernels.sampling.top_logprobs import MAX_TOP, TOP_LOGPROBS

PENALISED = 32  # rows per launch of the penalty kernel: 19 MB of counts for a vocabulary of 152k


@dataclass(frozen=True)
class Drawn:
    """Outputs of a step on the device."""

    ids: Tensor  # [rows] int32, tokens for the next step
    found: Tensor  # int32, everything for the host, which passes a copy to `SamplingStep.read`


@dataclass(frozen=True)
class LogprobGroup:
    """Rows that request logprobs with the same parameters."""

    rows: list[int]
    requests: list[LogprobRequest]
    users: Callable[[], Tensor]  # the rows on the device
    top: int  # maximum number of tokens
    processed: bool
    whole: bool  # more tokens than the kernel sorts: torch sorts instead
    owners: Callable[[], Tensor] | None = None  # index into `rows` for each of `named`
    named: Callable[[], Tensor] | None = None  # tokens requested by id, concatenated


class DeviceSampler:
    """Sampler for one vocabulary on one device. Steps share memory, so they must run in order on one stream."""

    def __init__(self, vocab: int, device: torch.device) -> None:
        self.vocab, self.device = vocab, device
        self.counts = torch.zeros(PENALISED, vocab, dtype=torch.int32, device=device)

    def prepare(self, rows: Rows) -> "SamplingStep":
        """Prepare a step. The tokens of `rows` are not read."""
        upload = Upload()
        mask = token_mask(list(rows.masks), list(rows.masks.values()), upload)
        processors = (
            allowed_token_ids(rows, upload),
            logit_bias(rows, upload),
            min_tokens(rows, upload),
            penalties(rows, upload, len(self.counts)),
            bad_words(rows, upload),
        )
        logprob_groups = _logprob_groups(rows, upload)
        upload.send(self.device)
        used = [processor for processor in processors if processor is not None]
        return SamplingStep(len(rows), mask, used, logprob_groups, _is_truncated(rows), self.counts)


@dataclass(frozen=True)
class SamplingStep:
    """One step, prepared on the host. Calling it launches kernels; `read` converts the outputs."""

    rows: int
    mask: LogitProcessor | None
    processors: Sequence[LogitProcessor]
    logprob_groups: Sequence[LogprobGroup]
    truncated: bool
    counts: Tensor

    @property
    def is_plain(self) -> bool:
        """True if the step has neither logit processors nor logprobs."""
        return self.mask is None and not self.processors and not self.logprob_groups

    def __call__(self, logits: Tensor, slot: Tensor, lengths: Tensor, tokens: Tensor, columns: DeviceColumns) -> Drawn:
        """Launch the step. logits: [rows or more, vocab] fp32, may be overwritten. slot, lengths: [rows or more] int32.
        tokens: [slots, width] int32, known tokens. Further rows are padding, and their tokens are undefined."""
        state = State(slot, lengths, tokens, columns, self.counts)
        if self.mask is not None:
            self.mask(logits, state)
        raw = [self._raw_logits(logits, one) for one in self.logprob_groups if not one.processed]
        for processor in self.processors:
            processor(logits, state)
        ids, scores, _, floor, last = sample(logits, slot, lengths, columns, self.truncated)
        parts = [ids, scores]
        for one in self.logprob_groups:
            source, at = (logits, one.users()) if one.processed else raw.pop(0)
            body = TOP_LOGPROBS.reference if one.whole else TOP_LOGPROBS
            given = at, one.users(), ids, slot, columns.temperature, floor, last
            parts += body(source, *given, min(one.top, logits.shape[1]), one.processed)
            if one.owners is not None and one.named is not None:
                # Each of these tokens is scored as the sampled token of a separate row.
                owner = one.owners().long()
                users, rows = one.users()[owner], torch.arange(len(owner), dtype=torch.int32, device=logits.device)
                step = [column[users.long()] for column in (slot, floor, last)]
                given = at[owner], rows, one.named(), step[0], columns.temperature, *step[1:]
                parts += TOP_LOGPROBS(source, *given, 0, one.processed)
        return Drawn(ids, torch.cat([part.view(torch.int32).flatten() for part in parts]))

    def _raw_logits(self, logits: Tensor, one: LogprobGroup) -> tuple[Tensor, Tensor]:
        """Return the unmodified logits of rows that request raw logprobs, and their indexes. Copied if processors will
        modify the logits in place."""
        if not self.processors:
            return logits, one.users()
        return logits.index_select(0, one.users()), torch.arange(len(one.rows), dtype=torch.int32, device=logits.device)

    def read(self, drawn: Drawn, found: np.ndarray) -> Sampled:
        """Convert outputs. found: `drawn.found`, copied to the host. Nothing is read from the device."""
        size = drawn.ids.shape[0]
        ids, scores = found[: self.rows].tolist(), found[size : size + self.rows].view(np.float32)
        logprobs: dict[int, Logprob] = {}
        start, vocab = 2 * size, self.counts.shape[1]
        for one in self.logprob_groups:
            width, count = 1 + min(one.top, vocab), len(one.rows)
            values, numbers = found[start : start + 2 * count * width].reshape(2, count, width)
            start += 2 * count * width
            for row, request, value, number in zip(
                one.rows, one.requests, values.view(np.float32), numbers, strict=True
            ):
                end = 1 + (vocab if request.top < 0 else min(request.top, vocab))
                top = tuple(number[1:end].tolist()), tuple(value[1:end].tolist())
                logprobs[row] = Logprob(ids[row], float(value[0]), int(number[0]), *top)
            for row, request in zip(one.rows, one.requests, strict=True):
                if request.ids:
                    values = found[start : start + len(request.ids)].view(np.float32)
                    logprobs[row] = with_ids(logprobs[row], request.ids, values.tolist())
                    start += len(request.ids)
            start += sum(len(request.ids) for request in one.requests)  # their ranks
        bad = np.flatnonzero(~np.isfinite(scores)).tolist()
        failed = {row: NOTHING_LEFT if scores[row] == -np.inf else NOT_FINITE for row in bad}
        return Sampled(ids, drawn.ids, logprobs, failed)


def _is_truncated(rows: Rows) -> bool:
    columns, slots = rows.columns, rows.slots[~rows.greedy]
    cuts = (columns.top_k[slots] > 0) | (columns.top_p[slots] < 1.0) | (columns.min_p[slots] > 0.0)
    return bool(cuts.any())


def _logprob_groups(rows: Rows, upload: Upload) -> list[LogprobGroup]:
    """Group the rows that request logprobs by their parameters."""
    groups: dict[tuple[bool, bool], list[int]] = {}
    requests = {row: rows.columns.logprobs[int(rows.slots[row])] for row in rows.using(rows.columns.logprobs)}
    for row, one in requests.items():
        groups.setdefault((one.processed, not 0 <= one.top <= MAX_TOP), []).append(row)
    found = []
    for (processed, whole), members in groups.items():
        wanted = [requests[row] for row in members]
        top = max(rows.columns.vocab if one.top < 0 else one.top for one in wanted)
        users = upload.add(np.array(members, np.int32))
        named = [token for one in wanted for token in one.ids]
        owners = [place for place, one in enumerate(wanted) for _ in one.ids]
        both = [upload.add(np.array(numbers, np.int32)) if named else None for numbers in (owners, named)]
        found.append(LogprobGroup(members, wanted, users, top, processed, whole, *both))
    return found
