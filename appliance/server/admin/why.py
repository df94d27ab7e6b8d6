"""GET /v1/requests: recent requests. GET /v1/requests/{id}/why: the timeline of one request (docs/http.md)."""

from itertools import islice
from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import JSONResponse

from appliance.observability.metrics import now
from appliance.server.errors.api import NotFound
from appliance.server.http.service import service_of

router = APIRouter(tags=["why"])

PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_")


@router.get("/v1/requests")
async def requests(request: Request, limit: Annotated[int, Query(ge=1, le=200)] = 50) -> JSONResponse:
    """Return state, lengths and times of the most recent sequences, including running ones, the newest first."""
    timelines = service_of(request).router.timelines
    return JSONResponse({"data": [timeline.summary(now()) for timeline in islice(timelines.newest(), limit)]})


@router.get("/v1/requests/{request_id}/why")
async def why(request: Request, request_id: str) -> JSONResponse:
    """Return the timeline of each choice of a request: when it waited, the reason, and when it ran."""
    service = service_of(request)
    bare = next((request_id.removeprefix(each) for each in PREFIXES if request_id.startswith(each)), request_id)
    timelines = list(service.router.timelines.of(bare))
    if not timelines:
        known = (
            f"timelines of the last {service.config.observability.timelines} replies are kept (observability.timelines)"
        )
        message = (
            f"There is no timeline of {request_id[:200]!r}; {known}. Use the ID of a reply or its X-Request-Id header."
        )
        raise NotFound(message, "request_id")
    return JSONResponse({"id": request_id, "choices": [timeline.as_dict() for timeline in timelines]})
