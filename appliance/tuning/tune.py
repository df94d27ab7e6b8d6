"""The search: a run of the manifest, simulations of candidates, runs of the best ones, and the choice."""

import asyncio
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from appliance.bench.benchmark import Options as BenchOptions
from appliance.bench.benchmark import bench
from appliance.bench.run import EndpointError
from appliance.bench.workload import Session, make_workload, words
from appliance.config.problems import Refused
from appliance.config.settings import Given, Option
from appliance.hardware.machine import Machine
from appliance.planning.plan import Plan
from appliance.planning.validate import validate
from appliance.tuning.objective import Figures, Objective, Score, service_memory
from appliance.tuning.predict import Predictor, correction, fitted, model_of
from appliance.tuning.results import Results
from appliance.tuning.service import ServiceError, running
from appliance.tuning.sessions import Encode
from appliance.tuning.space import (
    DRAFT_TOKENS,
    METHOD,
    SIMULATED,
    Axis,
    Point,
    Search,
    Settings,
    resolved,
    settings,
    with_value,
)
from engine.core.whatif.times import StepTimes
from engine.text import Tokenizer

SIMULATION_SHARE = 0.4
"""Share of the time budget after which no further candidate is simulated."""
_SAMPLE_TOKENS = 1000
BASE: Settings = ()

Report = Callable[[str], None]


class TuneError(Exception):
    """Raised if the manifest itself cannot be measured, or its model does not generate text."""


@dataclass(frozen=True)
class Options:
    """Options of a search."""

    given: Given
    machine: Machine | None
    """A described machine, for which nothing can be run."""
    objective: Objective
    bench: BenchOptions
    """Workload and load. Its URL is replaced by the service's."""
    candidates: int
    """Maximum number of candidates that are simulated."""
    finalists: int
    """Number of candidates that are run; 0: none, and not the manifest either."""
    budget_s: float


