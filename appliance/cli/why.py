"""`slipway why ID`: show the timeline of a request of a running service, line by line."""

from collections.abc import Iterator
from typing import Any

import httpx

from appliance.cli.chat import CONNECT_TIMEOUT_S, ChatError, service_url
from engine.api.printable import printable

STATES = {
    "media": "loading media",
    "gateway": "in the gateway",
    "held": "waiting for an engine",
    "queued": "queued",
    "blocked": "first in the queue",
    "preempted": "preempted",
    "prefill": "prefill",
    "decode": "decode",
}


def why(url: str, request: str, *, api_key: str | None = None) -> Iterator[str]:
    """Yield the lines. Raise ChatError if the service cannot be reached, or does not know the request."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    with httpx.Client(base_url=service_url(url), headers=headers, timeout=CONNECT_TIMEOUT_S) as client:
        try:
            reply = client.get(f"/v1/requests/{request}/why")
        except httpx.HTTPError as error:
            raise ChatError(f"{url}: {error}; set the URL of the service with --url") from error
    if reply.status_code != 200:
        try:
            message = reply.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = f"HTTP {reply.status_code}"
        raise ChatError(printable(str(message)))
    for choice in reply.json()["choices"]:
        yield from timeline_lines(choice)


def timeline_lines(choice: dict[str, Any]) -> Iterator[str]:
    total = sum(choice["spent_ms"].values())
    spent = ", ".join(f"{format_ms(value)} {STATES[name]}" for name, value in choice["spent_ms"].items() if value >= 1)
    yield f"{printable(choice['id'])}: {format_ms(total)}" + (f" ({spent})" if spent else "")
    for event in choice["events"]:
        yield f"  {format_ms(event['at_ms']):>10}  {printable(event['text'])}"
    if "left_out" in choice:
        yield f"  ({choice['left_out']} events in the middle were dropped)"


def format_ms(value: float) -> str:
    return f"{value:,.0f} ms" if value < 10_000 else f"{value / 1000:,.1f} s"
