"""/invocations: SageMaker's only route. It selects the API by the shape of the body and the tasks of the model."""

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from appliance.server.cohere.routes import create_embed
from appliance.server.errors.api import BadRequest, InvalidBody
from appliance.server.http.body import apart, parse_body, read_json
from appliance.server.http.service import Service, service_of
from appliance.server.openai.chat import create_chat
from appliance.server.openai.completions import create_completion
from appliance.server.openai.responses.routes import create_response
from appliance.server.pooling.embeddings import create_classes, create_embeddings, create_pooling
from appliance.server.pooling.scoring import create_ranking, create_scores
from appliance.server.schema.chat import ChatRequest
from appliance.server.schema.cohere import EmbedRequest
from appliance.server.schema.completions import CompletionRequest
from appliance.server.schema.pooling import ClassifyRequest, EmbeddingRequest, PoolingRequest
from appliance.server.schema.responses import ResponsesRequest
from appliance.server.schema.scoring import PAIRS, RerankRequest, ScoreRequest

router = APIRouter(tags=["invocations"])

Create = Callable[[Service, Request, Any], Awaitable[Response]]


@dataclass(frozen=True)
class Shape:
    """A body with all of `keys`, for a model that serves one of `tasks`."""

    keys: tuple[str, ...]
    tasks: tuple[str, ...]
    schema: type[BaseModel]
    create: Create


_TOKENS = ("token_embed", "token_classify")
SHAPES: tuple[Shape, ...] = (
    Shape(("messages",), ("generate",), ChatRequest, create_chat),
    Shape(("prompt",), ("generate",), CompletionRequest, create_completion),
    Shape(("input",), ("generate",), ResponsesRequest, create_response),
    Shape(("query", "documents"), ("score",), RerankRequest, create_ranking),
    *(Shape(pair, ("score",), ScoreRequest, create_scores) for pair in PAIRS),
    *(Shape((key,), ("embed",), EmbedRequest, create_embed) for key in ("texts", "inputs", "images")),
    *(
        Shape((key, *more), tasks, schema, create)
        for key in ("input", "messages")
        for more, tasks, schema, create in (
            (("task",), ("embed", "classify", *_TOKENS), PoolingRequest, create_pooling),
            ((), ("embed", "token_embed"), EmbeddingRequest, create_embeddings),
            ((), ("classify",), ClassifyRequest, create_classes),
            ((), _TOKENS, PoolingRequest, create_pooling),
        )
    ),
)
"""The first matching shape handles the body."""


@router.post("/invocations")
async def invocations(request: Request) -> Response:
    body = await read_json(request)
    service = service_of(request)
    given = await apart(len(body), _given, body)
    fitting = [shape for shape in SHAPES if given.issuperset(shape.keys)]
    for shape in fitting:
        if set(shape.tasks) & set(service.tasks):
            return await shape.create(service, request, await parse_body(body, shape.schema, service))
    raise BadRequest(f"Cannot find suitable handler for request: {_why(fitting, service.tasks)}.")


def _given(body: bytes) -> set[str]:
    """Return the fields of a body that are not null. Raise InvalidBody."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidBody(f"JSON decode error: {error}") from None
    return {key for key, one in value.items() if one is not None} if isinstance(value, dict) else set()


def _why(fitting: list[Shape], tasks: tuple[str, ...]) -> str:
    """Return why no route of the model accepts a body of these shapes."""
    if fitting:
        needed = dict.fromkeys(task for shape in fitting for task in shape.tasks)
        body, serves = _body(fitting[:1]), ", ".join(tasks) or "none of the tasks"
        return f"a body with {body} requires a model that serves {' or '.join(needed)}; this one serves {serves}"
    served = [shape for shape in SHAPES if set(shape.tasks) & set(tasks)]
    return f"the body is not a JSON object with {_body(served)}"


def _body(shapes: list[Shape]) -> str:
    """Return the keys of the shapes as text: `input` or `query` and `documents`."""
    return " or ".join(dict.fromkeys(" and ".join(f"`{key}`" for key in shape.keys) for shape in shapes))
