"""The result of `slipway bench` as text for the terminal and as an HTML page with plots."""

import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from appliance.bench.client import Outcome
from appliance.bench.plots import Line, cumulative, plot
from appliance.bench.summary import PERCENTILES

COLUMNS = ("mean", *(f"p{share}" for share in PERCENTILES))
_BUCKETS = 60  # intervals of the plots over time


def as_text(result: Mapping[str, Any]) -> str:
    """Return one table for each endpoint, and the ratios if there are several."""
    lines = []
    for endpoint in result["endpoints"]:
        lines += [
            f"{endpoint['label']}: {endpoint['url']}, model {endpoint['model']}",
            *_table(endpoint["summary"]),
            "",
        ]
    for label, ratios in result.get("ratios", {}).items():
        lines += [f"ratio of {label}", *(f"  {name:<40}{_ratio(value)}" for name, value in ratios.items()), ""]
    return "\n".join([*lines, f"seed {result['settings']['workload']['seed']}"])


def _table(numbers: Mapping[str, Any]) -> list[str]:
    lines = [f"  {name:<30}{value:>12}" for name, value in numbers.items() if not isinstance(value, dict)]
    lines.append("  " + " " * 30 + "".join(f"{column:>12}" for column in COLUMNS))
    for name, values in numbers.items():
        if name.endswith("_ms"):
            lines.append(f"  {name:<30}" + "".join(f"{values.get(column, '-'):>12}" for column in COLUMNS))
    return lines + [f"  failed {count} times: {error}" for error, count in numbers["errors"].items()]


def _ratio(value: Mapping[str, float]) -> str:
    return f"{value['median']:.3f}  [{value['min']:.3f} – {value['max']:.3f}]"


def as_html(result: Mapping[str, Any], outcomes: Mapping[str, Sequence[Outcome]]) -> str:
    """Return a self-contained page. `outcomes`: all requests of each endpoint, by its label."""
    sections = [
        "<h1>slipway bench</h1>",
        f"<p>{html.escape(result['started'])}</p>",
        "<h2>Results</h2>",
        _results(result["endpoints"]),
        *(_ratios(label, ratios) for label, ratios in result.get("ratios", {}).items()),
        "<h2>Distributions</h2>",
        f'<div class="plots">{"".join(_figures(outcomes))}</div>',
        "<h2>Workload</h2>",
        _pairs({**result["workload"], **result["settings"]}),
        "<h2>Machine of the client</h2>",
        _pairs(result["machine"]),
    ]
    return _PAGE.replace("BODY", "\n".join(sections))


def _figures(outcomes: Mapping[str, Sequence[Outcome]]) -> list[str]:
    good = {label: [each for each in every if not each.error] for label, every in outcomes.items()}

    def shares(values_s: Callable[[Outcome], Iterable[float]]) -> list[Line]:
        return [
            cumulative(label, [1000 * value for each in every for value in values_s(each)])
            for label, every in good.items()
        ]

    requests = "% of requests"
    return [
        plot("Time to first token", "ms", requests, shares(lambda each: [each.first_s] if each.first_s else [])),
        plot("Intervals between tokens", "ms", "% of intervals", shares(lambda each: each.gaps_s)),
        plot("Time per request", "ms", requests, shares(lambda each: [each.last_s])),
        plot("Requests in progress", "seconds", "requests", [_in_progress(k, v) for k, v in good.items()]),
    ]


def _in_progress(label: str, outcomes: Sequence[Outcome]) -> Line:
    """Return the number of requests that the endpoint had at each time of the first round."""
    spans = [(each.sent_s, each.sent_s + each.last_s) for each in outcomes if each.round == 0]
    if not spans:
        return Line(label, [])
    end_s = max(end for _, end in spans)
    times = [end_s * number / _BUCKETS for number in range(_BUCKETS + 1)]
    return Line(label, [(time_s, sum(start <= time_s < end for start, end in spans)) for time_s in times])


