"""POST /start_profile and /stop_profile, as in vLLM: 404 unless the manifest has `observability.profiler_folder`.

With API keys, only keys with `profile=yes` may use them, because a profile slows down the requests of all clients.
"""

import asyncio
from typing import Any, Literal

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse

from appliance.server.errors.api import BadRequest, Forbidden, NotFound, Unavailable
from appliance.server.http.service import service_of
from engine.api.errors import EngineGone
from engine.api.messages import Profiled

router = APIRouter(tags=["profiler"])

RETRY_AFTER_S = 3


@router.post("/start_profile")
async def start_profile(request: Request) -> JSONResponse:
    """Start the profiler of each engine."""
    await _profile(request, "start")
    return JSONResponse({"status": "started"})


@router.post("/stop_profile")
async def stop_profile(request: Request) -> JSONResponse:
    """Stop the profiler of each engine and return the files that it wrote."""
    answers = await _profile(request, "stop")
    return JSONResponse({"status": "stopped", "files": [file for answer in answers for file in answer.files]})


async def _profile(request: Request, verb: Literal["start", "stop"]) -> list[Profiled]:
    """Send a command to all engines that are ready."""
    service, path, key = service_of(request), request.url.path, request.state.key
    if not service.config.profiler:
        raise NotFound(f"{path} is not enabled: set observability.profiler_folder to a folder for the profiles.")
    if key is not None and not key.profile:
        raise Forbidden("This API key may not use the profiler; ask the operator to set profile=yes for the key.")
    clients = [engine.client for engine in service.router.engines if engine.client.state.kind == "ready"]
    if not clients:
        raise Unavailable("No engine is ready to be profiled.", RETRY_AFTER_S)
    found: list[Any] = await asyncio.gather(*(client.profile(verb) for client in clients), return_exceptions=True)
    for one in found:
        if isinstance(one, EngineGone):
            raise Unavailable(f"{one}.", RETRY_AFTER_S)
        if isinstance(one, BaseException):
            raise one
        if one.error:
            raise BadRequest(f"{one.error[:1].upper()}{one.error[1:]}.")
    return found
