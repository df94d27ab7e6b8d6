"""Alert and recording rules: scripted scenarios in promtool, and names against the table of metrics.

Each scenario is the series of a service for some time, one value a minute, and the alerts that must fire at its end; no
other alert may fire.
"""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from appliance.deployment.grafana import grafana
from appliance.deployment.prometheus_rules import bucket_bounds, prometheus_rules
from appliance.observability.alerts import ALERTS, Thresholds
from appliance.observability.rules import LATENCIES, Objectives, recordings
from engine.metrics.families import counters, gauges, histograms

PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="requires promtool (Debian: prometheus)")
LIMITS = Thresholds(restarts=4, window_s=600, startup_s=300, waiting=100)
FAMILIES = (*gauges(), *counters(), *histograms(1))
LABELS = 'job="slipway", instance="a:8000"'
ENGINE = f'{LABELS}, engine="0"'
# A healthy service; each scenario replaces some series.
HEALTHY = {
    f"up{{{LABELS}}}": "1x400",
    f"slipway_engine_up{{{ENGINE}}}": "1x400",
    f'slipway_phase{{{LABELS}, phase="failed"}}': "0x400",
    f"slipway_engine_restarts_total{{{ENGINE}}}": "1x400",
    f"slipway_requests_held{{{LABELS}}}": "0x400",
    f"slipway_requests_waiting{{{ENGINE}}}": "3x400",
    f'slipway_admission_rejections_total{{{LABELS}, reason="max_num_queued_reqs"}}': "7x400",
    f"slipway_kv_cache_usage_ratio{{{ENGINE}}}": "0.5x400",
    f"slipway_preemptions_total{{{ENGINE}}}": "2x400",
    f"slipway_requests_quarantined_total{{{LABELS}}}": "0x400",
    f"slipway_self_test_failures_total{{{ENGINE}}}": "0x400",
    f"slipway_self_test_last_result{{{ENGINE}}}": "1x400",
    f"slipway_journal_errors_total{{{LABELS}}}": "0x400",
    f"slipway_tls_certificate_end_seconds{{{LABELS}}}": "0x400",
    f'http_requests_total{{{LABELS}, handler="/v1/chat/completions", method="POST", status="2xx"}}': "0+60x400",
    f'http_requests_total{{{LABELS}, handler="/ready", method="GET", status="5xx"}}': "0+60x400",
    f'slipway_time_to_first_token_seconds_bucket{{{ENGINE}, le="2.5"}}': "0+60x400",
    f'slipway_time_to_first_token_seconds_bucket{{{ENGINE}, le="+Inf"}}': "0+60x400",
    f"slipway_time_to_first_token_seconds_count{{{ENGINE}}}": "0+60x400",
    f'slipway_inter_token_latency_seconds_bucket{{{ENGINE}, le="0.1"}}': "0+600x400",
    f"slipway_inter_token_latency_seconds_count{{{ENGINE}}}": "0+600x400",
}
FIRST = f'slipway_time_to_first_token_seconds_bucket{{{ENGINE}, le="2.5"}}'
TOKEN = f'slipway_inter_token_latency_seconds_bucket{{{ENGINE}, le="0.1"}}'
ERRORS = f'http_requests_total{{{LABELS}, handler="/v1/chat/completions", method="POST", status="5xx"}}'
END = f"slipway_tls_certificate_end_seconds{{{LABELS}}}"
DAY = 86400
SCENARIOS: dict[str, tuple[dict[str, str], int, set[str]]] = {
    "a healthy service": ({}, 380, set()),
    "the process is gone": ({f"up{{{LABELS}}}": "1x10 0x390"}, 20, {"SlipwayDown"}),
    "a short interruption of the network": ({f"up{{{LABELS}}}": "1x10 0 1x390"}, 20, set()),
    "no engine for longer than a start": ({f"slipway_engine_up{{{ENGINE}}}": "0x400"}, 12, {"SlipwayNotReady"}),
    "a start that takes its time": ({f"slipway_engine_up{{{ENGINE}}}": "1 0x3 1x390"}, 6, set()),
    "halted after a failure": ({f'slipway_phase{{{LABELS}, phase="failed"}}': "0x5 1x390"}, 10, {"SlipwayNotReady"}),
    "an engine crash loop": (
        {f"slipway_engine_restarts_total{{{ENGINE}}}": "1x10 2 3 3x380"}, 13, {"SlipwayEngineCrashLoop"}
    ),
    "a single crash": ({f"slipway_engine_restarts_total{{{ENGINE}}}": "1x10 2x390"}, 13, set()),
    "crashes long ago": ({f"slipway_engine_restarts_total{{{ENGINE}}}": "1x10 2 3 3x380"}, 40, set()),
    "one of two engines is down": (
        {f'slipway_engine_up{{{LABELS}, engine="1"}}': "1x10 0x390"}, 25, {"SlipwayEngineDown"}
    ),
    "held requests": ({f"slipway_requests_held{{{LABELS}}}": "0x10 2x390"}, 20, {"SlipwayRequestsHeld"}),
    "a growing queue": ({f"slipway_requests_waiting{{{ENGINE}}}": "3+2x400"}, 40, {"SlipwayQueueGrowing"}),
    "a long queue that does not grow": ({f"slipway_requests_waiting{{{ENGINE}}}": "80x400"}, 40, set()),
    "a queue that shrinks": ({f"slipway_requests_waiting{{{ENGINE}}}": "100-1x60"}, 40, set()),
    "refused requests": (
        {f'slipway_admission_rejections_total{{{LABELS}, reason="max_num_queued_reqs"}}': "0+60x400"}, 15,
        {"SlipwayRequestsRefused"},
    ),
    "a full KV cache with preemptions": (
        {f"slipway_kv_cache_usage_ratio{{{ENGINE}}}": "0.99x400", f"slipway_preemptions_total{{{ENGINE}}}": "0+5x400"},
        25, {"SlipwayKvCacheFull"},
    ),
    "preemptions with a KV cache that is not full": ({f"slipway_preemptions_total{{{ENGINE}}}": "0+5x400"}, 25, set()),
    "a full KV cache of cached prefixes": ({f"slipway_kv_cache_usage_ratio{{{ENGINE}}}": "0.99x400"}, 25, set()),
    "every fourth first token is slow": ({FIRST: "0+45x400"}, 70, {"SlipwayFirstTokenSlow"}),
    "8 % of first tokens are slow for hours": ({FIRST: "0+55.2x400"}, 370, {"SlipwayFirstTokenSlow"}),
    "2 % of first tokens are slow for hours": ({FIRST: "0+58.8x400"}, 370, set()),
    "slow first tokens until an hour ago": ({FIRST: "0+45x60 2760+60x340"}, 130, set()),
    "every fourth token is slow": ({TOKEN: "0+450x400"}, 70, {"SlipwayTokensSlow"}),
    "a tenth of requests fails": ({ERRORS: "0+7x400"}, 15, {"SlipwayErrors"}),
    "one request of 60 fails": ({ERRORS: "0+1x400"}, 15, set()),
    "an isolated request": (
        {f"slipway_requests_quarantined_total{{{LABELS}}}": "0x10 1x390"}, 20, {"SlipwayRequestsIsolated"}
    ),
    "drift": ({f"slipway_self_test_failures_total{{{ENGINE}}}": "0x10 1x390"}, 20, {"SlipwaySelfTestFailed"}),
    "a wrong golden prompt": ({f"slipway_self_test_last_result{{{ENGINE}}}": "1x10 0x390"}, 20,
                              {"SlipwaySelfTestFailed"}),
    "a full disk": ({f"slipway_journal_errors_total{{{LABELS}}}": "0x10 0+1x390"}, 20, {"SlipwayJournalErrors"}),
    "a certificate for five days": ({END: f"{5 * DAY}x400"}, 70, {"SlipwayCertificateExpiring"}),
    "a certificate for an hour": (
        {END: f"{DAY // 8}x400"}, 70, {"SlipwayCertificateExpiring", "SlipwayCertificateExpired"}
    ),
    "a certificate for a month": ({END: f"{30 * DAY}x400"}, 70, set()),
}  # fmt: skip


