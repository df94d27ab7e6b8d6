"""Health and information routes: /live, /ready, /health, /ping, /version, /load, /load/history.

/v1/health is NVIDIA NIM's prefix, /v2/health that of the Open Inference Protocol.
"""

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query, Request
from starlette.responses import JSONResponse, Response

from appliance.observability.history import MAX_SAMPLES
from appliance.server.http.service import Service, service_of
from appliance.server.routing.engine import Engine
from appliance.server.routing.generation import Generation
from engine.api.messages import RankMemory

router = APIRouter(tags=["health"])


def readiness(service: Service) -> dict[str, Any]:
    """Return the state and the progress of the service.

    `status` is starting, loading, ready, restarting, failed or draining; `phase` is more detailed while loading. One
    ready engine is sufficient. `reason` explains why no engine comes back, if the appliance is halted.
    """
    engines = service.router.engines
    behind = min(engines, key=lambda engine: engine.progress)
    if service.draining:
        status = phase = "draining"
    elif service.halted is not None:
        status = phase = "failed"
    elif service.router.serves:
        status = phase = "ready" if service.healthy else "loading"
    else:
        kinds = {engine.client.state.kind for engine in engines}
        phase = behind.phase
        status = "loading" if "loading" in kinds else phase
    progress = sum(engine.progress for engine in engines) / len(engines)
    body = {
        "status": status,
        "phase": phase,
        "progress": round(progress, 4),
        "engines": [_engine(engine) for engine in engines],
    }
    return body if service.halted is None else body | {"reason": msgspec.to_builtins(service.halted)}


def _engine(engine: Engine[Generation]) -> dict[str, Any]:
    """Return the phase of an engine.

    A ready engine also has its start time, memory usage per rank and self-test result.
    """
    status: dict[str, Any] = {"name": f"engine-{engine.label}", "phase": engine.phase}
    status["progress"] = round(engine.progress, 4)
    if engine.detail:
        status["detail"] = engine.detail
    ready = engine.client.ready
    if engine.serves and ready is not None:
        status["start_s"] = round(engine.start_s, 3)
        status["memory"] = [_memory(one) for one in ready.memory]
        status["self_test"] = None if ready.self_test is None else msgspec.to_builtins(ready.self_test)
    return status


def _memory(memory: RankMemory) -> dict[str, Any]:
    """Return memory usage in bytes.

    `parts` has the planned and the actual usage, `mapped` the weights that are read from their file, and `measured` the
    remaining and the peak usage of each startup phase.
    """
    parts = dict.fromkeys((*memory.planned, *memory.held))
    return {
        "parts": {part: {"planned": memory.planned.get(part), "real": memory.held.get(part)} for part in parts},
        "mapped": memory.mapped,
        "measured": {phase: {"kept": taken.kept, "peak": taken.peak} for phase, taken in memory.taken.items()},
    }


@router.get("/live")
@router.get("/v1/health/live")
@router.get("/v2/health/live")
async def live() -> JSONResponse:
    """Return 200 whenever the gateway answers."""
    return JSONResponse({"status": "live"})


@router.get("/ready")
@router.get("/v1/health/ready")
@router.get("/v2/health/ready")
async def ready(request: Request) -> JSONResponse:
    """Return 200 if a request would be served now, else 503 with phase and progress."""
    service = service_of(request)
    return JSONResponse(readiness(service), 200 if service.serves else 503)


@router.get("/health")
@router.get("/ping")
@router.post("/ping")
async def health(request: Request) -> Response:
    """Return an empty 200 while an engine is ready, also during a drain, else 503."""
    service = service_of(request)
    return Response(status_code=200 if service.healthy else 503)


@router.get("/version")
async def version(request: Request) -> JSONResponse:
    return JSONResponse({"version": service_of(request).config.version})


@router.get("/load")
async def load(request: Request) -> JSONResponse:
    """Return the number of requests in progress, including streams."""
    return JSONResponse({"server_load": service_of(request).open_requests})


@router.get("/load/history")
async def load_history(
    request: Request, limit: Annotated[int, Query(ge=1, le=MAX_SAMPLES)] = MAX_SAMPLES
) -> JSONResponse:
    """Return the load of the last half hour, one list per value.

    The lists have a sample every `interval_s` seconds, the oldest first.
    """
    return JSONResponse(service_of(request).history.columns(limit))
