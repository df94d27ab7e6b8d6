"""Output of `slipway chaos`: the list of scenarios, the announcement of a run and its results."""

from collections.abc import Sequence
from typing import Any

from appliance.chaos.run import Report
from appliance.chaos.scenario import Scenario
from appliance.chaos.target import Target

WIDTH = max(map(len, ("disk-full-crash", "gateway-crash"))) + 2


def listed(scenarios: Sequence[Scenario], target: Target | None) -> list[str]:
    """Return the lines of the scenario list.

    With a target, add its promises and the scenarios that are not possible there.
    """
    lines = []
    for scenario in scenarios:
        lines.append(f"{scenario.name:{WIDTH}}{scenario.about}")
        if target is None:
            continue
        lacks = scenario.lacks(target)
        lines.append(f"{'':{WIDTH}}{f'not here: {lacks}' if lacks else promised(scenario, target)}")
    return lines


def promised(scenario: Scenario, target: Target) -> str:
    promise = scenario.promise(target)
    within = f", within {promise.within_s:.0f} s" if promise.restarts else ""
    return f"promised: {promise.text}{within}"


def report_lines(report: Report) -> list[str]:
    name = report.scenario.name
    if report.skipped:
        return [f"{name:{WIDTH}}not made: {report.skipped}"]
    lines = [f"{name:{WIDTH}}{'as promised' if report.kept else 'NOT AS PROMISED'}"]
    return [*lines, *(f"  {'ok ' if each.kept else 'BAD'}  {each.name}: {each.text}" for each in report.findings)]


def as_json(report: Report) -> dict[str, Any]:
    told: dict[str, Any] = {"scenario": report.scenario.name, "about": report.scenario.about}
    if report.skipped:
        return told | {"outcome": "not made", "reason": report.skipped}
    assert report.promise is not None, "what was made has a promise"
    findings = [{"name": each.name, "kept": each.kept, "text": each.text} for each in report.findings]
    outcome = "as promised" if report.kept else "not as promised"
    return told | {"outcome": outcome, "promise": report.promise.text, "findings": findings}
