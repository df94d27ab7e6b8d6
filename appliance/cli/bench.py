"""`slipway bench`: load on one OpenAI-compatible endpoint, or on several in alternation."""

import argparse
import asyncio
import json
import platform
import secrets
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from appliance.bench.arrivals import Arrivals
from appliance.bench.benchmark import Options, Result, bench
from appliance.bench.report import as_html, as_text
from appliance.bench.run import EndpointError, Loop
from appliance.bench.summary import parse_objective
from appliance.bench.workload import Lengths, WorkloadError, WorkloadOptions
from appliance.cli.chat import service_url
from appliance.config.version import __version__
from appliance.hardware.machine import read_machine

FAILED, WRONG = 1, 2
MAX_SIDE = 8192  # pixels
AUDIO_SPREAD, MAX_AUDIO_S = 0.8, 30
_SEED_BITS = 31


def run(options: argparse.Namespace, default_url: str, api_key: str | None) -> int:
    """Run the benchmark, print it and write its files. Return 0, 1 if a request failed or too few met the objectives,
    2 for wrong options, an endpoint that does not answer, or a file that cannot be written."""
    try:
        given = read_options(options, default_url, api_key)
        result = asyncio.run(bench(given, progress(sys.stderr)))
    except (ValueError, WorkloadError, EndpointError) as error:
        print(f"slipway bench: {error}", file=sys.stderr)
        return WRONG
    result.values["machine"] = {
        "slipway": __version__,
        "platform": platform.platform(),
        "cores": read_machine().cores,
    }
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)
    print(json.dumps(result.values) if options.json else as_text(result.values))
    try:
        _write(options, result)
    except OSError as error:
        print(f"slipway bench: {error.filename}: {error.strerror}", file=sys.stderr)
        return WRONG
    summaries = [endpoint["summary"] for endpoint in result.values["endpoints"]]
    missed = [each for each in summaries if each.get("attainment", 1.0) < options.min_attainment]
    return FAILED if missed or any(each["failures"] for each in summaries) else 0


def read_options(options: argparse.Namespace, default_url: str, api_key: str | None) -> Options:
    """Check the command line. Raises ValueError."""
    urls = tuple(service_url(url) for url in options.url or [default_url])
    if len(options.model) not in (0, len(urls)):
        raise ValueError(f"--model: {len(options.model)} names for {len(urls)} URLs; give one for each URL or none")
    _positive(options, "requests", "concurrency", "input_tokens", "output_tokens", "limit_tokens", "rounds", "timeout")
    _positive(options, "prefixes", "turns", "burstiness", "max_concurrency", "images", "audio_seconds")
    for name in ("input_spread", "output_spread", "warmup", "pause", "prefix_tokens", "seed"):
        if (getattr(options, name) or 0) < 0:
            raise ValueError(f"--{name.replace('_', '-')}: use 0 or more")
    return Options(
        urls,
        options.dataset,
        _workload(options),
        _loop(options),
        tuple(options.model),
        options.api,
        options.rounds,
        options.warmup,
        dict(parse_objective(text) for text in options.slo),
        json_object("--body", options.body),
        api_key,
        options.timeout,
    )


def _positive(options: argparse.Namespace, *names: str) -> None:
    for name in names:
        if (value := getattr(options, name)) is not None and not value > 0:
            raise ValueError(f"--{name.replace('_', '-')} {value}: use a number above 0")


def _workload(options: argparse.Namespace) -> WorkloadOptions:
    return WorkloadOptions(
        sessions=options.requests,
        seed=secrets.randbits(_SEED_BITS) if options.seed is None else options.seed,
        input=Lengths(options.input_tokens, options.input_spread, options.limit_tokens),
        output=Lengths(options.output_tokens, options.output_spread, options.limit_tokens),
        prefixes=options.prefixes,
        prefix_tokens=options.prefix_tokens,
        turns=options.turns,
        pause_s=options.pause,
        images=options.images,
        image_size=_image_size(options.image_size),
        audio_s=Lengths(options.audio_seconds, AUDIO_SPREAD, MAX_AUDIO_S),
        audio_range_s=_audio_range(options.audio_range),
    )


def _image_size(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    if not (width.isdecimal() and height.isdecimal() and 0 < int(width) <= MAX_SIDE and 0 < int(height) <= MAX_SIDE):
        raise ValueError(f"--image-size {text}: use width and height in pixels, such as 448x448, up to {MAX_SIDE}")
    return int(width), int(height)


def _audio_range(text: str | None) -> tuple[float, float]:
    if text is None:
        return 0.0, float("inf")
    first, dots, last = text.partition("..")
    try:
        low, high = float(first), float(last)
    except ValueError:
        low, high = 1.0, 0.0
    if not dots or not 0 <= low <= high:
        raise ValueError(f"--audio-range {text}: use two durations in seconds, such as 1..30")
    return low, high


def _loop(options: argparse.Namespace) -> Loop:
    if options.rate is None:
        if options.max_concurrency is not None:
            raise ValueError("--max-concurrency limits an open loop; use --concurrency without --rate")
        return Loop(options.concurrency)
    first, _, last = options.rate.partition("..")
    try:
        rates = float(first), float(last or first)
    except ValueError:
        rates = 0.0, 0.0
    if not all(0 < rate < float("inf") for rate in rates):
        raise ValueError(f"--rate {options.rate}: use sessions per second, such as 4, or 1..20 for a ramp")
    return Loop(options.max_concurrency or 0, Arrivals(*rates, options.burstiness))


def json_object(option: str, text: str) -> dict[str, Any]:
    """Return the fields of a JSON object. Raises ValueError, which names the option."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{option}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(option + ": use a JSON object, such as '{\"temperature\": 0.7}'")
    return value


def progress(out: Any) -> Callable[[str], None]:
    """Return a function that shows a line in place on a terminal, and nothing elsewhere."""
    if not out.isatty():
        return lambda line: None
    return lambda line: print(f"\r\x1b[K{line}", end="", file=out, flush=True)


def _write(options: argparse.Namespace, result: Result) -> None:
    if options.output is not None:
        values = dict(result.values)
        if options.details:
            values["outcomes"] = {label: _details(each) for label, each in result.outcomes.items()}
        write_file(options.output, json.dumps(values, indent=1) + "\n")
    if options.html is not None:
        write_file(options.html, as_html(result.values, result.outcomes))


def _details(outcomes: Sequence[Any]) -> list[dict[str, Any]]:
    rows = [asdict(outcome) for outcome in outcomes]
    return [{name: value for name, value in row.items() if name != "text"} for row in rows]


def write_file(path: Path, text: str) -> None:
    """Write a file and make its folder. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
