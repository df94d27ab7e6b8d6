"""Golden prompts as steps, and what an engine compares them with: its lock at its start, from then on itself.

Their plans go to the worker and past the scheduler, in the first slot, which nobody holds while nothing runs, and in
blocks that are in no pool: no request loses a cached block by them, and no count of requests knows of them. The step
that an idle engine makes to show that it could compute (see engine/api/heartbeat.py) is made here, too.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from engine.api.config import SelfTest
from engine.api.errors import Drift, SelfTestFailed, StepError
from engine.api.golden import (
    REPLY_TOKENS,
    Against,
    Arithmetic,
    Band,
    Golden,
    LogitFingerprint,
    Prompt,
    Recorded,
    band_between,
    difference,
)
from engine.api.messages import Pooling, Sampling, Tested
from engine.core.plan import NewRow, Row, StepPlan, StepResult
from engine.kv.layout import NULL_BLOCK, Layout, blocks_of

QUIET_S = 2.0  # an engine has had no work for so long before a golden prompt begins
SLOT = 0
_GREEDY = Sampling(temperature=0.0)


class Run:
    """One prompt on its way, greedily: `plan` is the next step, None after the last, `take` what it gave. `blocks` are
    those it may write to, `reply` tokens are drawn, at most `step_tokens` computed in a step."""

    def __init__(
        self, prompt: Prompt, layout: Layout, blocks: Sequence[int], step_tokens: int, reply: int = REPLY_TOKENS
    ) -> None:
        self.prompt = prompt
        self._layout, self._step_tokens, self._wanted = layout, step_tokens, reply
        self._free = iter(blocks)
        self._computed = 0
        self._reply: list[int] = []
        self._digests: list[LogitFingerprint] = []

    def plan(self) -> StepPlan | None:
        if len(self._reply) == self._wanted:
            return None
        ids, first = self.prompt.ids, self._computed
        end = min(first + self._step_tokens, len(ids) + len(self._reply))
        sample = end == len(ids) + len(self._reply)
        have, block_tokens = blocks_of(first, self._layout.block_tokens), self._layout.block_tokens
        fresh = blocks_of(end, block_tokens) - have
        added = tuple(tuple(next(self._free) for _ in range(fresh)) for _ in self._layout.groups)
        new = () if first else (NewRow(SLOT, ids, len(ids), _GREEDY, (), len(ids), source=self.prompt.source),)
        self._computed = end
        return StepPlan(0, new, (), (Row(SLOT, first, end - first, sample, added),), digested=True)

    def take(self, result: StepResult) -> None:
        """Raises StepError for a device that tells no digests."""
        token = result.sampled[0]
        if token < 0:
            return
        if 0 not in result.digests:
            raise StepError(f"golden prompt {self.prompt.name}: the worker told no digest of its logits")
        self._reply.append(token)
        self._digests.append(result.digests[0])

    @property
    def golden(self) -> Golden:
        return Golden(self.prompt, tuple(self._reply), tuple(self._digests))


class HealthCheck:
    """One step of one token, written to where nothing is kept: a sign of life. A model that pools is asked for
    `pooling`; where there is an encoder in front, it reads a source of one token first (`sourced`)."""

    def __init__(self, layout: Layout, pooling: Pooling | None = None, *, sourced: bool = False) -> None:
        self._groups = len(layout.groups)
        self._pooling = pooling
        self._source = int(sourced)
        self._made = False

    def plan(self) -> StepPlan | None:
        if self._made:
            return None
        self._made = True
        count = 1 + self._source
        new = NewRow(SLOT, (0,) * count, count, _GREEDY, (), count, self._pooling, source=self._source)
        row = Row(SLOT, 0, count, self._pooling is None, ((NULL_BLOCK,),) * self._groups)
        return StepPlan(0, (new,), (), (row,))

    def take(self, result: StepResult) -> None:
        """Nobody looks at its token."""


class Step(Protocol):
    def __call__(self, plan: StepPlan) -> StepResult:
        """Runs one step and waits for it."""


@dataclass
class Counts:
    """Golden prompts computed, left off for requests, and how long the last one took, in seconds."""

    runs: int = 0
    yields: int = 0
    seconds: float = 0.0


@dataclass
class SelfTestRunner:
    """The golden prompts of one engine. `kept`: what it made of each when it began, which idle runs are compared with.
    `blocks`: of its own. Times are the caller's, in seconds."""

    settings: SelfTest
    arithmetic: Arithmetic
    prompts: Sequence[Prompt]
    layout: Layout
    blocks: Sequence[int]
    step_tokens: int
    kept: dict[str, Golden] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    _turn: int = 0
    _last_s: float | None = None

    @property
    def locked(self) -> Recorded | None:
        """What the lock has, if it can be compared with this engine."""
        found = self.settings.locked
        return None if found is None or self._band_of(found.arithmetic) is None else found

    @property
    def band(self) -> Band:
        """Between two runs of this engine."""
        found = self._band_of(self.arithmetic)
        assert found is not None, "its own weights are rounded alike"
        return found

    def _band_of(self, other: Arithmetic) -> Band | None:
        return band_between(other, self.arithmetic, self.settings.tolerance)

    # At the start

    def start(self, step: Step, clock: Callable[[], float], told: Callable[[float], None]) -> Tested:
        """Computes the prompts, as far as the budget lasts, the first one in any case. `told`: the share that is done,
        before each step. Raises SelfTestFailed where the lock says otherwise."""
        began = clock()
        differing: list[str] = []
        done, count = 0, len(self.prompts)
        for prompt in self.prompts:
            if done and clock() - began >= self.settings.budget_s:
                break
            golden = self._computed(prompt, step, clock, partial(told, done / count))
            differing += self._first(golden)
            done += 1
        self._last_s = clock()
        against: Against = "itself" if self.locked is None else "lock"
        band = self.band if self.locked is None else self._band_of(self.locked.arithmetic)
        return Tested(done, round(clock() - began, 4), count - done, against, str(band), "; ".join(differing))

    def _computed(self, prompt: Prompt, step: Step, clock: Callable[[], float], told: Callable[[], None]) -> Golden:
        run, began = self._run(prompt), clock()
        while (plan := run.plan()) is not None:
            told()
            run.take(step(plan))
        self._count(clock() - began)
        return run.golden

    def _first(self, golden: Golden) -> Iterator[str]:
        """Keeps what a prompt gave at first; what differs from the lock, where that is no reason to end."""
        wrong = self.against_lock(golden)
        if wrong and self.settings.refuses:
            raise SelfTestFailed(wrong)
        self.kept[golden.prompt.name] = golden
        if wrong:
            yield wrong

    def against_lock(self, golden: Golden) -> str:
        """What the lock says otherwise, or ""."""
        locked = self.locked
        expected = next((one for one in locked.goldens if one.prompt == golden.prompt), None) if locked else None
        if locked is None or expected is None:
            return ""
        band = self._band_of(locked.arithmetic)
        assert band is not None, "a lock that cannot be compared with is none"
        wrong = difference(expected, golden, band)
        return f"{wrong} with the lock ({band.why})" if wrong else ""

    # Without work

    def next(self, now_s: float, idle_since_s: float) -> "Run | None":
        """The golden prompt whose turn it is, if it is time for one."""
        every = self.settings.every_s
        if not every or not self.prompts or now_s - idle_since_s < min(QUIET_S, every):
            return None
        if self._last_s is not None and now_s - self._last_s < every:
            return None
        return self._run(self.prompts[self._turn % len(self.prompts)])

    def yielded(self) -> None:
        """A request came; the prompt begins anew another time."""
        self.counts.yields += 1

    def done(self, run: "Run", took_s: float, now_s: float) -> None:
        """Raises Drift if it is not as it was at first."""
        self._turn += 1
        self._last_s = now_s
        self._count(took_s)
        golden = run.golden
        expected = self.kept.get(golden.prompt.name)
        if expected is None:  # there was no time for it at the start
            wrong = self.against_lock(golden) if self.settings.refuses else ""
            self.kept[golden.prompt.name] = golden
        else:
            wrong = difference(expected, golden, self.band)
            wrong = f"{wrong} with what this engine gave at first" if wrong else ""
        if wrong:
            raise Drift(wrong)

    def _run(self, prompt: Prompt) -> Run:
        return Run(prompt, self.layout, self.blocks, self.step_tokens)

    def _count(self, seconds: float) -> None:
        self.counts.runs += 1
        self.counts.seconds = seconds