@dataclass
class Candidate:
    """One combination of settings."""

    settings: Settings
    plan: Plan
    memory: int
    predicted: Figures | None
    measured: list[Figures] = field(default_factory=list)
    """One for each round."""
    error: str = ""
    """Reason why it could not be measured."""

    @property
    def figures(self) -> Figures | None:
        """The measured figures of the median round, else the predicted ones."""
        if not self.measured:
            return None if self.error else self.predicted
        ordered = sorted(self.measured, key=lambda one: float(one["output_tokens_per_second"]))
        return ordered[len(ordered) // 2]


@dataclass(frozen=True)
class Found:
    """Result of a search."""

    base: Candidate
    candidates: tuple[Candidate, ...]
    """All legal candidates, the best first."""
    refused: Mapping[Settings, str]
    """Reasons of illegal combinations."""
    best: Candidate | None
    """The best candidate that keeps the limits, or None."""
    skipped: int
    """Number of combinations that were neither simulated nor refused."""
    out_of_time: bool


def tokenizer_of(plan: Plan) -> Encode:
    """Return the function that encodes texts as the model's service does."""
    return Tokenizer(plan.engines[0].model.path).encode


def workload(options: BenchOptions, encode: Encode) -> list[Session]:
    """Return the sessions of `slipway bench` with this tokenizer. Raises WorkloadError."""
    import random

    sample = words(random.Random(0), _SAMPLE_TOKENS)
    per_word = len(encode(sample)) / len(sample.split())
    return make_workload(options.dataset, replace(options.workload, tokens_per_word=per_word))


def check_model(plan: Plan) -> None:
    """Raises TuneError for a model whose requests the simulation does not know."""
    model = model_of(plan)
    if model.pooler is not None or model.encoder is not None:
        raise TuneError("this model does not continue a prompt; tune searches settings of models that generate text")


@dataclass
class Tuner:
    """One search."""

    options: Options
    axes: tuple[Axis, ...]
    base: Plan
    sessions: Sequence[Session]
    encode: Encode
    results: Results
    report: Report
    drafts: tuple[Axis, ...] = ()
    """Settings of speculative decoding, which only runs can judge: the acceptance of drafts is unknown before."""
    began_s: float = field(default_factory=time.monotonic)
    plans: dict[Settings, Plan] = field(default_factory=dict)
    refused: dict[Settings, str] = field(default_factory=dict)
    longest_run_s: float = 0.0
    out_of_time: bool = False

    def run(self) -> Found:
        """Search. Raises TuneError if the manifest cannot be measured."""
        self.plans[BASE] = self.base
        predictor = Predictor(
            self.sessions,
            self.options.bench.loop,
            self.options.bench.workload.seed,
            self.encode,
            self.options.bench.objectives,
            self.base,
        )
        base = Candidate(BASE, self.base, service_memory(self.base), None)
        if self.options.finalists:
            self._run_base(base)
            times = self._step_times()
            predictor = replace(predictor, times=times)
            if (simulated := predictor.outcomes(self.base)) is not None and times is not None:
                predictor = replace(predictor, correction=correction(base.measured[0], simulated[0]))
        candidates = self._simulate(predictor)
        candidates[BASE].measured = base.measured
        self._measure_best(candidates)
        for axis in self.drafts if self.options.finalists else ():
            self._measure_drafts(axis, candidates)
        return self._found(candidates)

    def _run_base(self, base: Candidate) -> None:
        self.report("running the manifest")
        self._measure(base, 0, record=self.results.get("steps", BASE) is None)
        if base.error:
            raise TuneError(f"the manifest could not be measured: {base.error}")

    def _step_times(self) -> StepTimes | None:
        stored = self.results.get("steps", BASE)
        if stored is None:
            return None
        scales = {tuple(kind): value for kind, value in stored["scales"]}
        return StepTimes(tuple(stored["coefficients"]), scales)

    def _simulate(self, predictor: Predictor) -> dict[Settings, Candidate]:
        found: dict[Settings, Candidate] = {}

        def evaluate(point: Point) -> Score | None:
            chosen = settings(self.axes, point)
            if chosen and self._elapsed_s() > SIMULATION_SHARE * self.options.budget_s:
                self.out_of_time = True
                raise StopIteration
            self.report(f"simulating candidate {len(found) + 1}")
            candidate = self._predicted(chosen, predictor)
            if candidate is None:
                return None
            found[chosen] = candidate
            return () if candidate.predicted is None else self.options.objective.score(candidate.predicted)

        Search(self.axes, self.options.candidates, self.options.bench.workload.seed).run(evaluate)
        return found

    def _predicted(self, chosen: Settings, predictor: Predictor) -> Candidate | None:
        """Return the candidate with its prediction, None if its manifest is refused."""
        if (reason := self.results.get("refused", chosen)) is not None:
            self.refused[chosen] = reason
            return None
        plan = self._plan(chosen)
        if plan is None:
            self.results.put("refused", chosen, self.refused[chosen])
            return None
        figures = self.results.get("predicted", chosen)
        if figures is None and (figures := predictor.figures(plan)) is not None:
            self.results.put("predicted", chosen, figures := {**figures, "memory": service_memory(plan)})
        return Candidate(chosen, plan, service_memory(plan), figures)

    def _plan(self, chosen: Settings) -> Plan | None:
        if chosen not in self.plans:
            given = self.options.given
            more = tuple(Option(f"--key {key}", key, text) for key, text in chosen)
            try:
                self.plans[chosen] = validate(replace(given, options=(*given.options, *more)), self.base.machine)
            except Refused as refused:
                self.refused[chosen] = f"{refused.problems[0].key}: {refused.problems[0].message}"
                return None
        return self.plans[chosen]

    def _measure_best(self, candidates: Mapping[Settings, Candidate]) -> None:
        """Run the best candidates; in each round also the manifest, first in every second round."""
        finalists = self._finalists(self._ranked(candidates.values()))
        for number in range(self.options.bench.rounds if finalists else 0):
            chosen = [candidates[BASE], *finalists] if number else finalists
            for candidate in chosen if number % 2 == 0 else chosen[::-1]:
                if candidate.error:
                    continue
                if self._elapsed_s() + self.longest_run_s > self.options.budget_s:
                    self.out_of_time = True
                    return
                self.report(f"running {spelled(candidate.settings)}, round {number + 1}")
                self._measure(candidate, number)

    def _measure_drafts(self, axis: Axis, candidates: dict[Settings, Candidate]) -> None:
        """Run the best candidate with the other values of a setting of drafts. Tokens are tried if there are drafts."""
        best = next(one for one in self._ranked(candidates.values()) if one.measured)
        given = dict(best.settings)
        if axis.key == DRAFT_TOKENS and given.get(METHOD, resolved(self.base)[METHOD]) == "off":
            return
        for value in axis.values:
            chosen = with_value(best.settings, axis, value)
            if chosen in candidates or chosen in self.refused or (plan := self._plan(chosen)) is None:
                continue
            if resolved(plan)[METHOD] == resolved(best.plan)[METHOD] == "off":
                continue
            candidate = Candidate(chosen, plan, service_memory(plan), None)
            for number in range(self.options.bench.rounds):
                if candidate.error:
                    break
                if self._elapsed_s() + self.longest_run_s > self.options.budget_s:
                    self.out_of_time = True
                    return
                candidates[chosen] = candidate
                self.report(f"running {spelled(chosen)}, round {number + 1}")
                self._measure(candidate, number)

    def _finalists(self, ranked: Sequence[Candidate]) -> list[Candidate]:
        """Return the best candidates, each with another prediction: settings without an effect make no difference.
        Values of keys that the simulation may not know, such as speculation.method, are always different candidates."""
        chosen, known = list[Candidate](), list[tuple[Settings, Figures]]()
        for one in ranked:
            if one.settings == BASE or len(chosen) == self.options.finalists:
                continue
            if one.predicted is not None:
                others = tuple(pair for pair in one.settings if pair[0] not in SIMULATED)
                made = others, _without_memory(one.predicted)
                if made in known:
                    continue
                known.append(made)
            chosen.append(one)
        return chosen

    def _measure(self, candidate: Candidate, number: int, *, record: bool = False) -> None:
        stored = None if record else self.results.get("measured", candidate.settings, number)
        if stored is None:
            began_s = time.monotonic()
            try:
                stored = self._bench(candidate, number, record)
            except (ServiceError, EndpointError) as error:
                candidate.error = str(error)
                return
            self.longest_run_s = max(self.longest_run_s, time.monotonic() - began_s)
            self.results.put("measured", candidate.settings, stored, number)
        candidate.measured.append(stored)

    def _bench(self, candidate: Candidate, number: int, record: bool) -> dict[str, Any]:
        options = self.options.bench
        shifted = replace(options.workload, seed=options.workload.seed + number)
        with tempfile.TemporaryDirectory(prefix="slipway-tune-") as folder:
            recording = Path(folder) / "steps.rec"
            more = [f"{key}={value}" for key, value in candidate.settings]
            if record:
                more.append(f"engine.record={recording}")
            within_s = self.base.manifest.health.startup_budget
            with running(self.options.given, more, within_s=within_s, log=Path(folder) / "log") as url:
                result = asyncio.run(
                    bench(replace(options, urls=(url,), rounds=1, workload=shifted), lambda line: None)
                )
            if record:
                self._keep_steps(recording, len(candidate.plan.engines))
        return {**result.values["endpoints"][0]["summary"], "memory": candidate.memory}

    def _keep_steps(self, recording: Path, engines: int) -> None:
        own = recording if engines == 1 else recording.with_name(f"{recording.stem}-0{recording.suffix}")
        if (times := fitted(own)) is not None:
            scales = [[list(kind), scale] for kind, scale in times.scales.items()]
            self.results.put("steps", BASE, {"coefficients": list(times.coefficients), "scales": scales})

    def _elapsed_s(self) -> float:
        return time.monotonic() - self.began_s

    def _ranked(self, candidates: Any) -> list[Candidate]:
        """Return the candidates, the best first: measured ones precede predicted ones and those without figures."""

        def key(one: Candidate) -> tuple[bool, Score, Settings]:
            figures = one.figures
            score = () if figures is None else self.options.objective.score(figures)
            # With equal scores, fewer settings are better.
            return bool(one.measured), (*score, -len(one.settings)), one.settings

        return sorted(candidates, key=key, reverse=True)

    def _found(self, candidates: Mapping[Settings, Candidate]) -> Found:
        ranked = self._ranked(candidates.values())
        judged = [one for one in ranked if one.measured] if self.options.finalists else ranked
        good = [one for one in judged if one.figures is not None and self.options.objective.meets(one.figures)]
        total = 1
        for axis in self.axes:
            total *= len(axis.values)
        return Found(
            candidates[BASE],
            tuple(ranked),
            self.refused,
            good[0] if good else None,
            max(0, total - self._combinations(candidates)),
            self.out_of_time,
        )

    def _combinations(self, candidates: Mapping[Settings, Candidate]) -> int:
        """Return the number of tried combinations of the axes."""
        keys = {axis.key for axis in self.axes}
        return sum(keys >= {key for key, _ in chosen} for chosen in (*candidates, *self.refused))


def _without_memory(figures: Figures) -> Figures:
    return {name: value for name, value in figures.items() if name != "memory"}


def spelled(chosen: Settings) -> str:
    """Return the settings as text."""
    return " ".join(f"{key}={value}" for key, value in chosen) or "the manifest"


def about(options: Options, base: Plan, axes: Sequence[Axis]) -> dict[str, Any]:
    """Return what results depend on, as JSON values."""
    bench_options = options.bench
    return {
        "manifest": base.sha256,
        "checkpoint": base.origin,
        "machine": {**msgspec.to_builtins(base.machine), "memory_free": None, "gpus": len(base.machine.gpus)},
        "workload": [bench_options.dataset, repr(bench_options.workload), bench_options.api, bench_options.warmup],
        "load": repr(bench_options.loop),
        "body": dict(bench_options.extra),
        "limits": dict(bench_options.objectives),
        "runs": options.finalists > 0,
        "axes": [[axis.key, axis.base] for axis in axes],
    }
