"""`slipway whatif FILE [--set KEY=VALUE …] [--rate X] [--json]`: predict recorded traffic with other settings.

The table has three columns: measured, predicted with the same settings, and predicted with the changes. The first two
differ if the recording is incomplete or was paused. The last two show the effect of the changes.
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from engine.api.errors import ConfigError
from engine.api.printable import printable
from engine.core.records import read_records
from engine.core.replay import reason, recorded_faults
from engine.core.whatif.quality import warnings, without_pauses
from engine.core.whatif.settings import CHANGES, Settings, changed
from engine.core.whatif.simulate import Outcome, Reply, simulate
from engine.core.whatif.times import fit
from engine.core.whatif.traffic import Traffic, read_traffic


@dataclass(frozen=True)
class Figures:
    """Figures of one run. A value is None if there is no data for it."""

    requests: int
    tokens: int
    span: float  # seconds from the first arrival to the last token
    throughput: float  # tokens per second
    ttft_p50: float | None  # time to first token in seconds
    ttft_p95: float | None
    itl_p50: float | None  # inter-token latency in seconds
    itl_p95: float | None
    refused: int = 0
    preemptions: int | None = None
    cached_tokens: int | None = None
    steps: int | None = None


def figures(replies: list[Reply]) -> Figures:
    given = [reply for reply in replies if reply.times]
    first = [reply.times[0] - reply.at for reply in given]
    between = [b - a for reply in given for a, b in zip(reply.times, reply.times[1:], strict=False)]
    tokens = sum(len(reply.times) for reply in given)
    span = max((r.times[-1] for r in given), default=0.0) - min((r.at for r in given), default=0.0)
    values = (percentile(first, 50), percentile(first, 95), percentile(between, 50), percentile(between, 95))
    return Figures(len(replies), tokens, span, tokens / span if span else 0.0, *values)


def percentile(values: list[float], share: int) -> float | None:
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * share // 100)]


def predicted(traffic: Traffic, settings: Settings, rate: float) -> tuple[Figures, float]:
    """Return the predicted figures and the median relative error of the model of step times."""
    times = fit(without_pauses(traffic.steps), traffic.requests[0].at)
    found: Outcome = simulate(traffic.requests, settings.config, times.seconds, rate=rate, depth=settings.depth)
    more = {"refused": found.refused, "preemptions": found.preemptions, "cached_tokens": found.cached_tokens}
    return Figures(**{**asdict(figures(found.replies)), **more, "steps": found.steps}), times.error


ROWS = (
    ("requests", "requests", "{:,}"),
    ("refused", "refused", "{:,}"),
    ("tokens", "tokens", "{:,}"),
    ("span", "span, s", "{:,.2f}"),
    ("throughput", "tokens/s", "{:,.1f}"),
    ("ttft_p50", "TTFT p50, s", "{:,.3f}"),
    ("ttft_p95", "TTFT p95, s", "{:,.3f}"),
    ("itl_p50", "between tokens p50, s", "{:,.4f}"),
    ("itl_p95", "between tokens p95, s", "{:,.4f}"),
    ("steps", "steps", "{:,}"),
    ("preemptions", "preemptions", "{:,}"),
    ("cached_tokens", "cached prompt tokens", "{:,}"),
)


def table(measured: Figures, model: Figures, changes: Figures) -> str:
    lines = [f"{'':24}{'measured':>12}{'model':>12}{'changed':>12}{'change':>10}"]
    for name, title, form in ROWS:
        values = [getattr(each, name) for each in (measured, model, changes)]
        cells = ["–" if value is None else form.format(value) for value in values]
        lines.append(f"{title:24}" + "".join(f"{cell:>12}" for cell in cells) + f"{_change(*values[1:]):>10}")
    return "\n".join(lines)


def _change(before: float | None, after: float | None) -> str:
    if not before or after is None:
        return ""
    ratio = after / before
    return f"{100 * (ratio - 1):+,.1f} %" if ratio < 10 else f"× {ratio:,.0f}"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="slipway whatif", description=__doc__)
    parser.add_argument("file", type=Path, metavar="FILE", help="a flight recording (engine.record)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=f"one of {', '.join(CHANGES)}")
    parser.add_argument("--rate", type=float, default=1.0, metavar="X", help="multiply the request rate by X")
    parser.add_argument("-j", "--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    try:
        if not 0 < options.rate <= 1000:
            raise ConfigError(f"--rate {options.rate:g}: give a number above 0, at most 1000")
        with recorded_faults():
            traffic = read_traffic(read_records(options.file))
            same = Settings(traffic.config, traffic.depth)
            other = changed(same, options.set)
            measured = figures([Reply(request.at, request.times) for request in traffic.requests])
            (model, step_error), (what_if, _) = predicted(traffic, same, 1.0), predicted(traffic, other, options.rate)
    except (OSError, ConfigError) as error:
        print(f"slipway whatif: {options.file}: {printable(reason(error))}", file=sys.stderr)
        return 1
    if options.json:
        report = {"measured": asdict(measured), "model": asdict(model), "changed": asdict(what_if)}
        about = {"step_error": step_error, "left_out": traffic.num_ignored, "warnings": warnings(traffic)}
        print(json.dumps({**report, **about}, indent=1))
        return 0
    print(table(measured, model, what_if))
    print(f"step times are fitted to {len(traffic.steps):,} steps; half of them are within {100 * step_error:.1f} %")
    for warning in warnings(traffic):
        print(f"warning: {warning}")
    if traffic.num_ignored:
        print(f"{traffic.num_ignored:,} requests are ignored, because they are only partly recorded")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except BrokenPipeError:  # as in `slipway whatif FILE | head`
        sys.stderr.close()
