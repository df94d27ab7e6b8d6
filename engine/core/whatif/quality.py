"""Properties of a recording that make predictions from it less accurate: pauses and saturation."""

import statistics
from collections.abc import Sequence

from engine.core.whatif.times import fit, is_timed, kind
from engine.core.whatif.traffic import Step, Traffic

PAUSE_S = 0.5
PAUSE_FACTOR = 10.0
"""A step is paused if it took longer than PAUSE_S and PAUSE_FACTOR times what steps of its size take."""
SATURATED = 0.5
"""A recording is saturated if requests were queued for lack of room during more than this share of its step time."""


def paused_steps(steps: Sequence[Step]) -> list[Step]:
    """Return the steps that include, or follow, a pause of the machine or the process."""
    alike: dict[tuple[int, int], list[float]] = {}
    for step in steps:
        alike.setdefault(kind(step.size), []).append(step.ended - step.started)
    usual = {each: statistics.median_low(seconds) for each, seconds in alike.items()}
    clean = [step for step in steps if not _is_long(step.ended - step.started, usual[kind(step.size)])]
    if not any(is_timed(step) for step in clean):
        return []
    mean = fit(clean).mean
    return [step for step in steps if _is_long(step.ended - step.started + step.delay, mean(step.size))]


def without_pauses(steps: Sequence[Step]) -> list[Step]:
    paused = {id(step) for step in paused_steps(steps)}
    return [step for step in steps if id(step) not in paused]


def saturation(steps: Sequence[Step]) -> float:
    """Return the share of the step time during which requests were queued for lack of room."""
    total = sum(step.ended - step.started for step in steps)
    return sum(step.ended - step.started for step in steps if step.waiting) / total if total else 0.0


def warnings(traffic: Traffic) -> list[str]:
    """Return one sentence for each reason to trust the predictions less."""
    found = []
    if paused := paused_steps(traffic.steps):
        seconds = sum(step.ended - step.started + step.delay for step in paused)
        found.append(
            f"the engine was paused during {len(paused):,} of {len(traffic.steps):,} steps for {seconds:.1f} s; the "
            f"model leaves these steps out, the measured figures include them"
        )
    if (share := saturation(traffic.steps)) > SATURATED:
        found.append(
            f"the recording is saturated: requests were queued during {100 * share:.0f} % of the step time, so the "
            f"time to first token depends on its length; record at a lower request rate"
        )
    return found


def _is_long(seconds: float, usual: float) -> bool:
    return seconds > max(PAUSE_S, PAUSE_FACTOR * usual)
