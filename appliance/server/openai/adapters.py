"""Routes of vLLM and of Amazon SageMaker that load and unload LoRA adapters.

They get 404 unless `adapter_loading.folders` names folders. With API keys, only keys with `adapters=yes` change
adapters.
"""

import json
from typing import Any

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, ConfigDict
from starlette.responses import JSONResponse, PlainTextResponse, Response

from appliance.server.errors.api import BadRequest, Forbidden, InvalidInput, NotFound
from appliance.server.http.body import json_body, read_body
from appliance.server.http.service import service_of


async def enabled(request: Request) -> None:
    """Raise NotFound unless the manifest permits to load adapters."""
    if not service_of(request).config.adapter_folders:
        raise NotFound(
            f"{request.url.path} is not enabled: set adapter_loading.folders to the folders from which adapters may be "
            "loaded."
        )


async def permitted(request: Request) -> None:
    """Raise Forbidden unless the API key permits to load adapters."""
    key = request.state.key
    if key is not None and not key.adapters:
        raise Forbidden(
            "This API key may not load or unload adapters; ask the operator to set adapters=yes for the key."
        )


router = APIRouter(tags=["adapters"], dependencies=[Depends(enabled)])
_CHANGES = [Depends(permitted)]


class LoadAdapterRequest(BaseModel):
    """Body of /v1/load_lora_adapter."""

    model_config = ConfigDict(extra="allow")

    lora_name: str = ""
    """Name that requests use as `model`."""
    lora_path: str = ""
    """Folder of the adapter, in one of the folders of the manifest."""
    load_inplace: bool = False
    """Read the files again if an adapter with this name is loaded."""


class UnloadAdapterRequest(BaseModel):
    """Body of /v1/unload_lora_adapter."""

    model_config = ConfigDict(extra="allow")

    lora_name: str = ""
    """Name of a loaded adapter."""


class RegisterAdapterRequest(BaseModel):
    """Body of POST /adapters of Amazon SageMaker."""

    model_config = ConfigDict(extra="allow")

    name: str
    src: str
    """Folder of the adapter, in one of the folders of the manifest."""
    preload: bool = True
    """Ignored: an adapter is always read when it is registered."""
    pin: bool = False
    """Only false: slots are shared by all adapters."""


@router.post("/v1/load_lora_adapter", dependencies=_CHANGES, openapi_extra=json_body(LoadAdapterRequest))
async def load_adapter(request: Request) -> Response:
    """Load a LoRA adapter. Requests can select it once the reply has status 200."""
    body = await read_body(request, LoadAdapterRequest)
    if not body.lora_name or not body.lora_path:
        raise InvalidInput("Both 'lora_name' and 'lora_path' must be provided.")
    await service_of(request).adapters.load(body.lora_name, body.lora_path, in_place=body.load_inplace)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter", dependencies=_CHANGES, openapi_extra=json_body(UnloadAdapterRequest))
async def unload_adapter(request: Request) -> Response:
    """Unload a LoRA adapter. New requests for it get 404, and open ones are completed."""
    body = await read_body(request, UnloadAdapterRequest)
    if not body.lora_name:
        raise InvalidInput("'lora_name' needs to be provided to unload a LoRA adapter.")
    await service_of(request).adapters.unload(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


@router.post("/adapters", dependencies=_CHANGES, openapi_extra=json_body(RegisterAdapterRequest))
async def register_adapter(request: Request) -> Response:
    """Load a LoRA adapter, as Amazon SageMaker asks for it. Without a JSON body, query parameters are read."""
    given = await _registration(request)
    await service_of(request).adapters.load(given["name"], given["src"])
    return PlainTextResponse(f"Adapter {given['name']} registered")


@router.get("/adapters")
async def list_adapters(request: Request) -> JSONResponse:
    """Return the names of the loaded adapters."""
    return JSONResponse({"adapters": [{"name": name} for name in service_of(request).adapters.names]})


@router.delete("/adapters/{name:path}", dependencies=_CHANGES)
async def unregister_adapter(request: Request, name: str) -> Response:
    """Unload a LoRA adapter."""
    await service_of(request).adapters.unload(name)
    return PlainTextResponse(f"Adapter {name} unregistered")


async def _registration(request: Request) -> dict[str, str]:
    """Return name and src. Raise BadRequest if one is missing, or for an adapter that is to be pinned."""
    body = await request.body()
    try:
        value: Any = json.loads(body) if body else dict(request.query_params)
    except (ValueError, RecursionError):
        value = dict(request.query_params)
    given = value if isinstance(value, dict) else {}
    for field in ("name", "src"):
        if not isinstance(given.get(field), str) or not given[field]:
            raise BadRequest(f"{field} must be a text that is not empty.", field)
    if str(given.get("pin", False)).lower() not in ("false", "0"):
        raise BadRequest(
            "pin is not supported: the slots are shared by all adapters (adapter_loading.max_active).", "pin"
        )
    return {"name": given["name"], "src": given["src"]}
