"""Writes docs/metrics.md from the families in appliance/observability/families.py: every metric that /metrics
publishes."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from appliance.observability.families import Family, counters, gauges, histograms  # noqa: E402
from tools.pages import write_pages  # noqa: E402

HEAD = """# Metrics

<!-- made by tools/metrics_page.py from appliance/observability/families.py; a test keeps it so -->

`GET /metrics`, Prometheus text. All series exist, with 0, from the start. With `observability.vllm_metrics` the same
numbers also appear under the names in the last column. Labels: `model_name`, `engine` (its number) where a metric is
of one engine, and those named here. HTTP requests are counted as `http_requests_total`, `http_request_duration_seconds`
and sizes; the service itself tells `slipway_build_info` and `slipway_phase`.

| metric | kind | further labels | meaning | also as |
|---|---|---|---|---|
"""


def _row(family: Family) -> str:
    end = "_total" if family.kind == "counter" else ""
    also = f"`vllm:{family.vllm}{end}`" if family.vllm else "–"
    labels = ", ".join(f"`{label}`" for label in family.labels) or "–"
    return f"| `slipway_{family.name}{end}` | {family.kind} | {labels} | {family.help} | {also} |\n"


def metrics_page() -> str:
    """The page as text."""
    return HEAD + "".join(map(_row, (*gauges(), *counters(), *histograms(2048))))


if __name__ == "__main__":
    write_pages(__doc__, {"metrics.md": metrics_page})
