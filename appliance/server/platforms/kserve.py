"""The Open Inference Protocol (KServe's second protocol) and its generate extension.

Tensors are texts (BYTES). A model that generates takes one tensor of prompts and returns `text_output`; `parameters`
are fields of /v1/completions. Pooling models return FP32 tensors. Sources: kserve/open-inference-protocol,
specification/protocol/{inference_rest,generate_rest}.yaml.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import orjson
from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response

from appliance.observability.log import Subject
from appliance.server.chat.completion_prompt import plan_completion
from appliance.server.chat.parsed import Plan
from appliance.server.chat.stream import Choice
from appliance.server.errors.api import BadRequest, NotFound, Unavailable
from appliance.server.http.body import json_body, parse_body, read_body
from appliance.server.http.durable import Routed
from appliance.server.http.pipeline import admit, log_request, receive, respond, route
from appliance.server.http.reply import Reply
from appliance.server.http.service import Service, service_of
from appliance.server.http.sse import record
from appliance.server.openai.completions import create_completion
from appliance.server.pooling.embeddings import create_classes, create_embeddings
from appliance.server.pooling.scoring import create_scores
from appliance.server.schema.completions import CompletionRequest
from appliance.server.schema.inference import GenerateRequest, InferRequest, InputTensor
from appliance.server.schema.pooling import ClassifyRequest, EmbeddingRequest
from appliance.server.schema.scoring import ScoreRequest
from engine.api.messages import Delta

router = APIRouter(tags=["inference protocol"])
inference = APIRouter()
generation = APIRouter()

VERSION = "1"
EXTENSIONS = ("generate",)


@dataclass(frozen=True)
class Kind:
    """Tensors of a model that serves `task`, and the request that computes them."""

    task: str
    inputs: tuple[str, ...]
    output: str
    datatype: str
    body: Callable[[list[list[str]]], dict[str, Any]]
    """Fields of the request from the texts of each input tensor."""
    schema: type[BaseModel]
    create: Callable[[Service, Request, Any], Any]
    values: Callable[[dict[str, Any]], list[Any]]
    """One value, or one list of numbers, for each text."""


KINDS = (
    Kind(
        *("generate", ("text_input",), "text_output", "BYTES"),
        lambda texts: {"prompt": texts[0]},
        CompletionRequest,
        create_completion,
        lambda reply: [choice["text"] for choice in reply["choices"]],
    ),
    Kind(
        *("embed", ("text_input",), "embedding", "FP32"),
        lambda texts: {"input": texts[0], "encoding_format": "float"},
        EmbeddingRequest,
        create_embeddings,
        lambda reply: [one["embedding"] for one in reply["data"]],
    ),
    Kind(
        *("classify", ("text_input",), "probabilities", "FP32"),
        lambda texts: {"input": texts[0]},
        ClassifyRequest,
        create_classes,
        lambda reply: [one["probs"] for one in reply["data"]],
    ),
    Kind(
        *("score", ("query", "document"), "score", "FP32"),
        lambda texts: {"queries": texts[0] if len(texts[0]) > 1 else texts[0][0], "documents": texts[1]},
        ScoreRequest,
        create_scores,
        lambda reply: [one["score"] for one in reply["data"]],
    ),
)
TASKS = tuple(kind.task for kind in KINDS)


@router.get("/v2", summary="Server and its extensions")
async def server(request: Request) -> JSONResponse:
    version = service_of(request).config.version
    return JSONResponse({"name": "slipway", "version": version, "extensions": list(EXTENSIONS)})


@router.get("/v2/models", summary="Served names")
async def models(request: Request) -> JSONResponse:
    return JSONResponse({"models": list(service_of(request).config.names)})


# The decorator next to the function is registered first, and a name may contain slashes: routes with a version precede.
@router.get("/v2/models/{name:path}/ready", summary="Readiness of the model")
@router.get("/v2/models/{name:path}/versions/{version}/ready", summary="Readiness of the model")
async def model_ready(request: Request, name: str, version: str = VERSION) -> JSONResponse:
    service = _checked(request, name, version)
    if not service.serves:
        raise Unavailable(f"The model {name} is not ready.", 1)
    return JSONResponse({"name": name, "ready": True})


@router.get("/v2/models/{name:path}", summary="Tensors of the model")
@router.get("/v2/models/{name:path}/versions/{version}", summary="Tensors of the model")
async def metadata(request: Request, name: str, version: str = VERSION) -> JSONResponse:
    service = _checked(request, name, version)
    kind = next((kind for kind in KINDS if kind.task in service.tasks), None)
    shape = [-1, -1] if kind is not None and kind.task in ("embed", "classify") else [-1]
    inputs = [] if kind is None else [{"name": one, "datatype": "BYTES", "shape": [-1]} for one in kind.inputs]
    outputs = [] if kind is None else [{"name": kind.output, "datatype": kind.datatype, "shape": shape}]
    about = {"name": name, "versions": [VERSION], "platform": "slipway"}
    return JSONResponse({**about, "inputs": inputs, "outputs": outputs})


@inference.post("/v2/models/{name:path}/infer", openapi_extra=json_body(InferRequest), summary="Infer tensors")
@inference.post(
    "/v2/models/{name:path}/versions/{version}/infer",
    openapi_extra=json_body(InferRequest),
    summary="Infer tensors",
)
async def infer(request: Request, name: str, version: str = VERSION) -> Response:
    service = _checked(request, name, version)
    given = await read_body(request, InferRequest)
    kind = next(kind for kind in KINDS if kind.task in service.tasks)
    if unknown := [one.name for one in given.outputs if one.name != kind.output]:
        raise BadRequest(f"The output {unknown[0][:100]} does not exist; the model returns {kind.output}.", "outputs")
    fields = {**given.parameters, **kind.body([_texts(tensor) for tensor in _ordered(given, kind)]), "model": name}
    if fields.get("stream") or (fields.get("n") or 1) != 1:
        raise BadRequest("infer returns one complete text for each prompt; use generate_stream for a stream.", "stream")
    body = await parse_body(orjson.dumps(fields), kind.schema, service)
    response = await kind.create(service, request, body)
    values = kind.values(orjson.loads(response.body))
    rows = [len(values), *([len(values[0])] if isinstance(values[0], list) else [])]
    data = list(chain.from_iterable(values)) if len(rows) > 1 else values
    reply = {"model_name": name, "model_version": VERSION, "id": given.id or request.state.request_id}
    output = {"name": kind.output, "datatype": kind.datatype, "shape": rows, "data": data}
    return JSONResponse({**reply, "outputs": [output]})


@generation.post("/v2/models/{name:path}/generate", openapi_extra=json_body(GenerateRequest), summary="Generate a text")
@generation.post(
    "/v2/models/{name:path}/versions/{version}/generate",
    openapi_extra=json_body(GenerateRequest),
    summary="Generate a text",
)
async def generate(request: Request, name: str, version: str = VERSION) -> Response:
    return await _generate(request, name, version, stream=False)


@generation.post(
    "/v2/models/{name:path}/generate_stream", openapi_extra=json_body(GenerateRequest), summary="Stream a text"
)
@generation.post(
    "/v2/models/{name:path}/versions/{version}/generate_stream",
    openapi_extra=json_body(GenerateRequest),
    summary="Stream a text",
)
async def generate_stream(request: Request, name: str, version: str = VERSION) -> Response:
    return await _generate(request, name, version, stream=True)


async def _generate(request: Request, name: str, version: str, *, stream: bool) -> Response:
    service = _checked(request, name, version)
    given = await read_body(request, GenerateRequest)
    if (given.parameters.get("n") or 1) != 1:
        raise BadRequest("generate returns one text; use /v1/completions for several.", "parameters.n")
    fields = {**given.parameters, "prompt": given.text_input, "model": name, "stream": stream}
    body = await parse_body(orjson.dumps(fields), CompletionRequest, service)
    call = receive(service, request, name, "generate")
    plan = await asyncio.to_thread(plan_completion, body, call.context)
    await admit(call, plan)
    routed = Routed(route(call, plan.submits), call.identity)
    log_request(call, body, {"prompt"})
    head = {"id": given.id or request.state.request_id, "model_name": name, "model_version": VERSION}
    return await respond(call, body, routed, GeneratedText(service, call.subject, body, plan, head))


class GeneratedText(Reply[dict[str, Any]]):
    """Formatter of the generate extension: `text_output` is the complete text, or the next part of a stream."""

    def __init__(
        self, service: Service, subject: Subject, body: CompletionRequest, plan: Plan, head: dict[str, str]
    ) -> None:
        self.body, self.plan, self.head = body, plan, head
        (prompt,) = plan.prompts
        super().__init__(
            service, subject, body, prompt.tokens, [Choice(service.text.tokenizer, prompt.before, plan.reading)]
        )
        self._parts: list[str] = []

    def fresh(self) -> "GeneratedText":
        return GeneratedText(self.service, self.subject, self.body, self.plan, self.head)

    def take(self, index: int, delta: Delta) -> dict[str, Any]:
        self._parts.append(self.choices[index].take(delta).text)
        return self._object(self._parts[-1])

    def record(self, piece: dict[str, Any], event_id: str) -> bytes:
        return record(piece, event_id)

    def whole(self) -> dict[str, Any]:
        return self._object("".join(self._parts))

    def _object(self, text: str) -> dict[str, Any]:
        """Return the text, and with the last one the reason of the end and the number of tokens."""
        choice = self.choices[0]
        details = {"finish_reason": choice.finish, "completion_tokens": choice.tokens} if choice.finish else {}
        return {**self.head, "text_output": text, **({"details": details} if details else {})}

    def logged(self, index: int) -> Iterable[tuple[str, str | None]]:
        return ((self._parts[-1], self.choices[index].finish),)


def _checked(request: Request, name: str, version: str) -> Service:
    """Return the service. Raise NotFound for another model or version."""
    service = service_of(request)
    service.model_name(name)
    if version != VERSION:
        raise NotFound(f"The model {name} has no version {version[:100]}; its version is {VERSION}.", "version")
    return service


def _ordered(given: InferRequest, kind: Kind) -> list[InputTensor]:
    """Return the tensors in the order of the model's inputs. A single input may have any name. Raise BadRequest."""
    by_name = {tensor.name: tensor for tensor in given.inputs}
    if len(kind.inputs) == len(given.inputs) == 1:
        return list(given.inputs)
    if len(by_name) != len(given.inputs) or set(by_name) != set(kind.inputs):
        raise BadRequest(f"The inputs of this model are {' and '.join(kind.inputs)}.", "inputs")
    return [by_name[name] for name in kind.inputs]


def _texts(tensor: InputTensor) -> list[str]:
    """Return the texts of a tensor in row-major order. Raise BadRequest if they do not fit its shape."""
    data: list[Any] = tensor.data
    while data and isinstance(data[0], list):
        if not all(isinstance(row, list) for row in data):
            break
        data = list(chain.from_iterable(data))
    if not data or not all(isinstance(text, str) for text in data):
        raise BadRequest("data of a BYTES tensor must be texts, at least one.", f"inputs.{tensor.name}.data")
    size = 1
    for extent in tensor.shape:
        size *= extent
    if size != len(data):
        message = f"The shape {tensor.shape} has {size} elements, but data has {len(data)}."
        raise BadRequest(message, f"inputs.{tensor.name}.shape")
    return data
