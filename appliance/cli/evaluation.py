"""`slipway eval`: accuracy of an endpoint on local files."""

import argparse
import asyncio
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from appliance.bench.run import EndpointError
from appliance.cli.bench import FAILED, WRONG, json_object, progress, write_file
from appliance.cli.chat import service_url
from appliance.cli.running import find
from appliance.config.environment import environment
from appliance.config.sections.evaluation import EvaluationTask
from appliance.config.settings import Given, Settings, load
from appliance.config.version import __version__
from appliance.evaluation.evaluate import Options, Result, evaluate
from appliance.evaluation.report import as_text
from appliance.evaluation.samples import SampleError
from appliance.evaluation.summary import ComparisonError, compare
from appliance.tuning.service import ServiceError, running

_FLAGS = ("api", "shots", "shots_file", "extract", "max_tokens", "limit", "minimum", "maximum")
"""Keys of a task that have an option of the same name."""


def run(options: argparse.Namespace, default_url: str, api_key: str | None) -> int:
    """Measure, print and write the files. Return 0; 1 if a request failed, a threshold was missed or a comparison is
    significantly worse; 2 for wrong options or files, or an endpoint that does not answer. Raises Refused for a wrong
    manifest."""
    try:
        other = None if options.compare is None else _read_result(options.compare)
        given = read_options(options, default_url, api_key)
        with started(options, given) as wanted:
            result = asyncio.run(evaluate(wanted, progress(sys.stderr)))
        values = {**result.values, "slipway": __version__}
        if other is not None:
            values["comparison"] = _comparison(values["tasks"], other, options)
    except (ValueError, LookupError, SampleError, EndpointError, ServiceError) as error:
        print(f"slipway eval: {error.args[0] if isinstance(error, LookupError) else error}", file=sys.stderr)
        return WRONG
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)
    print(json.dumps(values) if options.json else as_text(values))
    try:
        _write(options, replace(result, values=values))
    except OSError as error:
        print(f"slipway eval: {error.filename}: {error.strerror}", file=sys.stderr)
        return WRONG
    return WRONG if "error" in values.get("comparison", {}) else _code(values)


@contextmanager
def started(options: argparse.Namespace, given: Options) -> Iterator[Options]:
    """Yield the options with the URL of a service that runs for the tasks, with `--start`. Raises ServiceError."""
    if not options.start:
        yield given
        return
    manifest = Given(options.manifest, (), environment())
    within_s = load(manifest).manifest.health.startup_budget
    with (
        tempfile.TemporaryDirectory(prefix="slipway-eval-") as folder,
        running(manifest, (), within_s=within_s, log=Path(folder, "log")) as url,
    ):
        yield replace(given, url=url)


def _code(values: Mapping[str, Any]) -> int:
    tasks = values["tasks"].values()
    worse = [each for each in values.get("comparison", {}).get("tasks", {}).values() if each["verdict"] == "worse"]
    return FAILED if worse or any(each["errors"] or not each.get("passed", True) for each in tasks) else 0


