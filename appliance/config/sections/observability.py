"""Logs and metrics: `observability`."""

from typing import Annotated, Literal

from pydantic import Field

from appliance.config.key import LIVE, SERVICE, declare
from appliance.config.sections.values import Section


class Observability(Section):
    log_level: Literal["debug", "info", "warning", "error"] = declare(
        "info",
        effect=LIVE,
        aliases={"NVIDIA NIM": "NIM_LOG_LEVEL", "synonyms": "log_level"},
    )
    """Minimum severity of log records."""
    # the launcher uses it for its own log lines
    log_format: Literal["text", "json"] = declare("text", effect=SERVICE)
    """Log one line of text or one JSON object per record."""
    log_requests: bool = declare(False, effect=LIVE, aliases={"vLLM": "enable_log_requests"})
    """Log the parameters of each request, without prompt text."""
    log_outputs: Literal["off", "final", "deltas"] = declare("off", effect=LIVE)
    """Log generated text: once per reply, or also each streamed delta."""
    vllm_metrics: bool = declare(True, effect=LIVE)
    """Publish the metrics under vLLM's names too, for existing dashboards and autoscalers."""
    timelines: Annotated[int, Field(ge=0)] = declare(1000, effect=LIVE, example=1000)
    """Number of replies whose timeline is available to `slipway why ID`; 0 keeps none."""
