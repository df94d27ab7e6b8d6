"""`slipway tune MANIFEST`: search for the settings that serve a workload best, and write them as an overlay."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from appliance.bench.benchmark import Options as BenchOptions
from appliance.bench.workload import WorkloadError
from appliance.cli.bench import WRONG, progress, read_options, write_file
from appliance.config.settings import Given
from appliance.config.version import __version__
from appliance.hardware.machine import Machine
from appliance.planning.plan import Plan
from appliance.planning.validate import validate
from appliance.tuning.objective import Objective
from appliance.tuning.report import as_json, as_text, overlay
from appliance.tuning.results import open_results
from appliance.tuning.space import METHOD, Axis, default_axes, draft_axes, with_given
from appliance.tuning.tune import Found, Options, TuneError, Tuner, about, check_model, tokenizer_of, workload
from engine.api.errors import EngineError

MISSED = 1
LOCAL = "http://127.0.0.1"  # replaced by the address of each service that is started


def tune(options: argparse.Namespace, given: Given, machine: Machine | None, api_key: str | None) -> int:
    """Search, print the result and write the overlay. Return 0, 1 if no candidate meets the limits, 2 for wrong options
    or a manifest that cannot be measured."""
    try:
        read = _options(options, given, machine, api_key)
        base = validate(given, machine)
        axes = _axes(options, base, read)
        has_drafts = not options.only_keys and METHOD not in {axis.key for axis in axes}
        found = _search(options, read, base, axes, draft_axes(base) if has_drafts else ())
        print(json.dumps(as_json(found, axes)) if options.json else as_text(found, read.objective, axes))
        return _write(options, found, read.objective, axes)
    except (ValueError, WorkloadError, EngineError, TuneError) as error:
        print(f"slipway tune: {error}", file=sys.stderr)
    except OSError as error:
        print(f"slipway tune: {error.filename}: {error.strerror}", file=sys.stderr)
    return WRONG


def _search(
    options: argparse.Namespace, read: Options, base: Plan, axes: tuple[Axis, ...], drafts: tuple[Axis, ...]
) -> Found:
    _check(base, read)
    encode = tokenizer_of(base)
    results = open_results(options.results, about(read, base, axes))
    report = progress(sys.stderr)
    found = Tuner(read, axes, base, workload(read.bench, encode), encode, results, report, drafts).run()
    report("")
    if results.reused:
        print(f"{results.reused} results of {options.results} are used again", file=sys.stderr)
    return found


def _options(options: argparse.Namespace, given: Given, machine: Machine | None, api_key: str | None) -> Options:
    """Check the command line. Raises ValueError."""
    options.url, options.model = [LOCAL], []
    options.seed = 0 if options.seed is None else options.seed
    bench: BenchOptions = read_options(options, LOCAL, api_key)
    if options.objective == "memory" and not bench.objectives:
        raise ValueError("--objective memory: name a limit that the service must keep, such as --slo request=2s")
    for name in ("candidates", "budget"):
        if not getattr(options, name) > 0:
            raise ValueError(f"--{name} {getattr(options, name)}: use a number above 0")
    if options.runs < 0:
        raise ValueError(f"--runs {options.runs}: use 0 or more")
    if not 0 <= options.min_attainment <= 1:
        raise ValueError(f"--min-attainment {options.min_attainment}: use a share from 0 to 1")
    attainment = options.min_attainment or (0.95 if bench.objectives else 0.0)
    runs = 0 if machine is not None else options.runs
    return Options(
        given,
        machine,
        Objective(options.objective, bench.objectives, attainment),
        bench,
        options.candidates,
        runs,
        options.budget,
    )


def _axes(options: argparse.Namespace, base: Plan, read: Options) -> tuple[Axis, ...]:
    given: dict[str, tuple[str, ...]] = {}
    for text in options.key:
        key, equals, values = text.partition("=")
        if not equals or not values:
            raise ValueError(f"--key {text}: use KEY=VALUE,VALUE…, such as engine.scheduling.max_running=8,16")
        given[key.replace("-", "_")] = tuple(value.strip() for value in values.split(","))
    defaults = () if options.only_keys else default_axes(base, options.objective, read.bench.loop)
    axes = with_given(defaults, given, base)
    if not axes:
        raise ValueError("there is nothing to search; name keys and values with --key")
    return axes


def _check(base: Plan, read: Options) -> None:
    """Raises TuneError for a service that cannot be measured."""
    check_model(base)
    if base.estimate.roofline is None and not read.finalists:
        raise TuneError("the device is not in the table of devices, so nothing can be predicted without runs")


def _write(options: argparse.Namespace, found: Found, objective: Objective, axes: tuple[Axis, ...]) -> int:
    best = found.best
    if best is None:
        return MISSED
    path = options.output or Path(f"{options.manifest.stem}.tuned.yaml")
    write_file(path, overlay(found, objective, axes, _header(options, path)))
    serve = f"slipway serve {options.manifest} --overlay {_named(path)}"
    print(f"wrote {path}; serve it with: {serve}", file=sys.stderr)
    return 0


def _named(path: Path) -> str:
    """Return the path in a form that --overlay takes for a file."""
    text = str(path)
    return text if "/" in text or path.suffix in (".yaml", ".yml") else f"./{text}"


def _header(options: argparse.Namespace, path: Path) -> list[str]:
    load = f"--rate {options.rate}" if options.rate else f"--concurrency {options.concurrency}"
    words: list[Any] = [f"--objective {options.objective}", *(f"--slo {limit}" for limit in options.slo)]
    words += [f"--dataset {options.dataset} -n {options.requests} --seed {options.seed} {load}"]
    planned = f", for {options.hardware}, predicted without a run" if options.hardware else ""
    return [
        f"Overlay of {options.manifest}: slipway serve {options.manifest} --overlay {_named(path)}",
        f"Written by slipway {__version__} tune {' '.join(words)}{planned}",
    ]