def scenario(series: dict[str, str], minutes: int, firing: set[str]) -> dict[str, Any]:
    """A test of promtool: all alerts that must fire, by name, at one time."""
    given = {**HEALTHY, **series}
    moment = {"expr": 'count by (alertname) (ALERTS{alertstate="firing"})', "eval_time": f"{minutes}m"}
    samples = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(firing)]
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in given.items()],
        "promql_expr_test": [{**moment, "exp_samples": samples}],
    }


def promtool(*words: str) -> str:
    done = subprocess.run([PROMTOOL or "", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
@needs_promtool
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SCENARIOS)
def test_alerts_fire_in_their_scenario_only(name: str, tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(prometheus_rules(LIMITS)))
    tests = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [scenario(*SCENARIOS[name])]}
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(tests))
    promtool("test", "rules", str(tmp_path / "test.yaml"))


def test_each_alert_has_a_scenario() -> None:
    assert {name for _, _, firing in SCENARIOS.values() for name in firing} == {alert.name for alert in ALERTS}


@needs_promtool
def test_promtool_accepts_the_rules_without_a_warning(tmp_path: Path) -> None:
    rules = prometheus_rules(Thresholds(restarts=0, waiting=0, objectives=Objectives(0.005, 0.01, 0.999)))
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules))
    assert "SUCCESS" in promtool("check", "rules", "--lint=all", "--lint-fatal", str(tmp_path / "rules.yaml"))


