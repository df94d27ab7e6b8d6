"""GET /: a page for people, with a playground and a live view of the service, over the same API as everybody's.

A person types the API key into the page. The content security policy lets the page reach this service alone and run
nothing but its own files.
"""

from pathlib import Path

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

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
        "markdown.js",
        "marked.js",
        "request.js",
        "reply.js",
    ),
    *("status.js", "numbers.js", "story.js"),
)
PATHS = frozenset(("/", *(f"/page/{name}" for name in FILES)))


def _served(request: Request, name: str) -> Response:
    if not service_of(request).config.page or name not in (INDEX, *FILES):
        raise HTTPException(404)
    return file_response(request, _FOLDER / name)


@router.get("/")
async def index(request: Request) -> Response:
    """The page for people."""
    return _served(request, INDEX)


@router.get("/page/{name}")
async def file(request: Request, name: str) -> Response:
    """A file of the page."""
    return _served(request, name)
