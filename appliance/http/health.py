"""Probes and small facts: /live, /ready, /health, /ping, /version, /load."""

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from appliance.http.service import Service, service_of

router = APIRouter(tags=["health"])


def readiness(service: Service) -> dict[str, Any]:
    """What the service is doing, and how far it is. `status`: starting, loading, ready, restarting, failed, draining;
    `phase` is finer while it loads. One serving engine is enough to be ready."""
    engines = service.router.engines
    behind = min(engines, key=lambda engine: engine.progress)
    if service.draining:
        status = phase = "draining"
    elif service.router.serves:
        status = phase = "ready" if service.has_text else "loading"
    else:
        kinds = {engine.client.state.kind for engine in engines}
        phase = behind.phase
        status = "loading" if "loading" in kinds else phase
    progress = sum(engine.progress for engine in engines) / len(engines)
    return {
        "status": status,
        "phase": phase,
        "progress": round(progress, 4),
        "engines": [
            {"name": f"engine-{engine.label}", "phase": engine.phase, "progress": round(engine.progress, 4)}
            | ({"detail": engine.detail} if engine.detail else {})
            for engine in engines
        ],
    }


@router.get("/live")
async def live() -> JSONResponse:
    """200 as long as the gateway answers at all."""
    return JSONResponse({"status": "live"})


@router.get("/ready")
async def ready(request: Request) -> JSONResponse:
    """200 when a request would be served now, else 503 with phase and progress."""
    service = service_of(request)
    return JSONResponse(readiness(service), 200 if service.serves else 503)


@router.get("/health")
@router.get("/ping")
@router.post("/ping")
async def health(request: Request) -> Response:
    """Empty 200 while an engine serves, also during a drain; else 503."""
    service = service_of(request)
    return Response(status_code=200 if service.router.serves and service.has_text else 503)


@router.get("/version")
async def version(request: Request) -> JSONResponse:
    return JSONResponse({"version": service_of(request).config.version})


@router.get("/load")
async def load(request: Request) -> JSONResponse:
    """Requests that hold the service now, streams included."""
    return JSONResponse({"server_load": service_of(request).open_requests})
