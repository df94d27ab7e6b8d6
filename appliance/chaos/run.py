"""Runner of scenarios: starts probes, makes the fault, holds it, rolls it back and checks the promises."""

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import httpx

from appliance.chaos.assertions import IDLE, Finding, Seen, judge
from appliance.chaos.fault_injector import NotMade, Stage
from appliance.chaos.monitor import LOOK_S, Metrics, Watch, metrics
from appliance.chaos.probes import Prober, Unwell
from appliance.chaos.rollback import Undo
from appliance.chaos.scenario import Promise, Scenario
from appliance.chaos.target import Bundle, Target
from appliance.runtime.crash_exemption import send_pardon
from appliance.supervisor.supervise import PARDONS

QUIET_S = 0.5  # time with probes only, before and after the fault
LEAST_S = 30.0  # minimum time allowed for a restart, even after a fast start
STARTS = 3  # multiples of the last start time that a restart may take in addition
BUNDLE_S = 5.0
PATIENCE_S = 60.0

T = TypeVar("T")


@dataclass(frozen=True)
class Options:
    """Options of a run."""

    duration_s: float = 5.0  # how long faults without a restart are held
    clients: int = 2  # number of probe clients of each kind
    seed: int = 0
    within_s: float = 0.0  # time allowed for a start; 0: derived from the last one


@dataclass(frozen=True)
class Report:
    """Result of one scenario: `findings`, or the reason in `skipped` if the fault was not made."""

    scenario: Scenario
    promise: Promise | None = None
    findings: tuple[Finding, ...] = ()
    skipped: str = ""
    left: bool = False

    @property
    def kept(self) -> bool:
        return all(finding.kept for finding in self.findings)


async def run(target: Target, scenario: Scenario, options: Options, made: Sequence[Scenario] = ()) -> Report:
    """Run one scenario.

    `made` are earlier scenarios, whose crashes are exempt. Raise Unwell if the service is not healthy before the fault.
    """
    headers = {"Authorization": f"Bearer {target.key}"} if target.key else {}
    limits = httpx.Limits(max_connections=None)
    # The service runs on this host and was found by its run directory, so its certificate need not be verified.
    client = httpx.AsyncClient(
        base_url=target.url, headers=headers, timeout=PATIENCE_S, limits=limits, trust_env=False, verify=False
    )
    async with client:
        watch = Watch(client)
        if not await watch.look():
            raise Unwell(f"/ready of {target.url} is not 200")
        target = replace(target, within_s=options.within_s or LEAST_S + STARTS * watch.start_s())
        skipped = scenario.lacks(target) or _no_restart_left(target, scenario, made)
        if skipped:
            return Report(scenario, skipped=skipped)
        return await _Run(target, scenario, options, client, watch).run()


def _no_restart_left(target: Target, scenario: Scenario, made: Sequence[Scenario]) -> str:
    """Return a reason if recent crashes leave no restart, so that the fault would halt the appliance."""
    program, policy = scenario.promise(target).restarts, target.watch.policy
    if not program:
        return ""
    own = sum(1 for each in made if _victim(each.promise(target)) == _victim(scenario.promise(target)))
    deaths = target.recent_deaths(_victim(scenario.promise(target))) - own
    if deaths < policy.max:
        return ""
    return f"{deaths} deaths within {policy.window_s:.0f} s; one more could end it (lifecycle.restart.max {policy.max})"


def _victim(promise: Promise) -> str:
    """Return the program whose exit Supervisor sees. A rank exits together with its engine."""
    return "engine-0" if promise.restarts == "ranks" else promise.restarts


