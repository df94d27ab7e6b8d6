"""Work that ends with its client: who closes the connection frees what the request holds (ER-15)."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request

from appliance.server.errors.api import ClientGone

T = TypeVar("T")


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client closes the connection; then raises ClientGone.

    The request's body must have been read."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        for task in (working, watching):
            task.cancel()
        # The cancelled work must have let go of the engine before the request counts as closed.
        await asyncio.gather(working, watching, return_exceptions=True)
