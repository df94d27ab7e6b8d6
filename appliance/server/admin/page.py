"""GET /: a web page with a playground and a real-time view of the service, which uses the same API as all clients.

The user enters the API key on the page. The content security policy restricts the page to requests to this service and
to its own files.
"""

from pathlib import Path

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from appliance.server.admin.static_files import file_response
from appliance.server.http.service import service_of

router = APIRouter(include_in_schema=False)

_FOLDER = Path(__file__).parent / "static"
INDEX = "index.html"
FILES = (
    *(
        "style.css",
        "icon.svg",
        "main.js",
        "api.js",
        "dom.js",
        "chat.js",
        "attachments.js",
        "markdown.js",
        "marked.js",
        "request.js",
        "reply.js",
    ),
    *("status.js", "numbers.js", "timeline.js"),
)
PATHS = frozenset(("/", *(f"/page/{name}" for name in FILES)))


def _served(request: Request, name: str) -> Response:
    if not service_of(request).config.endpoints.page or name not in (INDEX, *FILES):
        raise HTTPException(404)
    return file_response(request, _FOLDER / name)


@router.get("/")
async def index(request: Request) -> Response:
    """Return the web page, or for a program that asks for JSON that the service is alive, as KServe's servers do."""
    accepted = request.headers.get("accept", "")
    if "application/json" in accepted and "text/html" not in accepted:
        return JSONResponse({"status": "alive"})
    return _served(request, INDEX)


@router.get("/page/{name}")
async def file(request: Request, name: str) -> Response:
    """Return a file of the web page."""
    return _served(request, name)