def _comparison(tasks: Mapping[str, Any], other: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Return the comparison, or its error: the measurement is printed and written in any case."""
    compared: dict[str, Any] = {"file": str(options.compare), "significance": options.significance}
    try:
        return {**compared, "tasks": compare(tasks, other, options.significance)}
    except ComparisonError as error:
        print(f"slipway eval: --compare {options.compare}: {error}", file=sys.stderr)
        return {**compared, "error": str(error)}


def _read_result(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--compare {file}: {error.strerror if isinstance(error, OSError) else error}") from error


def read_options(options: argparse.Namespace, default_url: str, api_key: str | None) -> Options:
    """Check the command line. Raises ValueError, LookupError if the service of a manifest does not run, and Refused."""
    for name in ("concurrency", "timeout"):
        if not getattr(options, name) > 0:
            raise ValueError(f"--{name} {getattr(options, name)}: use a number above 0")
    if options.seed < 0:
        raise ValueError("--seed: use 0 or more")
    if not 0 < options.significance < 1:
        raise ValueError(f"--significance {options.significance}: use a number between 0 and 1")
    settings = None
    if options.start and (options.url is not None or options.which is None or not _is_manifest(options.which)):
        raise ValueError("--start: name a manifest, and no URL")
    if options.which is not None and _is_manifest(options.which):
        options.manifest = Path(options.which)
        settings = load(Given(options.manifest, (), environment()))
    tasks = _tasks(options, settings)
    return Options(
        url=_url(options, settings, default_url),
        tasks=tasks,
        model=options.model,
        limit=options.limit,
        concurrency=options.concurrency,
        seed=options.seed,
        extra=json_object("--body", options.body),
        api_key=api_key,
        timeout_s=options.timeout,
    )


def _is_manifest(word: str) -> bool:
    return "://" not in word and (word.endswith((".yaml", ".yml")) or Path(word).is_file())


def _url(options: argparse.Namespace, settings: Settings | None, default_url: str) -> str:
    if options.url is not None:
        return service_url(options.url)
    if options.start:
        return ""
    if settings is None:
        return service_url(options.which or default_url)
    try:
        _, address = find(options.which)
    except LookupError as error:
        raise LookupError(
            f"{options.which}: its service does not run here; start it with `slipway serve {options.which}`, "
            f"or name an endpoint with --url ({str(error).splitlines()[0].rstrip(':')})"
        ) from error
    return address.url


def _tasks(options: argparse.Namespace, settings: Settings | None) -> dict[str, EvaluationTask]:
    """Return the tasks of the options, or those of the manifest without --task."""
    declared = {} if settings is None else _declared(settings)
    if not options.task and not declared:
        raise ValueError("no task: use --task KIND:FILE, or a manifest with `evaluation`")
    given = {name: getattr(options, name) for name in _FLAGS if getattr(options, name) is not None}
    tasks = dict[str, EvaluationTask]()
    for text in options.task or declared:
        kind, colon, file = text.partition(":")
        if colon:
            name, values = Path(file).stem, {"kind": kind, "file": file}
        elif text in declared:
            name, values = text, declared[text].model_dump(exclude_unset=True)
        else:
            known = f"KIND:FILE or one of {', '.join(declared)}" if declared else "KIND:FILE, such as gsm8k:test.jsonl"
            raise ValueError(f"--task {text}: use {known}")
        if name in tasks:
            raise ValueError(f"--task {text}: a second task with the name {name}; rename its file")
        tasks[name] = _task(f"--task {text}", {**values, **given})
    return tasks


def _declared(settings: Settings) -> dict[str, EvaluationTask]:
    """Return the tasks of a manifest, with complete paths."""
    found = {}
    for name, task in settings.manifest.evaluation.items():
        at = ("evaluation", name)
        paths = {
            key: str(settings.file((*at, key))) for key in ("file", "shots_file") if getattr(task, key) is not None
        }
        found[name] = EvaluationTask.model_validate({**task.model_dump(exclude_unset=True), **paths})
    return found


def _task(source: str, values: dict[str, Any]) -> EvaluationTask:
    try:
        task = EvaluationTask.model_validate(values)
    except ValidationError as error:
        (first, *_) = error.errors()
        key = ".".join(map(str, first["loc"]))
        raise ValueError(f"{source}: {f'{key}: ' if key else ''}{first['msg']}") from error
    if task.extract is not None:
        try:
            re.compile(task.extract)
        except re.error as error:
            raise ValueError(f"{source}: extract: {error}") from error
    return task


def _write(options: argparse.Namespace, result: Result) -> None:
    if options.output is not None:
        write_file(options.output, json.dumps(result.values, indent=1) + "\n")
    if options.samples is not None:
        rows = ({"task": name, **asdict(each)} for name, records in result.records.items() for each in records)
        write_file(options.samples, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
