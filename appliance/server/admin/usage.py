"""GET /v1/usage: sequences and tokens by day, API key and model, as JSON or CSV."""

from datetime import date
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Query, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from appliance.observability.usage import as_csv, total
from appliance.server.http.service import service_of

router = APIRouter(tags=["usage"])


@router.get("/v1/usage")
async def usage(
    request: Request,
    start: date | None = None,
    end: date | None = None,
    format: Annotated[Literal["json", "csv"], Query()] = "json",
) -> Response:
    """Return the usage from the day `start` to `end` (UTC, both included). A key sees its own usage; a key with
    `usage=yes` sees the usage of all keys."""
    key = request.state.key
    own = None if key is None or key.usage else key.shown
    rows = service_of(request).usage.rows(start, end, own)
    if format == "csv":
        return PlainTextResponse(as_csv(rows), media_type="text/csv")
    return JSONResponse({"data": [msgspec.to_builtins(row) for row in rows], "total": total(rows)})
