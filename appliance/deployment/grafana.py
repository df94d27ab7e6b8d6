"""A Grafana dashboard: an overview from the recording rules, and a panel for each metric of the table in
observability/families.py. Import it with its data source as the only input."""

from collections.abc import Iterator
from typing import Any

from appliance.observability.rules import QUANTILES, Objectives, slow_share
from engine.metrics.families import Family, counters, gauges, histograms

Panel = dict[str, Any]
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_SELECT = 'job=~"$job", instance=~"$instance"'
_WIDTH, _HEIGHT, _COLUMNS = 8, 7, 3
_UNITS = {"seconds": "s", "bytes": "bytes", "ratio": "percentunit"}


def grafana(name: str, objectives: Objectives) -> dict[str, Any]:
    """Return the dashboard. Panels contain the objectives as thresholds."""
    sections = {
        "Overview": _overview(objectives),
        "Engines": [_panel(family) for family in _families() if family.per_engine],
        "Service": [_panel(family) for family in _families() if not family.per_engine],
    }
    return {
        "uid": f"slipway-{name}"[:40],
        "title": f"Slipway: {name}",
        "tags": ["slipway"],
        "schemaVersion": 39,
        "editable": True,
        "time": {"from": "now-3h", "to": "now"},
        "refresh": "30s",
        "templating": {"list": _variables()},
        "annotations": {"list": [_alert_annotation()]},
        "panels": list(_arranged(sections)),
    }


def _families() -> tuple[Family, ...]:
    return (*gauges(), *counters(), *histograms(1))


def _variables() -> list[dict[str, Any]]:
    def labels(name: str, query: str) -> dict[str, Any]:
        common = {"type": "query", "datasource": _SOURCE, "refresh": 2, "includeAll": True, "multi": True}
        return {"name": name, "label": name, "query": query, **common, "current": {"text": "All", "value": "$__all"}}

    source = {"name": "datasource", "label": "data source", "type": "datasource", "query": "prometheus"}
    return [
        source,
        labels("job", "label_values(slipway_build_info, job)"),
        labels("instance", 'label_values(slipway_build_info{job=~"$job"}, instance)'),
    ]


def _alert_annotation() -> dict[str, Any]:
    expr = f'ALERTS{{alertname=~"Slipway.*", alertstate="firing", {_SELECT}}}'
    return {"name": "Alerts", "datasource": _SOURCE, "enable": True, "expr": expr, "titleFormat": "{{alertname}}"}


def _overview(objectives: Objectives) -> list[Panel]:
    first, token = objectives.first_token_s, objectives.token_s
    return [
        _graph("Engines that serve", "short", {"{{instance}}": f"sum by (instance) (slipway_engine_up{{{_SELECT}}})"}),
        _graph(
            "Requests",
            "short",
            {
                "running {{instance}}": f"service:slipway_requests_running:sum{{{_SELECT}}}",
                "waiting {{instance}}": f"service:slipway_requests_waiting:sum{{{_SELECT}}}",
            },
        ),
        _graph("Errors", "percentunit", {"{{instance}}": f"service:http_errors:ratio_rate5m{{{_SELECT}}}"}),
        _graph("Time to first token", "s", _recorded("time_to_first_token"), limit=first),
        _graph("Time between tokens", "s", _recorded("inter_token_latency"), limit=token),
        _graph("Time in the queue", "s", _recorded("queue_time")),
        _graph(
            "Tokens per second",
            "short",
            {
                "prompt {{instance}}": f"service:slipway_prompt_tokens:rate5m{{{_SELECT}}}",
                "generated {{instance}}": f"service:slipway_generation_tokens:rate5m{{{_SELECT}}}",
            },
        ),
        _graph(
            "Prefix cache hits",
            "percentunit",
            {"{{instance}}": f"service:slipway_prefix_cache_hits:ratio_rate5m{{{_SELECT}}}"},
        ),
        _graph(
            "Slower than the objective",
            "percentunit",
            {
                f"{text} {{{{instance}}}}": f"{slow_share(name, '1h')}{{{_SELECT}}}"
                for name, text in (("time_to_first_token", "first token"), ("inter_token_latency", "tokens"))
            },
            limit=objectives.budget,
        ),
    ]


def _recorded(name: str) -> dict[str, str]:
    """Return queries of the recorded quantiles of a latency, by their legends."""
    percents = [round(100 * quantile) for quantile in QUANTILES]
    return {
        f"p{percent} {{{{instance}}}}": f"service:slipway_{name}_seconds:p{percent}_rate5m{{{_SELECT}}}"
        for percent in percents
    }


def _panel(family: Family) -> Panel:
    """Return the panel of a metric: its value, its rate, or its quantiles."""
    title = family.name.replace("_", " ").capitalize()
    unit = next((unit for word, unit in _UNITS.items() if word in family.name.split("_")), "short")
    labels = ["instance", *(["engine"] if family.per_engine else []), *family.labels]
    legend = " ".join(f"{{{{{label}}}}}" for label in labels)
    metric = f"slipway_{family.name}"
    match family.kind:
        case "gauge":
            queries = {legend: f"{metric}{{{_SELECT}}}"}
        case "counter":
            queries = {legend: f"rate({metric}_total{{{_SELECT}}}[$__rate_interval])"}
        case _:
            inner = f"sum by ({', '.join([*labels, 'le'])}) (rate({metric}_bucket{{{_SELECT}}}[$__rate_interval]))"
            queries = {
                f"p{round(100 * quantile)} {legend}": f"histogram_quantile({quantile}, {inner})"
                for quantile in QUANTILES
            }
    return _graph(title, unit, queries, description=family.help)


def _graph(
    title: str, unit: str, queries: dict[str, str], *, description: str = "", limit: float | None = None
) -> Panel:
    steps = [{"color": "green", "value": None}, *([{"color": "red", "value": limit}] if limit is not None else [])]
    style = {"thresholdsStyle": {"mode": "line"}} if limit is not None else {}
    return {
        "type": "timeseries",
        "title": title,
        "description": description,
        "datasource": _SOURCE,
        "fieldConfig": {
            "defaults": {"unit": unit, "min": 0, "custom": style, "thresholds": {"mode": "absolute", "steps": steps}},
            "overrides": [],
        },
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": _SOURCE, "expr": expr, "legendFormat": legend}
            for index, (legend, expr) in enumerate(queries.items())
        ],
    }


def _arranged(sections: dict[str, list[Panel]]) -> Iterator[Panel]:
    """Yield rows and panels with ids and places. Rows after the first are collapsed and contain their panels."""
    number, top = 0, 0
    for title, panels in sections.items():
        collapsed = title != "Overview"
        placed = []
        number += 1
        row = {"type": "row", "id": number, "title": title, "collapsed": collapsed, "gridPos": _place(0, top, 24, 1)}
        for index, panel in enumerate(panels):
            number += 1
            column, line = index % _COLUMNS, index // _COLUMNS
            place = _place(column * _WIDTH, top + 1 + line * _HEIGHT, _WIDTH, _HEIGHT)
            placed.append({"id": number, "gridPos": place, **panel})
        top += 1 + (0 if collapsed else -(-len(panels) // _COLUMNS) * _HEIGHT)
        yield {**row, "panels": placed if collapsed else []}
        if not collapsed:
            yield from placed


def _place(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}
