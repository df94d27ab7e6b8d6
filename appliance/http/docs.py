"""GET /openapi.json, and GET /docs: Swagger UI over it, bundled with the service so that it needs no network.

The files of Swagger UI need no API key. The description does, if the service has keys: the page sends the key that the
person typed into the playground or into Swagger UI's own form.
"""

from copy import deepcopy
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from appliance.http.replies import responses
from appliance.http.service import service_of
from appliance.http.static_files import file_response


async def _wanted(request: Request) -> None:
    if not service_of(request).config.docs:
        raise HTTPException(404)


router = APIRouter(tags=["docs"], dependencies=[Depends(_wanted)])

_FOLDER = Path(__file__).parent / "swagger"
INDEX = "docs.html"
FILES = ("swagger-ui-bundle.js", "swagger-ui.css", "docs.js", "docs.css")
PATHS = frozenset(("/docs", *(f"/docs/{name}" for name in FILES)))

_ABOUT = """\
The HTTP API of one served model: OpenAI's routes, Anthropic's Messages, and routes for operators.

Errors are objects with `message`, `type`, `param` and `code`. Every reply carries the header `x-request-id`."""
_BEARER = {
    "type": "http",
    "scheme": "bearer",
    "description": "An API key of this service (`endpoints.api_keys` in its manifest).",
}


def described(request: Request) -> dict[str, Any]:
    """Return the OpenAPI description. Definitions inside request bodies move to the components that references name."""
    openapi: dict[str, Any] = deepcopy(request.app.openapi())  # FastAPI keeps it
    openapi["info"]["description"] = _ABOUT
    components = openapi.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for path, operations in openapi["paths"].items():
        for method, operation in operations.items():
            operation["responses"] = responses(method, path)
            for content in operation.get("requestBody", {}).get("content", {}).values():
                schemas.update(content["schema"].pop("$defs", {}))
    if service_of(request).keys:
        components["securitySchemes"] = {"key": _BEARER}
        openapi["security"] = [{"key": []}]
    return openapi


@router.get("/openapi.json", include_in_schema=False)
async def openapi(request: Request) -> JSONResponse:
    return JSONResponse(described(request))


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> Response:
    return file_response(request, _FOLDER / INDEX)


@router.get("/docs/{name}", include_in_schema=False)
async def file(request: Request, name: str) -> Response:
    if name not in FILES:
        raise HTTPException(404)
    return file_response(request, _FOLDER / name)