def _results(endpoints: Sequence[Mapping[str, Any]]) -> str:
    """Return a table with a column for each endpoint, and one with a row for each latency and endpoint."""
    summaries = [each["summary"] for each in endpoints]
    names = [name for name in summaries[0] if name != "errors" and not name.endswith("_ms")]
    latencies = [name for name in summaries[0] if name.endswith("_ms")]
    rows = [("", *(f"{each['label']}: {each['url']}, {each['model']}" for each in endpoints))]
    rows += [(_title(name), *(_number(summary[name]) for summary in summaries)) for name in names]
    times: list[tuple[str, ...]] = [("milliseconds", *(("",) if len(endpoints) > 1 else ()), *COLUMNS)]
    for name in latencies:
        for number, each in enumerate(endpoints):
            label = (each["label"],) if len(endpoints) > 1 else ()
            found = each["summary"][name]
            values = (_number(found[column]) if column in found else "–" for column in COLUMNS)
            times.append(("" if number else _title(name), *label, *values))
    failed = [f"{each['label']}: {count} × {error}" for each in endpoints for error, count in _errors(each)]
    errors = "".join(f"<p>Failed: {html.escape(line)}</p>" for line in failed)
    return f'<div class="tables">{_html_table(rows)}{_html_table(times)}</div>{errors}'


def _title(name: str) -> str:
    """Return the name of a number in words."""
    return name.replace("_ms", "").replace("_", " ")


def _number(value: Any) -> str:
    """Return a number with separators, and with three significant digits at least."""
    return f"{value:,.1f}" if isinstance(value, float) and abs(value) >= 100 else f"{value:,}"


def _errors(endpoint: Mapping[str, Any]) -> list[tuple[str, int]]:
    return list(endpoint["summary"]["errors"].items())


def _ratios(label: str, ratios: Mapping[str, Mapping[str, float]]) -> str:
    rows = [("", "median", "range of the rounds")]
    rows += [(_title(k), f"{v['median']:.3f}", f"{v['min']:.3f} – {v['max']:.3f}") for k, v in ratios.items()]
    return f"<h2>Ratio of {html.escape(label)}</h2>" + _html_table(rows)


def _pairs(values: Mapping[str, Any]) -> str:
    return _html_table([pair for pair in _flat(values) if pair[1] not in (None, "", [], {})], header=False)


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return nested values with the path of each."""
    pairs: list[tuple[str, Any]] = []
    for name, value in values.items():
        path = f"{prefix}{name}"
        pairs += _flat(value, f"{path}.") if isinstance(value, Mapping) else [(path, value)]
    return pairs


def _html_table(rows: Sequence[Sequence[Any]], *, header: bool = True) -> str:
    lines = []
    for number, row in enumerate(rows):
        tag = "th" if header and number == 0 else "td"
        lines.append("<tr>" + "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in row) + "</tr>")
    return f"<table>{''.join(lines)}</table>"


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>slipway bench</title>
<style>
:root { color-scheme: light dark; --grid: #8884; --c0: #2563eb; --c1: #d97706; --c2: #059669; --c3: #c026d3; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1180px; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .2rem .8rem; border-bottom: 1px solid var(--grid); vertical-align: top; }
th { font-weight: 600; } td { overflow-wrap: anywhere; }
.tables { display: flex; flex-wrap: wrap; gap: 1.5rem 3rem; align-items: start; }
th:first-child, td:first-child { text-align: left; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 500px), 1fr)); gap: 1.5rem; }
figure { margin: 0; } figcaption { font-weight: 600; }
svg { width: 100%; height: auto; } text { font-size: 11px; fill: currentColor; }
.grid { stroke: var(--grid); stroke-width: 1; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; }
.line.c0 { stroke: var(--c0); } .line.c1 { stroke: var(--c1); }
.line.c2 { stroke: var(--c2); } .line.c3 { stroke: var(--c3); }
i.c0 { background: var(--c0); } i.c1 { background: var(--c1); }
i.c2 { background: var(--c2); } i.c3 { background: var(--c3); }
.key { margin-right: 1.2rem; } .key i { display: inline-block; width: .8rem; height: .8rem; margin-right: .4rem; }
</style></head><body>
BODY
</body></html>
"""
