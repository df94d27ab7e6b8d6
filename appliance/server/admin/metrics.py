"""/metrics: the Prometheus text exposition, or OpenMetrics with exemplars."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from appliance.server.admin.health import readiness
from appliance.server.http.service import service_of

router = APIRouter(tags=["metrics"])


@router.get("/metrics")
@router.get("/metrics/", include_in_schema=False)
async def metrics(request: Request) -> Response:
    service = service_of(request)
    service.metrics.phase = readiness(service)["phase"]
    body, media_type = service.metrics.render(request.headers.get("accept", ""))
    return Response(body, media_type=media_type)
