"""One step as data: StepPlan is the scheduler's input to the worker, StepResult the worker's output.

The worker keeps a request table by slot: all known token ids, sampling parameters, block tables. A plan therefore
carries only changes. It does not contain the token ids of running rows: the worker wrote them when it sampled them, so
step n+1 can be planned before the tokens of step n are known.

The mask of a grammar depends on the preceding token. If that token is still being sampled, the step starts without its
masks and waits for them only before sampling, so the model runs meanwhile.

A row with drafts computes their positions too, and samples a token after each of them. Noise is keyed by position, so
separate steps would sample the same tokens as long as the drafts equal them. The row's tokens end with the first token
that differs from its draft. Keys and values of the rejected drafts are overwritten by the next row.

A draft model runs in the worker, after the tokens of a step are sampled. A row's `lookahead` is the number of tokens
that it drafts; they are part of the result, and the next row of the request may verify them.
"""

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import accumulate

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.api.golden import LogitFingerprint
from engine.api.media import MediaItem
from engine.api.messages import Alignment, Logprob, Pooled, Pooling, Sampling

Mask = NDArray[np.uint32]  # bit i % 32 of word i // 32: token i is allowed
Masks = Mapping[int, Mask]  # by number of the sample (see `Row.samples`); samples without an entry may be any token
PendingMasks = Future[Masks]  # always set, possibly to an empty mapping, because the sampler waits for it


class NewRow(msgspec.Struct, frozen=True, array_like=True):
    """A request that enters the worker's table, or re-enters it after a preemption."""

    slot: int
    ids: tuple[int, ...]  # all known tokens
    prompt_tokens: int  # number of leading ids that are the prompt
    sampling: Sampling
    stop_ids: tuple[int, ...]  # end and stop tokens, which min_tokens masks
    rope_length: int  # length whose rotary scaling its tokens use (see `models.parts.Rope`)
    pooling: Pooling | None = None  # pool the prompt once it is computed
    segments: tuple[int, ...] = ()  # lengths of the prompt's segments
    source: int = 0  # leading tokens that the encoder reads; the first row computes all of them
    adapter: int = -1  # slot of the LoRA adapter; -1: none
    media: tuple[MediaItem, ...] = ()  # all items of the prompt


class Row(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Compute the positions [first, first + count) of the request in `slot`."""

    slot: int
    first: int
    count: int
    sample: bool  # sample the token after the last position, write it to the table and return it
    blocks: tuple[tuple[int, ...], ...]  # block ids to append to its block tables, one tuple per group
    drafts: tuple[int, ...] = ()  # expected tokens at the last positions, which the row verifies
    lookahead: int = 0  # tokens that the draft model drafts after the step, for the next one

    @property
    def samples(self) -> int:
        """Number of tokens that are sampled. Samples are numbered in the order of the rows of a step."""
        return 1 + len(self.drafts) if self.sample else 0


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """One step. `dropped` slots leave the table first, then `new` ones enter it, then `rows` run.

    The block tables of a new row start empty. Its Row has all blocks, cached ones first; released positions have
    block 0.

    The recurrent state of a request is in the state slot with the number of its table slot. A row at position 0 begins
    with a state of zeros. A row with drafts leaves the state after its last position. If a draft is rejected, the next
    row begins at the same position again, with the state from before."""

    step: int
    new: tuple[NewRow, ...]
    dropped: tuple[int, ...]
    rows: tuple[Row, ...]
    fingerprinted: bool = False  # return fingerprints of the logits of sampled rows; the host waits for them
    restored: tuple[tuple[int, int], ...] = ()  # (snapshot, slot): copy this state before the rows run
    saved: tuple[tuple[int, int], ...] = ()  # (slot, snapshot): copy this state after the rows have run
    adapters: tuple[tuple[int, int], ...] = ()  # (adapter slot, version): move this LoRA adapter there before all else
    kept: tuple[int, ...] = ()  # slots: keep a copy of this state before the rows run, because their drafts may fail
    returned: tuple[int, ...] = ()  # slots: return this state to the kept copy before the rows run

    @property
    def first_samples(self) -> list[int]:
        """Number of the first sample of each row."""
        return list(accumulate((row.samples for row in self.rows), initial=0))[:-1]

    @property
    def tokens(self) -> int:
        return sum(row.count for row in self.rows)


@dataclass(frozen=True)
class MediaCounts:
    """Media whose embeddings a step needed first."""

    encoded: int = 0  # items that the tower computed
    cached: int = 0  # items whose embeddings were cached
    seconds: float = 0.0  # time of the tower


@dataclass(frozen=True)
class StepResult:
    """Outputs of one step. Keys are indexes into the plan's rows."""

    step: int
    sampled: tuple[int, ...]  # first sampled token of each row, -1 for rows that do not sample
    further: dict[int, tuple[int, ...]] = field(default_factory=dict)  # tokens after it, if its draft was accepted
    logprobs: dict[int, tuple[Logprob, ...]] = field(default_factory=dict)  # of each token of the row
    prompt_logprobs: dict[int, tuple[Logprob, ...]] = field(default_factory=dict)
    """Entries for the prompt tokens at positions first + 1 … first + count that the row could score."""
    failed: dict[int, str] = field(default_factory=dict)  # reason why no token could be sampled; `sampled` is undefined
    fingerprints: dict[int, LogitFingerprint] = field(default_factory=dict)  # if the plan requests them
    pooled: dict[int, Pooled] = field(default_factory=dict)  # of prompts that the row completed
    drafts: dict[int, tuple[int, ...]] = field(default_factory=dict)  # expected next tokens, from a draft model
    media: MediaCounts | None = None  # None: the step needed no embeddings
    routes: dict[int, tuple[bytes, ...]] = field(default_factory=dict)  # experts of each position, see `Delta.routes`

    alignments: dict[int, Alignment] = field(default_factory=dict)  # of prompts that the row completed

    def tokens(self, row: int) -> tuple[int, ...]:
        """Return the tokens of a row that samples."""
        return (self.sampled[row], *self.further.get(row, ()))


def wait(masks: Masks | PendingMasks) -> Masks:
    return masks.result() if isinstance(masks, Future) else masks
