"""Output of `slipway chaos`: the list of scenarios, the announcement of a run and its results."""

from collections.abc import Sequence
from typing import Any

from appliance.chaos.run import Report
from appliance.chaos.scenario import Scenario
from appliance.chaos.target import Target

WIDTH = max(map(len, ("disk-full-crash", "gateway-crash"))) + 2


def scenario_lines(scenarios: Sequence[Scenario], target: Target | None) -> list[str]:
    """Return the lines of the scenario list.

    With a target, add its promises and the scenarios that are not possible there.
    """
    lines = []
    for scenario in scenarios:
        lines.append(f"{scenario.name:{WIDTH}}{scenario.about}")
        if target is None:
            continue
        unavailable = scenario.unavailable(target)
        lines.append(
            f"{'':{WIDTH}}{f'not available: {unavailable}' if unavailable else promise_line(scenario, target)}"
        )
    return lines


def promise_line(scenario: Scenario, target: Target) -> str:
    promise = scenario.promise(target)
    within = f", within {promise.within_s:.0f} s" if promise.restarts else ""
    return f"promised: {promise.text}{within}"


def report_lines(report: Report) -> list[str]:
    name = report.scenario.name
    if report.skipped:
        return [f"{name:{WIDTH}}skipped: {report.skipped}"]
    lines = [f"{name:{WIDTH}}{'as promised' if report.kept else 'NOT AS PROMISED'}"]
    return [*lines, *(f"  {'ok  ' if each.kept else 'FAIL'}  {each.name}: {each.text}" for each in report.findings)]


def as_json(report: Report) -> dict[str, Any]:
    document: dict[str, Any] = {"scenario": report.scenario.name, "about": report.scenario.about}
    if report.skipped:
        return document | {"outcome": "not made", "reason": report.skipped}
    assert report.promise is not None, "a scenario that was not skipped has a promise"
    findings = [{"name": each.name, "kept": each.kept, "text": each.text} for each in report.findings]
    outcome = "as promised" if report.kept else "not as promised"
    return document | {"outcome": outcome, "promise": report.promise.text, "findings": findings}
