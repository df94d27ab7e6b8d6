"""`slipway usage`: sequences and tokens by day, API key and model of a running service."""

from collections.abc import Iterator
from typing import Any

import httpx

from appliance.cli.chat import CONNECT_TIMEOUT_S, ChatError, service_url
from engine.api.printable import printable

COLUMNS = ("date", "key", "model", "sequences", "prompt_tokens", "cached_tokens", "completion_tokens")
NUMBERS = COLUMNS[3:]


def usage(
    url: str, format: str, *, start: str | None = None, end: str | None = None, api_key: str | None = None
) -> Iterator[str]:
    """Yield the lines: a table (`text`), or the route's JSON or CSV. Raise ChatError if the service cannot be reached
    or refuses the request."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    asked = {"start": start, "end": end, "format": "csv" if format == "csv" else "json"}
    with httpx.Client(base_url=service_url(url), headers=headers, timeout=CONNECT_TIMEOUT_S) as client:
        try:
            reply = client.get("/v1/usage", params={name: value for name, value in asked.items() if value})
        except httpx.HTTPError as error:
            raise ChatError(f"{url}: {error}; set the URL of the service with --url") from error
    if reply.status_code != 200:
        try:
            message = reply.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = f"HTTP {reply.status_code}"
        raise ChatError(printable(str(message)))
    if format == "text":
        yield from _table(reply.json())
    else:
        yield from reply.text.splitlines()


def _table(found: dict[str, Any]) -> Iterator[str]:
    rows = [[printable(str(row[name])) for name in COLUMNS] for row in found["data"]]
    rows.append(["total", "", "", *(str(found["total"][name]) for name in NUMBERS)])
    widths = [max(map(len, column)) for column in zip(COLUMNS, *rows, strict=True)]
    for row in (list(COLUMNS), *rows):
        cells = [
            cell.rjust(width) if name in NUMBERS else cell.ljust(width)
            for name, cell, width in zip(COLUMNS, row, widths, strict=True)
        ]
        yield "  ".join(cells).rstrip()
