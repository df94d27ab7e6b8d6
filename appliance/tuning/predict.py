"""Prediction of a plan's figures: the scheduler of the plan serves the workload on a computed clock.

Step times are fitted to the manifest's own run (engine/core/whatif/times.py) and multiplied by the ratio of the
rooflines of the two plans. Without a run they are the roofline. The gateway and other parts outside of the simulation
are covered by a correction: the ratio of measured to simulated latencies of the manifest.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from appliance.bench.client import Outcome
from appliance.bench.run import Loop, Measured
from appliance.bench.summary import summarize
from appliance.bench.workload import Session
from appliance.planning.plan import Plan
from appliance.planning.roofline import Roofline
from appliance.tuning.sessions import Encode, SessionRequests
from engine.api.config import SpeculationConfig
from engine.api.errors import ConfigError
from engine.core.config import SchedulerConfig
from engine.core.loop import scheduler_config
from engine.core.records import read_records
from engine.core.replay import recorded_faults
from engine.core.whatif.quality import without_pauses
from engine.core.whatif.simulate import simulate_requests
from engine.core.whatif.times import StepTimes, fit
from engine.core.whatif.traffic import Size, read_traffic
from engine.kv.layout import layout, page_sizes
from engine.kv.states import num_snapshots, state_layout
from engine.models.checkpoint import read_checkpoint
from engine.models.parts import Model

Mean = Callable[[Size], float]
"""Mean time of a step in seconds, by its size."""


@dataclass(frozen=True)
class Correction:
    """Ratios of measured to simulated latencies of the manifest."""

    first: float = 1.0
    """Time to the first token."""
    rest: float = 1.0
    """Time from the first token to the last one."""


@cache
def _model(path: str, trusted: bool, task: Any) -> Model:
    return read_checkpoint(Path(path), trusted, task=task).model


def model_of(plan: Plan) -> Model:
    """Return the declaration of the plan's model."""
    config = plan.engines[0].model
    return _model(config.path, config.trust_remote_code, config.task)


def scheduler_of(plan: Plan) -> SchedulerConfig:
    """Return the configuration of each scheduler, without drafts, because their acceptance is unknown."""
    config, model = plan.engines[0], model_of(plan)
    kind, ranks = config.quantization.kv_cache, config.parallelism.tensor
    pages = layout(
        model,
        block_tokens=config.cache.block_tokens,
        **page_sizes(kind),
        ranks=ranks,
    )
    snapshots = num_snapshots(state_layout(model, ranks), config.scheduling.slots, prefix_cache=config.cache.prefix)
    made = scheduler_config(config, model, layout=pages, blocks=plan.memory.blocks, snapshots=snapshots)
    return replace(made, speculation=SpeculationConfig())


def ceiling(roofline: Roofline) -> Mean:
    """Return the roofline as times of steps: linear between the planned batch sizes, plus the tokens of prompts."""
    points = sorted((one.rows, one.rows / one.tokens_s) for one in roofline.decode)

    def mean(size: Size) -> float:
        prompt_s = max(0, size.tokens - size.drawn) / roofline.prefill.tokens_s
        return _between(points, size.drawn) + prompt_s if size.drawn else prompt_s

    return mean


def _between(points: Sequence[tuple[int, float]], rows: int) -> float:
    """Interpolate linearly between the points; beyond the last one, in proportion to it."""
    (low, low_s), *others = points
    if rows <= low:
        return low_s
    for high, high_s in others:
        if rows <= high:
            return low_s + (high_s - low_s) * (rows - low) / (high - low)
        low, low_s = high, high_s
    return low_s * rows / low


def fitted(recording: Path) -> StepTimes | None:
    """Return the times of the steps in a recording without their variation, or None without a complete request."""
    try:
        with recorded_faults():
            traffic = read_traffic(read_records(recording))
            return replace(fit(without_pauses(traffic.steps)), ratios=())
    except (OSError, ConfigError):
        return None


def step_times(plan: Plan, base: Plan, times: StepTimes | None) -> Mean | None:
    """Return the mean times of the plan's steps, or None without recorded times and without a roofline."""
    own, first = plan.estimate.roofline, base.estimate.roofline
    if times is None:
        return None if own is None else ceiling(own)
    if own is None or first is None or own == first:
        return times.mean
    mine, theirs = ceiling(own), ceiling(first)
    return lambda size: times.mean(size) * mine(size) / max(theirs(size), 1e-12)


@dataclass(frozen=True)
class Predictor:
    """Predicts the figures of plans for one workload."""

    sessions: Sequence[Session]
    loop: Loop
    seed: int
    encode: Encode
    objectives: Mapping[str, float]
    base: Plan
    times: StepTimes | None = None
    correction: Correction = Correction()

    def outcomes(self, plan: Plan) -> tuple[list[Outcome], float] | None:
        """Return the simulated outcomes and the duration, or None without step times."""
        mean = step_times(plan, self.base, self.times)
        if mean is None:
            return None
        config, engines = scheduler_of(plan), len(plan.engines)
        depth = 2 if plan.engines[0].scheduling.overlap else 1
        found = list[Outcome]()
        for number in range(engines):
            share, loop = self.sessions[number::engines], _share(self.loop, number, engines)
            if not share or (loop.arrivals is None and not loop.concurrency):
                continue
            requests = SessionRequests(share, loop, self.encode, vocab=config.vocab_size, seed=self.seed)
            found += requests.outcomes(simulate_requests(requests, config, _ignoring_time(mean), depth=depth).replies)
        ends = [outcome.sent_s + outcome.last_s for outcome in found]
        return found, max(ends, default=0.0)

    def figures(self, plan: Plan) -> dict[str, Any] | None:
        """Return the predicted figures in the form of `slipway bench`, or None without step times."""
        made = self.outcomes(plan)
        if made is None:
            return None
        outcomes, seconds = made
        stretched = [_corrected(outcome, self.correction) for outcome in outcomes]
        before, after = (sum(each.last_s for each in ones) for ones in (outcomes, stretched))
        if self.loop.arrivals is None and before:  # a closed loop takes as long as its requests
            seconds *= after / before
        return summarize(Measured(stretched, seconds), self.objectives)


def _ignoring_time(mean: Mean) -> Callable[[Size, float], float]:
    return lambda size, at: mean(size)


def _share(loop: Loop, number: int, engines: int) -> Loop:
    """Return the load of one of several engines: its share of the clients, or of the rate."""
    if loop.arrivals is None:
        return Loop(loop.concurrency // engines + (number < loop.concurrency % engines))
    arrivals = loop.arrivals
    slower = replace(arrivals, rate=arrivals.rate / engines, last_rate=arrivals.last_rate / engines)
    return Loop(-(-loop.concurrency // engines) if loop.concurrency else 0, slower)


def _corrected(outcome: Outcome, correction: Correction) -> Outcome:
    first = outcome.first_s * correction.first
    return replace(
        outcome,
        first_s=first,
        last_s=first + (outcome.last_s - outcome.first_s) * correction.rest,
        gaps_s=[gap * correction.rest for gap in outcome.gaps_s],
    )


def correction(measured: Mapping[str, Any], simulated: Sequence[Outcome]) -> Correction:
    """Return the correction that makes the simulated medians of the manifest equal to its measured ones."""
    figures = summarize(Measured(list(simulated), 1.0), {})
    return Correction(
        *(
            _ratio(measured[name].get("p50"), figures[name].get("p50"))
            for name in ("time_to_first_token_ms", "time_per_output_token_ms")
        )
    )


def _ratio(measured: float | None, simulated: float | None) -> float:
    return measured / simulated if measured and simulated else 1.0
