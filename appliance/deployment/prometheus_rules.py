"""Recording and alert rules for Prometheus (`rule_files`), with thresholds from the manifest."""

from typing import Any

from appliance.observability.alerts import ALERTS, Thresholds
from appliance.observability.rules import Objectives, recordings
from appliance.planning.plan import Plan
from engine.metrics.families import histograms

RUNBOOK = "docs/alerts.md"


def thresholds(plan: Plan, objectives: Objectives) -> Thresholds:
    """Return the values of the manifest that alerts compare with."""
    manifest = plan.manifest
    return Thresholds(
        restarts=manifest.lifecycle.restart.max,
        window_s=manifest.lifecycle.restart.window,
        startup_s=manifest.health.startup_budget,
        waiting=manifest.limits.max_waiting,
        objectives=objectives,
    )


def prometheus_rules(limits: Thresholds) -> dict[str, Any]:
    """Return the content of the rule file."""
    alerts = [
        {
            "alert": alert.name,
            "expr": alert.expr(limits),
            **({} if alert.lasting == "0m" else {"for": alert.lasting}),
            "labels": {"severity": alert.severity},
            "annotations": {
                "summary": alert.summary,
                "description": alert.meaning,
                "runbook": f"{RUNBOOK}#{alert.name.lower()}",
            },
        }
        for alert in ALERTS
    ]
    records = [{"record": each.name, "expr": each.expr} for each in recordings(limits.objectives)]
    return {"groups": [{"name": "slipway-recordings", "rules": records}, {"name": "slipway-alerts", "rules": alerts}]}


def bucket_bounds(name: str) -> tuple[float, ...]:
    """Return the bounds of a histogram's buckets, in seconds."""
    return next(family.buckets for family in histograms(1) if family.name == name)
