"""/metrics: the Prometheus text exposition."""

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.responses import Response

from appliance.server.admin.health import readiness
from appliance.server.http.service import service_of

router = APIRouter(tags=["metrics"])


@router.get("/metrics")
@router.get("/metrics/", include_in_schema=False)
async def metrics(request: Request) -> Response:
    service = service_of(request)
    service.metrics.phase = readiness(service)["phase"]
    return Response(service.metrics.render(), media_type=CONTENT_TYPE_PLAIN_0_0_4)
