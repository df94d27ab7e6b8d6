"""Runner of scenarios: starts probes, injects the fault, holds it, rolls it back and checks the promises."""

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import httpx

from appliance.chaos.assertions import IDLE_GAUGES, Finding, Observations, check_promise
from appliance.chaos.fault_injector import FaultInjector, FaultNotInjected
from appliance.chaos.monitor import SAMPLE_INTERVAL_S, Metrics, ReadinessMonitor, metrics
from appliance.chaos.probes import Prober, ServiceUnhealthy
from appliance.chaos.rollback import Rollback
from appliance.chaos.scenario import Promise, Scenario
from appliance.chaos.target import CrashBundle, Target
from appliance.runtime.crash_exemption import send_exemption
from appliance.supervisor.supervise import EXEMPTIONS

BASELINE_S = 0.5  # time with probes only, before and after the fault
MIN_RESTART_S = 30.0  # minimum time allowed for a restart, even after a fast start
START_FACTOR = 3  # multiples of the last start time that a restart may take in addition
BUNDLE_TIMEOUT_S = 5.0
TIMEOUT_S = 60.0

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
    """Result of one scenario: `findings`, or the reason in `skipped` if the fault was not injected."""

    scenario: Scenario
    promise: Promise | None = None
    findings: tuple[Finding, ...] = ()
    skipped: str = ""
    left: bool = False

    @property
    def kept(self) -> bool:
        return all(finding.kept for finding in self.findings)


async def run(target: Target, scenario: Scenario, options: Options, earlier: Sequence[Scenario] = ()) -> Report:
    """Run one scenario.

    `earlier` are earlier scenarios, whose crashes are exempt. Raise ServiceUnhealthy if the service is not healthy.
    """
    headers = {"Authorization": f"Bearer {target.key}"} if target.key else {}
    limits = httpx.Limits(max_connections=None)
    # The service runs on this host and was found by its run directory, so its certificate need not be verified.
    client = httpx.AsyncClient(
        base_url=target.url, headers=headers, timeout=TIMEOUT_S, limits=limits, trust_env=False, verify=False
    )
    async with client:
        monitor = ReadinessMonitor(client)
        if not await monitor.sample():
            raise ServiceUnhealthy(f"/ready of {target.url} is not 200")
        target = replace(target, within_s=options.within_s or MIN_RESTART_S + START_FACTOR * monitor.start_s())
        skipped = scenario.unavailable(target) or _restart_limit_reached(target, scenario, earlier)
        if skipped:
            return Report(scenario, skipped=skipped)
        return await _ScenarioRun(target, scenario, options, client, monitor).run()


def _restart_limit_reached(target: Target, scenario: Scenario, earlier: Sequence[Scenario]) -> str:
    """Return a reason if recent crashes leave no restart, so that the fault would halt the appliance."""
    program, policy = scenario.promise(target).restarts, target.monitor_config.policy
    if not program:
        return ""
    own = sum(
        1 for each in earlier if _crashed_program(each.promise(target)) == _crashed_program(scenario.promise(target))
    )
    crashes = target.recent_crashes(_crashed_program(scenario.promise(target))) - own
    if crashes < policy.max:
        return ""
    limit = f"lifecycle.restart.max is {policy.max}"
    return f"{crashes} crashes within {policy.window_s:.0f} s; another one could end the appliance ({limit})"


def _crashed_program(promise: Promise) -> str:
    """Return the program whose exit Supervisor sees. A rank exits together with its engine."""
    return "engine-0" if promise.restarts == "ranks" else promise.restarts


