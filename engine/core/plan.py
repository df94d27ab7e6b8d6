"""One step as a value: what the scheduler wants (StepPlan) and what the worker gives back (StepResult).

The worker keeps a table of requests by slot: all known token ids, sampling columns, block tables. A plan therefore
carries only what changed. Token ids of running rows are not in the plan: the worker wrote them itself when it sampled
them, so that step n+1 can be planned before step n's tokens are known.

A grammar's mask follows from the token before it. Where the step before is still drawing that token, a step starts
without its masks and waits for them only where it draws: the model runs meanwhile.
"""

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.api.golden import LogitFingerprint
from engine.api.messages import Logprob, Pooled, Pooling, Sampling

Mask = NDArray[np.uint32]  # bit i % 32 of word i // 32: token i is allowed
Masks = Mapping[int, Mask]  # by row; other rows may draw any token
Late = Future[Masks]  # always given, if only empty: who draws waits for it


class NewRow(msgspec.Struct, frozen=True, array_like=True):
    """A request that enters (or, after a preemption, re-enters) the worker's table. `ids` are all known tokens; the
    first `prompt_tokens` of them are the prompt (penalties and logprobs tell them from the reply). `rope_length`: the
    length whose rotary scaling its known tokens use (see `models.parts.Rope`). With `pooling` it is pooled once its
    prompt is computed, whose `segments` have so many tokens. The first `source` tokens are what an encoder reads; its
    first row computes all of them."""

    slot: int
    ids: tuple[int, ...]
    prompt_tokens: int
    sampling: Sampling
    stop_ids: tuple[int, ...]  # end and stop tokens, which min_tokens masks
    rope_length: int
    pooling: Pooling | None = None
    segments: tuple[int, ...] = ()
    source: int = 0


class Row(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Positions [first, first + count) of the request in `slot` are computed. `blocks` are block ids appended to its
    table, one tuple a group. `sample`: the token after the last position is drawn, written to the table at position
    first + count, and returned."""

    slot: int
    first: int
    count: int
    sample: bool
    blocks: tuple[tuple[int, ...], ...]


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """`dropped` slots leave the table before `new` ones enter it, and both before `rows` run. A new row's block tables
    start empty; its blocks, cached ones first, come with its Row (released positions are block 0). `digested`: what
    the logits of rows that draw a token come to is told; the host waits for it."""

    step: int
    new: tuple[NewRow, ...]
    dropped: tuple[int, ...]
    rows: tuple[Row, ...]
    digested: bool = False

    @property
    def tokens(self) -> int:
        return sum(row.count for row in self.rows)


@dataclass(frozen=True)
class StepResult:
    """`sampled[i]` is the token drawn for row i of the plan, -1 where it draws none. `logprobs[i]` belongs to that
    token; `prompt_logprobs[i]` to the prompt tokens at positions first + 1 … first + count that this row could score.
    `failed[i]`: a row that could draw no token (its own is meaningless), with the reason. `digests[i]`: of the
    logits of row i, where the plan asks. `pooled[i]`: what became of a prompt that row i completed."""

    step: int
    sampled: tuple[int, ...]
    logprobs: dict[int, Logprob] = field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[Logprob, ...]] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    digests: dict[int, LogitFingerprint] = field(default_factory=dict)
    pooled: dict[int, Pooled] = field(default_factory=dict)


def wait(masks: Masks | Late) -> Masks:
    return masks.result() if isinstance(masks, Future) else masks
