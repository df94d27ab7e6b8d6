"""/openapi.json and /docs, which need nothing from the network."""

from html import escape
from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, JSONResponse

from appliance.http.replies import responses
from appliance.http.service import service_of


async def _wanted(request: Request) -> None:
    if not service_of(request).config.docs:
        raise HTTPException(404)


router = APIRouter(tags=["docs"], dependencies=[Depends(_wanted)])

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>body{{font:16px/1.5 sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}}
table{{border-collapse:collapse}}td{{padding:.2rem 1rem .2rem 0;vertical-align:top}}code{{white-space:nowrap}}</style>
</head><body><h1>{title} {version}</h1>
<p>The whole description is at <a href="openapi.json">openapi.json</a>.</p>
<table>{rows}</table></body></html>
"""


def described(request: Request) -> dict[str, Any]:
    """The OpenAPI description, the definitions inside request bodies moved to where their references point, and replies
    as they are."""
    openapi: dict[str, Any] = request.app.openapi()
    schemas = openapi.setdefault("components", {}).setdefault("schemas", {})
    for path, operations in openapi["paths"].items():
        for method, operation in operations.items():
            operation["responses"] = responses(method, path)
            for content in operation.get("requestBody", {}).get("content", {}).values():
                schemas.update(content["schema"].pop("$defs", {}))
    return openapi


@router.get("/openapi.json", include_in_schema=False)
async def openapi(request: Request) -> JSONResponse:
    return JSONResponse(described(request))


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> HTMLResponse:
    openapi = described(request)
    rows = [
        f"<tr><td>{escape(method.upper())}</td><td><code>{escape(path)}</code></td>"
        f"<td>{escape(operation.get('description', ''))}</td></tr>"
        for path, operations in openapi["paths"].items()
        for method, operation in operations.items()
    ]
    info = openapi["info"]
    page = _PAGE.format(title=escape(info["title"]), version=escape(info["version"]), rows="\n".join(rows))
    return HTMLResponse(page)
