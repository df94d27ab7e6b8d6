"""/invocations: SageMaker's only route. It selects the API by the shape of the body and the tasks of the model.

`X-Amzn-SageMaker-Custom-Attributes: route=/v1/messages` selects one of ROUTED instead. Other routes cannot be reached
in this way, because the manifest may open /invocations to clients without an API key.
"""

import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from appliance.server.anthropic.routes import create_message
from appliance.server.cohere.routes import create_embed
from appliance.server.errors.api import BadRequest, InvalidBody
from appliance.server.http.body import apart, parse_body, read_json
from appliance.server.http.service import Service, service_of
from appliance.server.openai.chat import create_chat
from appliance.server.openai.completions import create_completion
from appliance.server.openai.label_scores import create_label_scores
from appliance.server.openai.responses.routes import create_response
from appliance.server.platforms.sessions import session_reply
from appliance.server.pooling.embeddings import create_classes, create_embeddings, create_pooling
from appliance.server.pooling.scoring import create_ranking, create_scores
from appliance.server.schema.chat import ChatRequest
from appliance.server.schema.cohere import EmbedRequest
from appliance.server.schema.completions import CompletionRequest
from appliance.server.schema.label_scores import LabelScoresRequest
from appliance.server.schema.messages import MessagesRequest
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
    Shape(("query", "items"), ("generate",), LabelScoresRequest, create_label_scores),
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


ROUTED: dict[str, Shape] = {
    "/v1/chat/completions": Shape(("messages",), ("generate",), ChatRequest, create_chat),
    "/v1/completions": Shape(("prompt",), ("generate",), CompletionRequest, create_completion),
    "/v1/responses": Shape(("input",), ("generate",), ResponsesRequest, create_response),
    "/v1/messages": Shape(("messages",), ("generate",), MessagesRequest, create_message),
    "/generative_scoring": Shape(("query", "items"), ("generate",), LabelScoresRequest, create_label_scores),
    "/v1/embeddings": Shape(("input",), ("embed", "token_embed"), EmbeddingRequest, create_embeddings),
    "/v2/embed": Shape(("texts",), ("embed",), EmbedRequest, create_embed),
    "/pooling": Shape(("input",), ("embed", "classify", *_TOKENS), PoolingRequest, create_pooling),
    "/classify": Shape(("input",), ("classify",), ClassifyRequest, create_classes),
    "/score": Shape(("queries", "documents"), ("score",), ScoreRequest, create_scores),
    "/rerank": Shape(("query", "documents"), ("score",), RerankRequest, create_ranking),
}
"""Routes that a custom attribute may select."""
ATTRIBUTES = "X-Amzn-SageMaker-Custom-Attributes"
_ROUTE = re.compile(r"(?:^|[,;])\s*route\s*=\s*([^,;\s]*)")


@router.post("/invocations")
async def invocations(request: Request) -> Response:
    service, body = service_of(request), await read_json(request)
    if (session := await session_reply(service, request, body)) is not None:
        return session
    response = await invoke(service, request, body)
    # Other headers do not pass the platform.
    response.headers[ATTRIBUTES] = f"request_id={request.state.request_id}"
    return response


async def invoke(service: Service, request: Request, body: bytes) -> Response:
    """Return the reply of the route that a custom attribute or the shape of the body selects. Raise BadRequest."""
    route = _ROUTE.search(request.headers.get(ATTRIBUTES, ""))
    if route is not None:
        shape = _routed(route[1], service.tasks)
        return await shape.create(service, request, await parse_body(body, shape.schema, service, request))
    given = await apart(len(body), _given, body)
    fitting = [shape for shape in SHAPES if given.issuperset(shape.keys)]
    for shape in fitting:
        if set(shape.tasks) & set(service.tasks):
            return await shape.create(service, request, await parse_body(body, shape.schema, service, request))
    raise BadRequest(f"Cannot find suitable handler for request: {_why(fitting, service.tasks)}.")


def _routed(path: str, tasks: tuple[str, ...]) -> Shape:
    """Return the shape of a route that a custom attribute selects. Raise BadRequest for other paths."""
    shape = ROUTED.get(path)
    if shape is None or not set(shape.tasks) & set(tasks):
        allowed = ", ".join(path for path, shape in ROUTED.items() if set(shape.tasks) & set(tasks))
        raise BadRequest(f"route={path[:100]} cannot be selected; this model serves {allowed}.", ATTRIBUTES)
    return shape


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
