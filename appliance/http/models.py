"""/v1/models and /v1/models/{id}: the served names, canonical first."""

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse

from appliance.http.errors import NotFound
from appliance.http.service import Service, service_of

router = APIRouter(tags=["models"])


def _card(service: Service, name: str) -> dict[str, Any]:
    canonical = service.config.names[0]
    return {
        "id": name,
        "object": "model",
        "created": int(service.started_s),
        "owned_by": "slipway",
        "root": canonical,
        "parent": None,
        "max_model_len": service.config.max_context,
        "permission": [],
    }


@router.get("/v1/models")
async def list_models(request: Request) -> JSONResponse:
    service = service_of(request)
    return JSONResponse({"object": "list", "data": [_card(service, name) for name in service.config.names]})


@router.get("/v1/models/{name:path}")
async def retrieve_model(request: Request, name: str) -> JSONResponse:
    """One model; a name with slashes may come URL-encoded or as it is."""
    service = service_of(request)
    if name not in service.config.names:
        aliases = ", ".join(service.config.names)
        raise NotFound(f"The model `{name}` does not exist. Valid aliases: {aliases}.", "model")
    return JSONResponse(_card(service, name))
