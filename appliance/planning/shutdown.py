"""Shutdown after SIGTERM: time to finish open requests, and time for load balancers to notice."""

from appliance.config.platform import MARGIN_S
from appliance.config.settings import Settings
from appliance.planning.choice import Choice, refuse

LINGER_S = 5.0  # by then Kubernetes has removed the endpoint from the tables of every node
MOST_OF_DRAIN = 0.25  # the rest is for open requests


def shutdown_timing(settings: Settings) -> tuple[Choice[float], Choice[float]]:
    """Return lifecycle.drain and lifecycle.linger in seconds. Raise Refused if the linger exceeds the drain."""
    wanted, platform = settings.manifest.lifecycle, settings.platform
    if wanted.drain == "auto":
        drain = Choice(
            max(0.0, platform.grace_s - MARGIN_S), f"{platform.source}; the rest must end within {MARGIN_S:g} s"
        )
    else:
        drain = Choice(wanted.drain)
    if wanted.linger != "auto":
        if wanted.linger > drain.value:
            message = f"{wanted.linger:g} s is longer than lifecycle.drain, which is {drain.value:g} s and includes it"
            refuse(settings, "lifecycle.linger", message, instead=f"{drain.value:g}s")
        return drain, Choice(wanted.linger)
    if not platform.balances:
        return drain, Choice(0.0, "no known load balancer")
    least = min(LINGER_S, MOST_OF_DRAIN * drain.value)
    return drain, Choice(least, "time for load balancers to see /ready fail")
