"""Checks of a run's observations against the promises of its scenario. No I/O."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from appliance.chaos.monitor import Metrics, ReadinessSample
from appliance.chaos.probes import Probe
from appliance.chaos.scenario import Promise
from appliance.chaos.target import CrashBundle

IDLE_GAUGES = (
    "slipway_requests_held",
    "slipway_requests_waiting",
)  # gauges that must return to their values before the fault
MAX_LISTED = 3


@dataclass(frozen=True)
class Observations:
    """Observations of one fault. Times are seconds of the monotonic clock."""

    injected_s: float  # when the fault was injected
    recovered_s: float | None  # when the service was ready again and the program had a new process; None if not in time
    probes: Sequence[Probe]
    samples: Sequence[ReadinessSample]
    bundles: Sequence[CrashBundle] = ()
    pids: tuple[int, int] = (0, 0)  # process IDs of that program, before and after
    # before the fault, at its end, and after recovery; None if the service did not answer
    metrics: tuple[Metrics | None, Metrics | None, Metrics | None] = (None, None, None)
    fault: dict[str, str] = field(default_factory=dict)
    remaining: Sequence[str] = ()  # parts of the fault that could not be rolled back


@dataclass(frozen=True)
class Finding:
    """Result of one check."""

    name: str
    kept: bool  # the promise was kept
    text: str  # description of the observation


def check_promise(promise: Promise, observed: Observations) -> list[Finding]:
    found = [_check_requests(promise, observed), _check_tokens(observed)]
    found += _check_restart(promise, observed) if promise.restarts else [_check_readiness(observed)]
    if promise.first_s:
        found.append(_check_reply_start(promise, observed))
    found += [
        _check_observation(name, wanted, observed.fault.get(name, "no observation"))
        for name, wanted in promise.observations.items()
    ]
    found += _check_metrics(promise, observed)
    found.append(
        Finding("rollback", not observed.remaining, "; ".join(observed.remaining) or "no part of the fault is left")
    )
    return [finding for finding in found if finding is not None]


def _check_requests(promise: Promise, observed: Observations) -> Finding:
    failed = [probe for probe in observed.probes if probe.error]
    excused = [probe for probe in failed if _is_excused(promise, probe)]
    unexcused = [probe for probe in failed if probe not in excused]
    text = f"{len(observed.probes)} requests, {len(unexcused)} failed"
    if excused:
        text += (
            f" ({len(excused)} {'refused' if promise.may_refuse else 'lost without an idempotency key'}, as promised)"
        )
    if unexcused:
        text += ": " + "; ".join(f"{probe.kind}: {probe.error}" for probe in unexcused[:MAX_LISTED])
    after = [
        probe for probe in observed.probes if observed.recovered_s is not None and probe.sent_s >= observed.recovered_s
    ]
    if observed.recovered_s is not None and not any(not probe.error for probe in after):
        return Finding("requests", False, f"{text}; no request succeeded after the fault")
    return Finding("requests", not unexcused, text)


def _is_excused(promise: Promise, probe: Probe) -> bool:
    if promise.may_refuse:
        return probe.status == 503 and probe.retry_after.isdigit() and int(probe.retry_after) >= 1
    return promise.may_lose_requests and probe.kind != "durable"


def _check_tokens(observed: Observations) -> Finding:
    compared = [probe for probe in observed.probes if probe.matches is not None]
    differing = [probe for probe in compared if not probe.matches]
    text = (
        f"{len(differing)} of {len(compared)} replies differ"
        if compared
        else "not compared: results depend on the batch"
    )
    return Finding("tokens", not differing, text)


def _check_restart(promise: Promise, observed: Observations) -> list[Finding]:
    if observed.recovered_s is None:
        text = f"not recovered {promise.within_s:.0f} s after the fault"
        found = [Finding("recovery time", False, text)]
    else:
        took_s = observed.recovered_s - observed.injected_s
        text = f"recovered {took_s:.1f} s after the fault; promised: at most {promise.within_s:.0f} s"
        found = [Finding("recovery time", took_s <= promise.within_s, text)]
    before, after = observed.pids
    another = after not in (0, before)
    found.append(
        Finding(
            "restarted", another, f"{promise.restarts}: process {before} before the fault, {after or 'none'} after it"
        )
    )
    if promise.causes:
        found.append(_check_cause(promise, observed))
    return found


def _check_cause(promise: Promise, observed: Observations) -> Finding:
    wanted = " or ".join(promise.causes)
    if not observed.bundles:
        return Finding("cause", False, f"no crash bundle; promised cause: {wanted}")
    causes = ", ".join(f"{bundle.cause} ({bundle.how})" for bundle in observed.bundles)
    kept = all(
        bundle.cause in promise.causes and (not promise.exit_details or bundle.how in promise.exit_details)
        for bundle in observed.bundles
    )
    return Finding(
        "cause", kept and len(observed.bundles) == 1, f"crash bundle: {causes}; promised: one with cause {wanted}"
    )


def _check_readiness(observed: Observations) -> Finding:
    samples = [sample for sample in observed.samples if sample.at_s >= observed.injected_s]
    gone = [sample for sample in samples if not sample.ready]
    text = f"/ready was 200 in {len(samples) - len(gone)} of {len(samples)} checks"
    return Finding("readiness", bool(samples) and not gone, text)


def _check_reply_start(promise: Promise, observed: Observations) -> Finding:
    """Check how soon replies begin. Only streams count: another reply begins when it is complete."""
    longest_s = max((probe.first_response_s for probe in observed.probes if probe.kind != "complete"), default=0.0)
    text = f"after at most {longest_s:.1f} s; promised: {promise.first_s:g} s"
    return Finding("reply start", longest_s <= promise.first_s, text)


def _check_observation(name: str, wanted: str, was: str) -> Finding:
    return Finding(name, was == wanted, was if was == wanted else f"{was}; promised: {wanted}")


def _check_metrics(promise: Promise, observed: Observations) -> list[Finding]:
    before, during, after = observed.metrics
    if after is None:
        return [Finding("metrics", False, "the service returned no metrics after the fault")]
    found = []
    for name in promise.increasing:
        increase = (during or after)[name] - (before or Metrics())[name]
        found.append(Finding(name, increase > 0, f"increased by {increase:g} during the fault"))
    for name in promise.constant:
        increase = after[name] - (before or Metrics())[name]
        found.append(Finding(name, increase == 0, f"increased by {increase:g}"))
    stuck = [name for name in IDLE_GAUGES if after[name] > (before or Metrics())[name]]
    text = ", ".join(f"{name} is {after[name]:g}" for name in stuck) or "no more waiting requests than before the fault"
    found.append(Finding("stuck requests", not stuck, text))
    return found
