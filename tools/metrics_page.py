"""Write docs/metrics.md from the families in engine/metrics/families.py: every metric of /metrics."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from engine.metrics.families import Family, counters, gauges, histograms  # noqa: E402
from tools.pages import write_pages  # noqa: E402

HEAD = """# Metrics

<!-- made by tools/metrics_page.py from engine/metrics/families.py; a test keeps it so -->

Scrape `GET /metrics` (Prometheus text format). [alerts.md](alerts.md) has alerts on these metrics. All series exist
from the start and begin at zero. `observability.vllm_metrics` also publishes the names in the last column. All metrics
have the label `model_name`, metrics of one engine have `engine` (its index), and further labels are listed here. HTTP
metrics are `http_requests_total`, `http_request_duration_seconds` and sizes; `slipway_build_info` and `slipway_phase`
describe the service.

A scrape that asks for OpenMetrics (`Accept: application/openmetrics-text`, as Prometheus does with the feature
`exemplar-storage`) gets exemplars: the buckets of latencies have the trace and the span of their last traced request
([traces.md](traces.md)), so that Grafana links a slow bucket to a trace.

`observability.mfu_metrics` adds `slipway_flops_total`, `slipway_read_bytes_total` and `slipway_step_seconds_total`:
matrix products and attention of the text model, the weights that steps read, and their keys and values, over all ranks.
Towers of images and audio, draft models and recurrences are not counted. `slipway_hardware_flops_per_second` and
`slipway_hardware_bytes_per_second` are the limits of the hardware in `slipway plan`. The recording rules
`service:slipway_mfu:ratio_rate5m` and `service:slipway_bandwidth_utilization:ratio_rate5m` divide them.

| metric | kind | further labels | meaning | also as |
|---|---|---|---|---|
"""


def _row(family: Family) -> str:
    end = "_total" if family.kind == "counter" else ""
    also = f"`vllm:{family.vllm}{end}`" if family.vllm else "–"
    labels = ", ".join(f"`{label}`" for label in family.labels) or "–"
    return f"| `slipway_{family.name}{end}` | {family.kind} | {labels} | {family.help} | {also} |\n"


def metrics_page() -> str:
    """Return the page as text."""
    return HEAD + "".join(map(_row, (*gauges(), *counters(), *histograms(2048))))


if __name__ == "__main__":
    write_pages(__doc__, {"metrics.md": metrics_page})
