"""GET /openapi.json, and GET /docs: Swagger UI for it, bundled with the service so that it needs no network access.

The files of Swagger UI need no API key. The description needs one if the service has keys: the page sends the key that
the user entered in the playground or in Swagger UI's own form.
"""

from copy import deepcopy
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from appliance.server.admin.replies import responses
from appliance.server.admin.static_files import file_response
from appliance.server.http.service import service_of
from appliance.server.schema.descriptions import describe_fields


async def _wanted(request: Request) -> None:
    if not service_of(request).config.endpoints.docs:
        raise HTTPException(404)


router = APIRouter(tags=["docs"], dependencies=[Depends(_wanted)])

_FOLDER = Path(__file__).parent / "swagger"
INDEX = "docs.html"
FILES = ("swagger-ui-bundle.js", "swagger-ui.css", "docs.js", "docs.css")
PATHS = frozenset(("/docs", *(f"/docs/{name}" for name in FILES)))

_ABOUT = """\
The HTTP API of one served model: OpenAI's routes, Anthropic's Messages, and routes for operators.

Errors are objects with `message`, `type`, `param` and `code`. Every reply has the header `x-request-id`."""
_BEARER = {
    "type": "http",
    "scheme": "bearer",
    "description": "An API key of this service (`endpoints.api_keys` in its manifest).",
}


TAGS = {
    "Generation": ("/v1/chat/", "/v1/completions", "/v1/responses", "/v1/messages", "/generative_scoring"),
    "Speech": ("/v1/audio/",),
    "Embeddings, scores and rankings": ("/v1/embeddings", "/v2/embed", "/pooling", "/classify", "/score", "/rerank",
                                        "/v1/media/", "/v1/score", "/v1/rerank", "/v2/rerank"),
    "Inference protocol of KServe": ("/v2/models", "/v2/health"),
    "Models and tokens": ("/v1/models", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/adapters", "/tokenize",
                          "/detokenize"),
    "Operation": ("/",),
}  # fmt: skip
"""Groups of operations in the order of the page, each with its path prefixes."""

EXAMPLES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "What is 17 + 25?"}], "max_tokens": 100},
    "/v1/completions": {"prompt": "Once upon a time", "max_tokens": 30},
    "/v1/responses": {"input": "What is 17 + 25?", "max_output_tokens": 100},
    "/v1/responses/input_tokens": {"input": "What is 17 + 25?"},
    "/v1/messages": {"messages": [{"role": "user", "content": "What is 17 + 25?"}], "max_tokens": 100},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "What is 17 + 25?"}]},
    "/generative_scoring": {"query": "Is this a fruit? ", "items": ["apple", "hammer"], "label_token_ids": [1, 2]},
    "/v1/models/{name}:predict": {"instances": [{"prompt": "Once upon a time"}], "parameters": {"max_tokens": 30}},
    **dict.fromkeys(
        ("/v2/models/{name}/infer", "/v2/models/{name}/versions/{version}/infer"),
        {"inputs": [{"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["Once upon a time"]}]},
    ),
    **dict.fromkeys(
        (
            *("/v2/models/{name}/generate", "/v2/models/{name}/versions/{version}/generate"),
            *("/v2/models/{name}/generate_stream", "/v2/models/{name}/versions/{version}/generate_stream"),
        ),
        {"text_input": "Once upon a time", "parameters": {"max_tokens": 30}},
    ),
    "/v1/load_lora_adapter": {"lora_name": "sql", "lora_path": "sql"},
    "/v1/unload_lora_adapter": {"lora_name": "sql"},
    "/adapters": {"name": "sql", "src": "sql"},
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [1, 2, 3]},
    "/v1/embeddings": {"input": ["A text", "Another text"]},
    "/v2/embed": {"texts": ["A text"], "input_type": "search_document", "embedding_types": ["float"]},
    "/pooling": {"input": "A text"},
    "/classify": {"input": "A text"},
    "/v1/media/embeddings": {"input": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,…"}}]},
    **dict.fromkeys(("/score", "/v1/score"), {"queries": "What is the capital of Norway?", "documents": ["Oslo."]}),
    **dict.fromkeys(
        ("/rerank", "/v1/rerank", "/v2/rerank"),
        {"query": "What is the capital of Norway?", "documents": ["Oslo.", "A fjord."]},
    ),
}
"""Example request bodies by path, without the model's name."""
ADAPTERS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/adapters")  # bodies without a field `model`


def _tag(path: str) -> str:
    return next(tag for tag, prefixes in TAGS.items() if path.startswith(prefixes))


def _order(path: str) -> int:
    """Return the position of a path's group on the page."""
    return list(TAGS).index(_tag(path))


def described(request: Request) -> dict[str, Any]:
    """Return the OpenAPI description.

    Definitions in request bodies are moved to the components to which references point.
    """
    openapi: dict[str, Any] = deepcopy(request.app.openapi())  # a copy, because FastAPI caches it
    openapi["info"]["description"] = _ABOUT
    for path in request.app.state.undescribed:
        openapi["paths"].pop(path, None)
    components = openapi.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for path, operations in openapi["paths"].items():
        for method, operation in operations.items():
            operation["responses"] = responses(method, path)
            operation["tags"] = [_tag(path)]
            for content in operation.get("requestBody", {}).get("content", {}).values():
                schemas.update(content["schema"].pop("$defs", {}))
                describe_fields(content["schema"].get("title", ""), content["schema"])
                if path in EXAMPLES:
                    named = (
                        {} if "{name}" in path or path in ADAPTERS else {"model": service_of(request).config.names[0]}
                    )
                    content["example"] = {**named, **EXAMPLES[path]}
    for name, schema in schemas.items():
        describe_fields(name, schema)
    openapi["paths"] = dict(sorted(openapi["paths"].items(), key=lambda item: _order(item[0])))
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