class _Run:
    def __init__(
        self, target: Target, scenario: Scenario, options: Options, client: httpx.AsyncClient, watch: Watch
    ) -> None:
        self._target = target
        self._scenario = scenario
        self._promise = scenario.promise(target)
        self._options = options
        self._client = client
        client.timeout = httpx.Timeout(self._patience_s)  # a reply waits for as long as its engine is gone
        self._watch = watch
        self._prober = Prober(
            client, options.clients, target.exact, bool(target.gateway.journal), patience_s=self._patience_s
        )

    @property
    def _patience_s(self) -> float:
        return self._promise.within_s + self._options.duration_s + PATIENCE_S

    async def run(self) -> Report:
        target, program = self._target, self._promise.restarts
        bundles, pid = target.bundles(), target.pid(program)
        await self._prober.start()
        self._watch.start()
        undo = Undo()
        left: list[str] = []
        try:
            await asyncio.sleep(QUIET_S)
            rng = random.Random(f"{self._options.seed}:{self._scenario.name}")
            stage = Stage(target, self._client, undo, rng, self._options.duration_s)
            before = await self._metrics()
            made_s = time.monotonic()
            try:
                async with stage.opened:
                    await self._scenario.make(stage)
                    whole_s = await (self._back(made_s, pid) if program else self._hold(made_s))
                    during = await self._metrics()
            finally:
                left = undo.all()
            if not program:
                whole_s = time.monotonic()
            await asyncio.sleep(QUIET_S)
            if whole_s is not None:
                await self._prober.answered(whole_s)
            await self._prober.stop()
            after = await self._settled(before)
        except NotMade as error:
            return Report(self._scenario, skipped=str(error), left=bool(left))
        finally:
            await self._end(undo)
        new = await self._new_bundles(bundles) if self._promise.causes else []
        seen = Seen(
            made_s, whole_s, self._prober.done, self._watch.looks, new, (pid, target.pid(program)),
            (before, during, after), stage.seen, left,
        )  # fmt: skip
        return Report(self._scenario, self._promise, tuple(judge(self._promise, seen)), left=bool(left))

    async def _end(self, undo: Undo) -> None:
        await self._watch.stop()
        await self._prober.cancel()
        undo.close()
        if self._promise.restarts:
            # The crash was injected, so the restart limit must not count it.
            send_pardon(str(self._target.directory / PARDONS), _victim(self._promise), 1)

    async def _hold(self, made_s: float) -> float:
        await asyncio.sleep(max(0.0, self._options.duration_s - (time.monotonic() - made_s)))
        return time.monotonic()

    async def _back(self, made_s: float, pid: int) -> float | None:
        """Return when a new process of the program serves, or None after twice the promised time."""
        deadline_s = made_s + 2 * self._promise.within_s
        program = self._promise.restarts
        while time.monotonic() < deadline_s:
            if self._target.pid(program) not in (0, pid) and await self._watch.look():
                return time.monotonic()
            await asyncio.sleep(LOOK_S)
        return None

    async def _metrics(self) -> Metrics | None:
        with contextlib.suppress(httpx.HTTPError, ValueError):
            return await metrics(self._client)
        return None

    async def _settled(self, before: Metrics | None) -> Metrics | None:
        """Return the metrics when no request waits, or after a timeout."""
        return await _until(self._metrics, lambda now: _is_idle(now, before), PATIENCE_S / 2)

    async def _new_bundles(self, before: list[Bundle]) -> list[Bundle]:
        known = set(before)
        mine = _victim(self._promise)

        async def new() -> list[Bundle]:
            return [bundle for bundle in self._target.bundles() if bundle not in known and bundle.program == mine]

        return await _until(new, bool, BUNDLE_S)


def _is_idle(now: Metrics | None, before: Metrics | None) -> bool:
    return now is not None and all(now[name] <= (before or Metrics())[name] for name in IDLE)


async def _until(ask: Callable[[], Awaitable[T]], good: Callable[[T], object], patience_s: float) -> T:
    deadline_s = time.monotonic() + patience_s
    while not good(found := await ask()) and time.monotonic() < deadline_s:
        await asyncio.sleep(LOOK_S)
    return found
