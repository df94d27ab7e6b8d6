"""Models that a platform loads into a running service: LoRA adapters of the served model.

`/models` is the contract of Amazon SageMaker's multi-model endpoints, `/v2/repository` the extension of the Open
Inference Protocol. Both get 404 unless `adapter_loading.folders` names folders.
"""

import asyncio
import json
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, ConfigDict
from starlette.responses import JSONResponse, Response

from appliance.server.errors.api import Conflict, InvalidBody, NotFound, NotSupported
from appliance.server.http.body import apart, json_body, read_body, read_json
from appliance.server.http.service import Service, service_of
from appliance.server.openai.adapters import enabled, permitted
from appliance.server.platforms.invocations import invoke

router = APIRouter(tags=["models"], dependencies=[Depends(enabled)])
_CHANGES = [Depends(permitted)]

MAX_PAGE = 1000


class LoadModelRequest(BaseModel):
    """Body of POST /models."""

    model_config = ConfigDict(extra="allow")

    model_name: str
    """Name of the new model."""
    url: str
    """Folder or archive of a LoRA adapter, in one of the folders of the manifest."""


@router.post("/models", dependencies=_CHANGES, openapi_extra=json_body(LoadModelRequest))
async def load_model(request: Request) -> JSONResponse:
    """Load a LoRA adapter as a model. 409 if the name is in use."""
    service, body = service_of(request), await read_body(request, LoadModelRequest)
    if body.model_name in service.config.names or body.model_name in service.adapters:
        raise Conflict(f"The model {body.model_name} is loaded.", "model_name")
    await service.adapters.load(body.model_name, body.url)
    return JSONResponse(_shown(service, body.model_name))


@router.get("/models")
async def list_models(
    request: Request, next_page_token: str = "", limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 100
) -> JSONResponse:
    """Return the names of the models by page. `next_page_token` is the last name of the page before."""
    service = service_of(request)
    names = sorted(name for name in _names(service) if name > next_page_token)
    page = names[:limit]
    more = {"nextPageToken": page[-1]} if len(names) > limit else {}
    return JSONResponse({"models": [_shown(service, name) for name in page], **more})


@router.get("/models/{name:path}")
async def show_model(request: Request, name: str) -> JSONResponse:
    """Return one model."""
    service = service_of(request)
    _check(service, name)
    return JSONResponse(_shown(service, name))


@router.delete("/models/{name:path}", dependencies=_CHANGES)
async def unload_model(request: Request, name: str) -> JSONResponse:
    """Unload a LoRA adapter. Open requests with it are completed."""
    service = service_of(request)
    _check(service, name)
    shown = _shown(service, name)
    await _unload(service, name)
    return JSONResponse(shown)


@router.post("/models/{name:path}/invoke")
async def invoke_model(request: Request, name: str) -> Response:
    """Serve a body of /invocations with this model."""
    service, body = service_of(request), await read_json(request)
    _check(service, name)
    return await invoke(service, request, await apart(len(body), _with_model, body, name))


@router.post("/v2/repository/index")
async def index(request: Request) -> JSONResponse:
    """Return all models."""
    service = service_of(request)
    state = "READY" if service.serves else "UNAVAILABLE"
    return JSONResponse([{"name": name, "version": "1", "state": state, "reason": ""} for name in _names(service)])


@router.post("/v2/repository/models/{name:path}/load", dependencies=_CHANGES)
async def load_named(request: Request, name: str) -> JSONResponse:
    """Load the LoRA adapter in the sub-folder of this name. A model that is loaded stays so."""
    service = service_of(request)
    if name not in service.config.names and name not in service.adapters:
        folder = await asyncio.to_thread(service.adapters.folders.named, name)
        if folder is None:
            raise NotFound(f"No folder of adapter_loading.folders has the model {name[:200]}.", "name")
        await service.adapters.load(name, str(folder))
    return JSONResponse({"name": name, "load": True})


@router.post("/v2/repository/models/{name:path}/unload", dependencies=_CHANGES)
async def unload_named(request: Request, name: str) -> JSONResponse:
    """Unload a LoRA adapter."""
    service = service_of(request)
    _check(service, name)
    await _unload(service, name)
    return JSONResponse({"name": name, "unload": True})


def _with_model(body: bytes, name: str) -> bytes:
    """Return a body with this model. Raise InvalidBody."""
    try:
        value: Any = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidBody(f"JSON decode error: {error}") from None
    if not isinstance(value, dict):
        raise InvalidBody("The body must be a JSON object.")
    return json.dumps({**value, "model": name}).encode()


def _names(service: Service) -> tuple[str, ...]:
    return (*service.config.names, *service.adapters.names)


def _check(service: Service, name: str) -> None:
    if name not in _names(service):
        raise NotFound(f"The model {name[:200]} is not loaded.", "name")


def _shown(service: Service, name: str) -> dict[str, str]:
    """Return a model as SageMaker lists it. The path of an adapter is that of the request that loaded it."""
    return {"modelName": name, "modelUrl": service.adapters.source(name)}


async def _unload(service: Service, name: str) -> None:
    if name in service.config.names:
        raise NotSupported(f"{name} is the model of the service, which cannot be unloaded.", "name")
    await service.adapters.unload(name)
