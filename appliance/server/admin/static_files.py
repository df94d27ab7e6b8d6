"""Static files of the web pages, with an entity tag and a strict content security policy.

The files are the same for every service and contain no secret, so they are served without an API key.
"""

from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

from fastapi import Request
from starlette.responses import Response

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; media-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


@lru_cache
def _read(path: Path) -> tuple[bytes, str]:
    """Return the content of a file and its entity tag."""
    content = path.read_bytes()
    return content, f'"{blake2b(content, digest_size=12).hexdigest()}"'


def file_response(request: Request, path: Path) -> Response:
    """Return the file, or 304 without a body if the client has this version of it."""
    content, tag = _read(path)
    headers = {**HEADERS, "ETag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=_TYPES[path.suffix])
