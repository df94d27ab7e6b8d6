"""/v1/models and /v1/models/{id}: the served names, the canonical one first, then the LoRA adapters.

Requests with an anthropic-version header get the fields of both APIs.
"""

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse

from appliance.server.http.service import Service, service_of

router = APIRouter(tags=["models"])


def _card(service: Service, name: str, both: bool) -> dict[str, Any]:
    canonical = service.config.names[0]
    card = {
        "id": name,
        "object": "model",
        "created": int(service.started_s),
        "owned_by": "slipway",
        "root": name if name in service.adapters else canonical,
        "parent": canonical if name in service.adapters else None,
        "max_model_len": service.config.max_context,
        "permission": [],
    }
    if modalities := _modalities(service):
        card["input_modalities"] = modalities
    if not both:
        return card
    encoder = service.config.encoder
    most = service.config.max_context if encoder is None else encoder.reply
    return card | {
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(int(service.started_s), UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": service.config.max_context if encoder is None else encoder.max_input,
        "max_tokens": service.config.limits.max_output_tokens or most,
    }


def _modalities(service: Service) -> list[str]:
    """Return the modalities that a model reads; empty if it reads only text."""
    if service.config.speech is not None:
        return ["audio"]
    return ["text", *service.config.modalities] if service.config.modalities else []


def _wants_both(request: Request) -> bool:
    return "anthropic-version" in request.headers


@router.get("/v1/models")
async def list_models(request: Request) -> JSONResponse:
    service, both = service_of(request), _wants_both(request)
    names = (*service.config.names, *service.adapters.names)
    listing: dict[str, Any] = {"object": "list", "data": [_card(service, name, both) for name in names]}
    if both:
        listing |= {"has_more": False, "first_id": names[0], "last_id": names[-1]}
    return JSONResponse(listing)


@router.get("/v1/models/{name:path}")
async def retrieve_model(request: Request, name: str) -> JSONResponse:
    """Return one model. Slashes in the name may be URL-encoded."""
    service = service_of(request)
    service.model_name(name)
    return JSONResponse(_card(service, name, _wants_both(request)))
