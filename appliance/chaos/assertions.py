"""Checks of a run's observations against the promises of its scenario. No I/O."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from appliance.chaos.monitor import Look, Metrics
from appliance.chaos.probes import Probe
from appliance.chaos.scenario import Promise
from appliance.chaos.target import Bundle

IDLE = ("slipway_requests_held", "slipway_requests_waiting")  # gauges that must return to their values before the fault
FEW = 3


@dataclass(frozen=True)
class Seen:
    """Observations of one fault. Times are seconds of the monotonic clock."""

    made_s: float  # when the fault was made
    whole_s: float | None  # when the service was ready again and the program had a new process; None if not in time
    probes: Sequence[Probe]
    looks: Sequence[Look]
    bundles: Sequence[Bundle] = ()
    pids: tuple[int, int] = (0, 0)  # process IDs of that program, before and after
    # before the fault, at its end, and after recovery; None if the service did not answer
    metrics: tuple[Metrics | None, Metrics | None, Metrics | None] = (None, None, None)
    said: dict[str, str] = field(default_factory=dict)
    left: Sequence[str] = ()  # parts of the fault that could not be rolled back


@dataclass(frozen=True)
class Finding:
    """Result of one check."""

    name: str
    kept: bool  # the promise was kept
    text: str  # description of the observation


def judge(promise: Promise, seen: Seen) -> list[Finding]:
    found = [_answered(promise, seen), _same(seen)]
    found += _restarted(promise, seen) if promise.restarts else [_stayed_ready(seen)]
    if promise.first_s:
        found.append(_begun(promise, seen))
    found += [_told(name, wanted, seen.said.get(name, "nothing was seen")) for name, wanted in promise.says.items()]
    found += _counted(promise, seen)
    found.append(Finding("taken back", not seen.left, "; ".join(seen.left) or "nothing of the fault is left"))
    return [finding for finding in found if finding is not None]


def _answered(promise: Promise, seen: Seen) -> Finding:
    failed = [probe for probe in seen.probes if probe.error]
    excused = [probe for probe in failed if _excused(promise, probe)]
    lost = [probe for probe in failed if probe not in excused]
    text = f"{len(seen.probes)} requests, {len(lost)} failed"
    if excused:
        text += f" ({len(excused)} {'refused' if promise.refusals else 'lost, without a key'}, as promised)"
    if lost:
        text += ": " + "; ".join(f"{probe.kind}: {probe.error}" for probe in lost[:FEW])
    after = [probe for probe in seen.probes if seen.whole_s is not None and probe.sent_s >= seen.whole_s]
    if seen.whole_s is not None and not any(not probe.error for probe in after):
        return Finding("requests", False, f"{text}; none was answered after the fault")
    return Finding("requests", not lost, text)


def _excused(promise: Promise, probe: Probe) -> bool:
    if promise.refusals:
        return probe.status == 503 and probe.retry_after.isdigit() and int(probe.retry_after) >= 1
    return promise.lost and probe.kind != "durable"


def _same(seen: Seen) -> Finding:
    compared = [probe for probe in seen.probes if probe.same is not None]
    differing = [probe for probe in compared if not probe.same]
    text = f"{len(differing)} of {len(compared)} replies differ" if compared else "not compared: sums depend on batches"
    return Finding("tokens", not differing, text)


def _restarted(promise: Promise, seen: Seen) -> list[Finding]:
    if seen.whole_s is None:
        text = f"not whole {promise.within_s:.0f} s after the fault"
        found = [Finding("back in time", False, text)]
    else:
        took_s = seen.whole_s - seen.made_s
        text = f"whole {took_s:.1f} s after the fault; at most {promise.within_s:.0f} s are promised"
        found = [Finding("back in time", took_s <= promise.within_s, text)]
    before, after = seen.pids
    another = after not in (0, before)
    found.append(Finding("restarted", another, f"{promise.restarts}: process {before}, now {after or 'none'}"))
    if promise.causes:
        found.append(_caused(promise, seen))
    return found


def _caused(promise: Promise, seen: Seen) -> Finding:
    wanted = " or ".join(promise.causes)
    if not seen.bundles:
        return Finding("cause", False, f"no crash bundle; {wanted} is promised")
    told = ", ".join(f"{bundle.cause} ({bundle.how})" for bundle in seen.bundles)
    kept = all(
        bundle.cause in promise.causes and (not promise.hows or bundle.how in promise.hows) for bundle in seen.bundles
    )
    return Finding("cause", kept and len(seen.bundles) == 1, f"crash bundle says {told}; {wanted} is promised, once")


def _stayed_ready(seen: Seen) -> Finding:
    looks = [look for look in seen.looks if look.at_s >= seen.made_s]
    gone = [look for look in looks if not look.ready]
    text = f"/ready was 200 in {len(looks) - len(gone)} of {len(looks)} looks"
    return Finding("ready all the time", bool(looks) and not gone, text)


def _begun(promise: Promise, seen: Seen) -> Finding:
    """Check how soon replies begin. Only streams count: another reply begins when it is complete."""
    longest_s = max((probe.begun_s for probe in seen.probes if probe.kind != "whole"), default=0.0)
    text = f"after {longest_s:.1f} s at the latest; {promise.first_s:g} s are promised"
    return Finding("replies begin", longest_s <= promise.first_s, text)


def _told(name: str, wanted: str, was: str) -> Finding:
    return Finding(name, was == wanted, was if was == wanted else f"{was}; promised: {wanted}")


def _counted(promise: Promise, seen: Seen) -> list[Finding]:
    before, during, after = seen.metrics
    if after is None:
        return [Finding("metrics", False, "the service did not say its metrics when all was over")]
    found = []
    for name in promise.rises:
        rose = (during or after)[name] - (before or Metrics())[name]
        found.append(Finding(name, rose > 0, f"counted {rose:g} more during the fault"))
    for name in promise.stands:
        rose = after[name] - (before or Metrics())[name]
        found.append(Finding(name, rose == 0, f"counted {rose:g} more"))
    stuck = [name for name in IDLE if after[name] > (before or Metrics())[name]]
    text = ", ".join(f"{name} is {after[name]:g}" for name in stuck) or "nothing is held or waits that did not before"
    found.append(Finding("nothing is stuck", not stuck, text))
    return found
