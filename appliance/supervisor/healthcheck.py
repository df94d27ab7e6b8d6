"""`slipway healthcheck [URL]`: exit with 0 if the service is ready, else with 1 and one line with the reason. It works
without curl."""

import asyncio
import sys
from urllib.parse import urlsplit

from appliance.config.environment import environment
from appliance.runtime import listener, probe
from appliance.supervisor import rundir

_TIMEOUT_S = 5.0


def main(url: str | None) -> int:
    """Check the service at `url`, or the appliance that runs on this host if `url` is None. Return the exit code."""
    if url is None:
        found = rundir.running(environment())
        if len(found) != 1:
            known = ", ".join(address.url for address in found) or "none"
            return _unhealthy(
                f"expected one running appliance of this user, found {known}; pass a URL: slipway healthcheck URL"
            )
        host, port, tls = found[0].host, found[0].port, found[0].tls
    else:
        parts = urlsplit(url if "//" in url else f"//{url}")
        host, port, tls = parts.hostname or "127.0.0.1", parts.port or 8000, parts.scheme == "https"
    answer = asyncio.run(probe.get(host, port, "/ready", _TIMEOUT_S, tls=tls))
    if answer is None:
        return _unhealthy(f"no reply from {listener.url(host, port, tls=tls)}/ready within {_TIMEOUT_S:g} s")
    status, body = answer
    if status != 200:
        return _unhealthy(f"not ready (status {status}): {probe.readiness(body).text()}")
    print("ready")
    return 0


def _unhealthy(message: str) -> int:
    print(message, file=sys.stderr)
    return 1
