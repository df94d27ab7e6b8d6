"""Write docs/alerts.md from the alerts in appliance/observability/alerts.py: each alert with an operator's actions."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from appliance.observability.alerts import ALERTS, Alert, Thresholds  # noqa: E402
from appliance.observability.rules import recordings  # noqa: E402
from tools.pages import write_pages  # noqa: E402

HEAD = """# Alerts

<!-- made by tools/alerts_page.py from appliance/observability/alerts.py; a test keeps it so -->

Find the alert that fired, and follow its actions in order. `slipway render prometheus-rules MANIFEST` writes the rules,
and `slipway render grafana MANIFEST` a dashboard with every metric of [metrics.md](metrics.md).
[deployment.md](deployment.md#alerts-and-dashboard) shows both. Expressions on this page have the values of a manifest
without keys for them. `critical`: clients are affected now. `warning`: a task for the next working day.

"""


def _section(alert: Alert) -> str:
    after = "at once" if alert.lasting == "0m" else f"after {alert.lasting}"
    actions = "\n".join(f"{number}. {text}" for number, text in enumerate(alert.actions, 1))
    expression = alert.expr(Thresholds()).replace(" or ", "\nor ")
    head = f"## {alert.name}\n\n{alert.severity}, {after}. {alert.meaning}"
    return f"{head}\n\n{actions}\n\n```promql\n{expression}\n```\n"


def alerts_page() -> str:
    """Return the page as text."""
    rows = "\n".join(f"| `{each.name}` | `{each.expr}` |" for each in recordings(Thresholds().objectives))
    table = f"## Recording rules\n\n| series | expression |\n|---|---|\n{rows}\n"
    return HEAD + "\n".join(map(_section, ALERTS)) + "\n" + table


if __name__ == "__main__":
    write_pages(__doc__, {"alerts.md": alerts_page})
