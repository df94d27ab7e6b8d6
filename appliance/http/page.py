"""GET /: a page for people, with a playground and a live view of the service, over the same API as everybody's.

Its files are static, know nothing of this service and hold no secret: they are served without an API key, which the
person gives in the page. Under the policy below the page can reach this service alone, and run nothing but its own
files.
"""

from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from appliance.http.service import service_of

router = APIRouter(include_in_schema=False)

_FOLDER = Path(__file__).parent / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
INDEX = "index.html"
FILES = (
    *("style.css", "icon.svg", "main.js", "api.js", "dom.js", "chat.js", "request.js", "reply.js"),
    *("status.js", "numbers.js", "story.js"),
)
PATHS = frozenset(("/", *(f"/page/{name}" for name in FILES)))

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


@lru_cache
def _file(name: str) -> tuple[bytes, str]:
    """Content and entity tag."""
    content = (_FOLDER / name).read_bytes()
    return content, f'"{blake2b(content, digest_size=12).hexdigest()}"'


def _served(request: Request, name: str) -> Response:
    if not service_of(request).config.page or name not in (INDEX, *FILES):
        raise HTTPException(404)
    content, tag = _file(name)
    headers = {**HEADERS, "ETag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=_TYPES[Path(name).suffix])


@router.get("/")
async def index(request: Request) -> Response:
    """The page for people."""
    return _served(request, INDEX)


@router.get("/page/{name}")
async def file(request: Request, name: str) -> Response:
    """A file of the page."""
    return _served(request, name)