class _ScenarioRun:
    def __init__(
        self, target: Target, scenario: Scenario, options: Options, client: httpx.AsyncClient, monitor: ReadinessMonitor
    ) -> None:
        self._target = target
        self._scenario = scenario
        self._promise = scenario.promise(target)
        self._options = options
        self._client = client
        client.timeout = httpx.Timeout(self._timeout_s)  # a reply waits for as long as its engine is gone
        self._monitor = monitor
        self._prober = Prober(
            client, options.clients, target.deterministic, bool(target.gateway.journal), timeout_s=self._timeout_s
        )

    @property
    def _timeout_s(self) -> float:
        return self._promise.within_s + self._options.duration_s + TIMEOUT_S

    async def run(self) -> Report:
        target, program = self._target, self._promise.restarts
        bundles, pid = target.bundles(), target.pid(program)
        await self._prober.start()
        self._monitor.start()
        rollback = Rollback()
        left: list[str] = []
        try:
            await asyncio.sleep(BASELINE_S)
            rng = random.Random(f"{self._options.seed}:{self._scenario.name}")
            injector = FaultInjector(target, self._client, rollback, rng, self._options.duration_s)
            before = await self._metrics()
            injected_s = time.monotonic()
            try:
                async with injector.exit_stack:
                    await self._scenario.inject(injector)
                    recovered_s = await (self._wait_for_restart(injected_s, pid) if program else self._hold(injected_s))
                    during = await self._metrics()
            finally:
                left = rollback.run()
            if not program:
                recovered_s = time.monotonic()
            await asyncio.sleep(BASELINE_S)
            if recovered_s is not None:
                await self._prober.wait_for_replies(recovered_s)
            await self._prober.stop()
            after = await self._wait_until_idle(before)
        except FaultNotInjected as error:
            return Report(self._scenario, skipped=str(error), left=bool(left))
        finally:
            await self._close(rollback)
        new = await self._new_bundles(bundles) if self._promise.causes else []
        observed = Observations(
            injected_s, recovered_s, self._prober.completed, self._monitor.samples, new, (pid, target.pid(program)),
            (before, during, after), injector.observations, left,
        )  # fmt: skip
        return Report(self._scenario, self._promise, tuple(check_promise(self._promise, observed)), left=bool(left))

    async def _close(self, rollback: Rollback) -> None:
        await self._monitor.stop()
        await self._prober.cancel()
        rollback.close()
        if self._promise.restarts:
            # The crash was injected, so the restart limit must not count it.
            send_exemption(str(self._target.directory / EXEMPTIONS), _crashed_program(self._promise), 1)

    async def _hold(self, injected_s: float) -> float:
        await asyncio.sleep(max(0.0, self._options.duration_s - (time.monotonic() - injected_s)))
        return time.monotonic()

    async def _wait_for_restart(self, injected_s: float, pid: int) -> float | None:
        """Return when a new process of the program serves, or None after twice the promised time."""
        deadline_s = injected_s + 2 * self._promise.within_s
        program = self._promise.restarts
        while time.monotonic() < deadline_s:
            if self._target.pid(program) not in (0, pid) and await self._monitor.sample():
                return time.monotonic()
            await asyncio.sleep(SAMPLE_INTERVAL_S)
        return None

    async def _metrics(self) -> Metrics | None:
        with contextlib.suppress(httpx.HTTPError, ValueError):
            return await metrics(self._client)
        return None

    async def _wait_until_idle(self, before: Metrics | None) -> Metrics | None:
        """Return the metrics when no request waits, or after a timeout."""
        return await _until(self._metrics, lambda now: _is_idle(now, before), TIMEOUT_S / 2)

    async def _new_bundles(self, before: list[CrashBundle]) -> list[CrashBundle]:
        known = set(before)
        mine = _crashed_program(self._promise)

        async def new() -> list[CrashBundle]:
            return [bundle for bundle in self._target.bundles() if bundle not in known and bundle.program == mine]

        return await _until(new, bool, BUNDLE_TIMEOUT_S)


def _is_idle(now: Metrics | None, before: Metrics | None) -> bool:
    return now is not None and all(now[name] <= (before or Metrics())[name] for name in IDLE_GAUGES)


async def _until(get: Callable[[], Awaitable[T]], accept: Callable[[T], object], timeout_s: float) -> T:
    deadline_s = time.monotonic() + timeout_s
    while not accept(found := await get()) and time.monotonic() < deadline_s:
        await asyncio.sleep(SAMPLE_INTERVAL_S)
    return found
