"""`slipway chaos`: inject faults into a running appliance, one after another, and check whether it behaves as
documented."""

import asyncio
import contextlib
import fcntl
import sys
from collections.abc import Sequence

import orjson

from appliance.chaos.faults import SCENARIOS
from appliance.chaos.format import as_json, promise_line, report_lines, scenario_lines
from appliance.chaos.probes import ServiceUnhealthy
from appliance.chaos.run import Options, Report, run
from appliance.chaos.scenario import Scenario
from appliance.chaos.target import Target, key_of
from appliance.cli.running import find
from appliance.config import exits
from engine.api.errors import ConfigError

LOCK = "chaos.lock"  # in the run directory
BROKEN = 1  # exit code: the appliance did not behave as documented
LEFT = 3  # exit code: a fault could not be rolled back


def chaos(
    which: str | None,
    names: str,
    options: Options,
    *,
    lists: bool,
    yes: bool,
    json: bool,
    key: str,
) -> int:
    if lists and which is None and not names:
        target = _listed_target(key)
        print("\n".join(scenario_lines(SCENARIOS, target)))
        return exits.OK.number
    wanted, unknown = chosen(names)
    if unknown or not wanted:
        said = (
            f"unknown scenario {', '.join(unknown)}"
            if unknown
            else "select scenarios with --scenario, or use --scenario all"
        )
        return _refused(f"{said}; available: {', '.join(each.name for each in SCENARIOS)}")
    try:
        target = _target(which, key)
    except LookupError as error:
        return _refused(str(error))
    if lists:
        print("\n".join(scenario_lines(wanted, target)))
        return exits.OK.number
    if target.gateway.lifecycle.chaos != "allowed":
        return _refused(
            f"{target.address.manifest} does not allow it; `lifecycle: {{chaos: allowed}}` and `slipway reload` do"
        )
    if not yes and not _agreed(target, wanted):
        return _refused("no fault was injected; --yes skips the question")
    with (target.directory / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return _refused("another `slipway chaos` is running against this service")
        return _run_all(target, wanted, options, json=json)


def chosen(names: str) -> tuple[list[Scenario], list[str]]:
    """Return the scenarios of a comma-separated list, in its order, and the unknown names."""
    if names == "all":
        return list(SCENARIOS), []
    by_name = {scenario.name: scenario for scenario in SCENARIOS}
    asked = [name.strip() for name in names.split(",") if name.strip()]
    return [by_name[name] for name in asked if name in by_name], [name for name in asked if name not in by_name]


def _target(which: str | None, key: str) -> Target:
    """Return the appliance to test. Raise LookupError if there is not exactly one, or if its API key is unknown."""
    directory, address = find(which)
    target = Target(directory, address)
    try:
        return Target(directory, address, key_of(target.gateway, key))
    except ConfigError as error:
        raise LookupError(f"{error}; set --api-key-env to the name of an environment variable") from error


def _listed_target(key: str) -> Target | None:
    with contextlib.suppress(LookupError):
        return _target(None, key)
    return None


def _refused(message: str) -> int:
    print(f"slipway chaos: {message}", file=sys.stderr)
    return exits.MANIFEST.number


def _agreed(target: Target, scenarios: Sequence[Scenario]) -> bool:
    print(f"{target.address.manifest}, {target.url}, process {target.address.pid}:")
    for scenario in scenarios:
        unavailable = scenario.unavailable(target)
        print(f"  {scenario.name}: {f'not available here: {unavailable}' if unavailable else scenario.about}")
        if not unavailable:
            print(f"    {promise_line(scenario, target)}")
    if not sys.stdin.isatty():
        return False
    with contextlib.suppress(EOFError):
        return input("Inject these faults into this running service? Type yes: ").strip() == "yes"
    return False


def _run_all(target: Target, scenarios: Sequence[Scenario], options: Options, *, json: bool) -> int:
    reports: list[Report] = []
    for scenario in scenarios:
        made = [report.scenario for report in reports if not report.skipped]
        if not json:
            print(f"{scenario.name}: {scenario.about} …", flush=True)
        try:
            reports.append(asyncio.run(run(target, scenario, options, made)))
        except ServiceUnhealthy as error:
            print(f"slipway chaos: {scenario.name} was not run: {error}", file=sys.stderr)
            break
        if not json:
            print("\n".join(report_lines(reports[-1])), flush=True)
        if not reports[-1].kept or reports[-1].left:
            break  # after a failure or a remaining fault, further scenarios show nothing new
    if json:
        print(orjson.dumps([as_json(report) for report in reports], option=orjson.OPT_INDENT_2).decode())
    if any(report.left for report in reports):
        return LEFT
    whole = len(reports) == len(scenarios) and all(report.kept for report in reports)
    return exits.OK.number if whole and any(not report.skipped for report in reports) else BROKEN