SELECTOR = re.compile(r"\b((?:slipway|http)_\w+)(?:\{([^}]*)\})?")


def expressions() -> list[str]:
    dashboard = json.dumps(grafana("m", Objectives())).replace('\\"', '"')
    rules = [each.expr for each in recordings(Objectives())] + [alert.expr(LIMITS) for alert in ALERTS]
    return [*rules, *re.findall(r'"expr": "(.*?)", "legendFormat"', dashboard)]


def known_labels() -> dict[str, set[str]]:
    """Labels of each metric, by its name in PromQL."""
    found = {"http_requests_total": {"handler", "method", "status"}, "slipway_phase": {"phase"}}
    for family in FAMILIES:
        labels = {*family.labels, *(["engine"] if family.per_engine else [])}
        ends = {"gauge": [""], "counter": ["_total"], "histogram": ["_bucket", "_count", "_sum"]}[family.kind]
        for end in ends:
            found[f"slipway_{family.name}{end}"] = labels | ({"le"} if end == "_bucket" else set())
    return found


def test_expressions_use_metrics_and_labels_of_the_table() -> None:
    known, recorded = known_labels(), {each.name for each in recordings(Objectives())}
    texts = expressions()
    assert len(texts) > 100
    for text in texts:
        for name in re.findall(r"service:\w+:\w+", text):
            assert name in recorded, f"{name} in {text}"
        for name, selector in SELECTOR.findall(re.sub(r"service:\w+:\w+", "recorded", text)):
            assert name in known, f"{name} in {text}"
            labels = set(re.findall(r"(\w+)\s*(?:=~|!~|=|!=)", selector))
            assert labels <= known[name] | {"job", "instance"}, f"{labels} in {text}"


def test_the_dashboard_has_a_panel_for_each_metric() -> None:
    text = json.dumps(grafana("m", Objectives()))
    assert [
        family.name for family in FAMILIES if not re.search(rf"slipway_{family.name}(_total|_bucket)?\{{", text)
    ] == []


def test_panels_of_the_dashboard_do_not_overlap() -> None:
    dashboard = grafana("m", Objectives())
    panels = [inner for outer in dashboard["panels"] for inner in (outer, *outer.get("panels", []))]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for group in (dashboard["panels"], *(outer.get("panels", []) for outer in dashboard["panels"])):
        cells = [
            (x, y)
            for place in (panel["gridPos"] for panel in group)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        ]
        assert len(set(cells)) == len(cells) and all(x < 24 for x, _ in cells)


def test_objectives_are_bounds_of_buckets() -> None:
    default = Objectives()
    assert default.first_token_s in bucket_bounds(LATENCIES["time_to_first_token"])
    assert default.token_s in bucket_bounds(LATENCIES["inter_token_latency"])
