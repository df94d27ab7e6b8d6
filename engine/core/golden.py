"""Runs golden prompts and compares them with the lock file at the start, and with this engine's first results later.

Their plans bypass the scheduler. They use slot 0, which is free while no request runs, and blocks outside the pool, so
they evict no cached block and do not appear in request counters. The health check step of an idle engine (see
engine/api/heartbeat.py) is built here, too.
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
from engine.api.messages import Pooling, Sampling, SelfTestResult
from engine.core.plan import NewRow, Row, StepPlan, StepResult
from engine.kv.layout import NULL_BLOCK, Layout, blocks_of

QUIET_S = 2.0  # idle time before a golden prompt starts
SLOT = 0
_GREEDY = Sampling(temperature=0.0)


class Run:
    """Greedy run of one prompt. `plan` returns the next step, or None after the last one; `apply` adds its result.

    blocks: blocks to write to. reply: number of tokens to generate. step_tokens: maximum tokens per step."""

    def __init__(
        self, prompt: Prompt, layout: Layout, blocks: Sequence[int], step_tokens: int, reply: int = REPLY_TOKENS
    ) -> None:
        self.prompt = prompt
        self._layout, self._step_tokens, self._reply_tokens = layout, step_tokens, reply
        self._free = iter(blocks)
        self._computed = 0
        self._reply: list[int] = []
        self._fingerprints: list[LogitFingerprint] = []

    def plan(self) -> StepPlan | None:
        if len(self._reply) == self._reply_tokens:
            return None
        ids, first = self.prompt.ids, self._computed
        end = min(first + self._step_tokens, len(ids) + len(self._reply))
        sample = end == len(ids) + len(self._reply)
        have, block_tokens = blocks_of(first, self._layout.block_tokens), self._layout.block_tokens
        fresh = blocks_of(end, block_tokens) - have
        added = tuple(tuple(next(self._free) for _ in range(fresh)) for _ in self._layout.groups)
        new = () if first else (NewRow(SLOT, ids, len(ids), _GREEDY, (), len(ids), source=self.prompt.source),)
        self._computed = end
        return StepPlan(0, new, (), (Row(SLOT, first, end - first, sample, added),), fingerprinted=True)

    def apply(self, result: StepResult) -> None:
        """Add the result of the planned step. Raises StepError if the device returned no fingerprint."""
        token = result.sampled[0]
        if token < 0:
            return
        if 0 not in result.fingerprints:
            raise StepError(f"golden prompt {self.prompt.name}: the worker returned no fingerprint of its logits")
        self._reply.append(token)
        self._fingerprints.append(result.fingerprints[0])

    @property
    def golden(self) -> Golden:
        return Golden(self.prompt, tuple(self._reply), tuple(self._fingerprints))


class HealthCheck:
    """A one-token step whose results are discarded, which shows that an idle engine can still compute.

    pooling: parameters for a pooling model. encoder_decoder: the model is an encoder-decoder and gets one encoder token
    first."""

    def __init__(self, layout: Layout, pooling: Pooling | None = None, *, encoder_decoder: bool = False) -> None:
        self._groups = len(layout.groups)
        self._pooling = pooling
        self._source = int(encoder_decoder)
        self._planned = False

    def plan(self) -> StepPlan | None:
        if self._planned:
            return None
        self._planned = True
        count = 1 + self._source
        new = NewRow(SLOT, (0,) * count, count, _GREEDY, (), count, self._pooling, source=self._source)
        row = Row(SLOT, 0, count, self._pooling is None, ((NULL_BLOCK,),) * self._groups)
        return StepPlan(0, (new,), (), (row,))

    def apply(self, result: StepResult) -> None:
        """Ignore the result."""


class Step(Protocol):
    def __call__(self, plan: StepPlan) -> StepResult:
        """Run one step and wait for it."""


@dataclass
class Counts:
    """Counters of golden prompts."""

    runs: int = 0
    yields: int = 0  # cancelled in favour of requests
    seconds: float = 0.0  # duration of the last one


@dataclass
class SelfTestRunner:
    """Schedules the golden prompts of one engine and judges their results. Times are the caller's, in seconds."""

    settings: SelfTest
    arithmetic: Arithmetic
    prompts: Sequence[Prompt]
    layout: Layout
    blocks: Sequence[int]  # reserved for golden prompts
    step_tokens: int
    references: dict[str, Golden] = field(default_factory=dict)  # first result of each prompt, reference for idle runs
    counts: Counts = field(default_factory=Counts)
    _turn: int = 0
    _last_s: float | None = None

    @property
    def locked(self) -> Recorded | None:
        """The reference outputs of the lock file, if they are comparable with this engine's."""
        found = self.settings.locked
        return None if found is None or self._band_of(found.arithmetic) is None else found

    @property
    def band(self) -> Band:
        """The band for two runs of this engine."""
        found = self._band_of(self.arithmetic)
        assert found is not None, "an engine is comparable with itself"
        return found

    def _band_of(self, other: Arithmetic) -> Band | None:
        return band_between(other, self.arithmetic, self.settings.tolerance)

    # At the start

    def start(self, step: Step, clock: Callable[[], float], progress: Callable[[float], None]) -> SelfTestResult:
        """Run the prompts until the budget is used up, but at least one. `progress` gets the fraction that is done
        before each step. Raises SelfTestFailed for a deviation from the lock file."""
        began = clock()
        differing: list[str] = []
        done, count = 0, len(self.prompts)
        for prompt in self.prompts:
            if done and clock() - began >= self.settings.budget:
                break
            golden = self._computed(prompt, step, clock, partial(progress, done / count))
            differing += self._first(golden)
            done += 1
        self._last_s = clock()
        against: Against = "itself" if self.locked is None else "lock"
        band = self.band if self.locked is None else self._band_of(self.locked.arithmetic)
        return SelfTestResult(done, round(clock() - began, 4), count - done, against, str(band), "; ".join(differing))

    def _computed(self, prompt: Prompt, step: Step, clock: Callable[[], float], progress: Callable[[], None]) -> Golden:
        run, began = self._run(prompt), clock()
        while (plan := run.plan()) is not None:
            progress()
            run.apply(step(plan))
        self._count(clock() - began)
        return run.golden

    def _first(self, golden: Golden) -> Iterator[str]:
        """Keep the first result of a prompt. Yield a deviation from the lock file that does not fail the start."""
        wrong = self.against_lock(golden)
        if wrong and self.settings.refuses:
            raise SelfTestFailed(wrong)
        self.references[golden.prompt.name] = golden
        if wrong:
            yield wrong

    def against_lock(self, golden: Golden) -> str:
        """Return the deviation from the lock file, or ""."""
        locked = self.locked
        expected = next((one for one in locked.goldens if one.prompt == golden.prompt), None) if locked else None
        if locked is None or expected is None:
            return ""
        band = self._band_of(locked.arithmetic)
        assert band is not None, "`locked` is None if it is not comparable"
        wrong = difference(expected, golden, band)
        return f"{wrong} with the lock ({band.why})" if wrong else ""

    # While idle

    def next(self, now_s: float, idle_since_s: float) -> "Run | None":
        """Return the next golden prompt, if it is due."""
        every = self.settings.every
        if not every or not self.prompts or now_s - idle_since_s < min(QUIET_S, every):
            return None
        if self._last_s is not None and now_s - self._last_s < every:
            return None
        return self._run(self.prompts[self._turn % len(self.prompts)])

    def count_yield(self) -> None:
        """Count a run that was cancelled for a request. The prompt is run again later."""
        self.counts.yields += 1

    def finish(self, run: "Run", took_s: float, now_s: float) -> None:
        """Compare a finished run with the first result. Raises Drift for a deviation."""
        self._turn += 1
        self._last_s = now_s
        self._count(took_s)
        golden = run.golden
        expected = self.references.get(golden.prompt.name)
        if expected is None:  # skipped at the start for lack of time
            wrong = self.against_lock(golden) if self.settings.refuses else ""
            self.references[golden.prompt.name] = golden
        else:
            wrong = difference(expected, golden, self.band)
            wrong = f"{wrong} with this engine's first result" if wrong else ""
        if wrong:
            raise Drift(wrong)

    def _run(self, prompt: Prompt) -> Run:
        return Run(prompt, self.layout, self.blocks, self.step_tokens)

    def _count(self, seconds: float) -> None:
        self.counts.runs += 1
        self.counts.seconds = seconds
