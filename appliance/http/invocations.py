"""/invocations: SageMaker's one route, which finds the API by the shape of the body."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from appliance.http.body import parse_body, read_json
from appliance.http.chat import create_chat
from appliance.http.completions import create_completion
from appliance.http.errors import BadRequest, InvalidBody
from appliance.http.service import Service, service_of
from appliance.schema.chat import ChatRequest
from appliance.schema.completions import CompletionRequest

router = APIRouter(tags=["invocations"])

Create = Callable[[Service, Request, Any], Awaitable[Response]]

HANDLERS: tuple[tuple[str, type[BaseModel], Create], ...] = (
    ("messages", ChatRequest, create_chat),
    ("prompt", CompletionRequest, create_completion),
)
"""The first whose key is in the body takes it."""


@router.post("/invocations")
async def invocations(request: Request) -> Response:
    body = await read_json(request)
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidBody(f"JSON decode error: {error}") from None
    for key, schema, create in HANDLERS:
        if isinstance(value, dict) and key in value:
            return await create(service_of(request), request, parse_body(body, schema))
    keys = " or ".join(f"`{key}`" for key, *_ in HANDLERS)
    raise BadRequest(f"Cannot find suitable handler for request: the body is no JSON object with {keys}.")
