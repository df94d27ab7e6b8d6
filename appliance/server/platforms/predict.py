"""Predictions as Vertex AI, Azure ML and KServe's first protocol request them: `{instances, parameters}`.

Each instance is a body of /invocations, and `parameters` are fields of all of them. The reply is `{predictions}`, one
for each instance in order. A body without `instances` is served like one of /invocations, with its streams: Vertex AI's
rawPredict and streamRawPredict pass OpenAI's bodies unchanged.

POST /v1/models/NAME:predict is a route of its own; `endpoints.routes` adds the paths that a platform prescribes.
"""

import asyncio
import json
from typing import Any

import orjson
from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from appliance.observability.log import Subject
from appliance.server.admin.health import health
from appliance.server.errors.api import ApiError, BadRequest, InvalidBody, api_error
from appliance.server.http.body import apart, json_body, parse_body, read_json
from appliance.server.http.service import Service, service_of
from appliance.server.platforms.invocations import invoke
from appliance.server.schema.inference import PredictRequest
from engine.api.errors import RequestError

router = APIRouter()

_FORMAT = "@requestFormat"  # Vertex AI's containers: the kind of an instance, which its fields already show
_OWN_HEADERS = (b"idempotency-key", b"last-event-id")  # of the whole request, not of an instance


async def predict(request: Request) -> Response:
    """Return predictions for instances, or the reply of /invocations for another body."""
    service, body = service_of(request), await read_json(request)
    if not await apart(len(body), _has_instances, body):
        return await invoke(service, request, body)
    return await _predict(service, request, body)


@router.post(
    "/v1/models/{name:path}:predict",
    openapi_extra=json_body(PredictRequest),
    summary="Predictions for instances (KServe's first protocol)",
)
async def predict_model(request: Request, name: str) -> Response:
    service, body = service_of(request), await read_json(request)
    service.model_name(name)
    return await _predict(service, request, body)


def health_routes(service: Service) -> APIRouter:
    """Return the routes of `endpoints.routes.health`. They precede all others, because they need no key."""
    router = APIRouter(tags=["health"])
    for path in service.config.endpoints.routes.health:
        router.add_api_route(path, health, methods=["GET"], summary="Health at the path of a platform")
    return router


def predict_routes(service: Service) -> APIRouter:
    """Return the routes of `endpoints.routes.predict`."""
    router = APIRouter()
    for path in service.config.endpoints.routes.predict:
        router.add_api_route(
            path,
            predict,
            methods=["POST"],
            openapi_extra=json_body(PredictRequest),
            summary="Predictions at the path of a platform",
        )
    return router


async def _predict(service: Service, request: Request, body: bytes) -> Response:
    """Serve all instances at once. The first error, if any, is the error of the request and names its instance."""
    given = await parse_body(body, PredictRequest, service)
    if len(given.instances) > service.config.limits.max_prompts:
        most = service.config.limits.max_prompts
        raise BadRequest(
            f"There are {len(given.instances)} instances, more than limits.max_prompts, {most}.", "instances"
        )
    tasks = [
        asyncio.ensure_future(_one(service, request, index, instance, given.parameters))
        for index, instance in enumerate(given.instances)
    ]
    try:
        predictions = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return JSONResponse({"predictions": predictions})


async def _one(service: Service, request: Request, index: int, instance: Any, parameters: dict[str, Any]) -> Any:
    """Return the prediction for one instance. Raise ApiError."""
    try:
        body = _body(service, instance, parameters)
        response = await invoke(service, _apart(request, index), orjson.dumps(body))
        return orjson.loads(response.body)
    except (ApiError, RequestError) as error:
        failure = api_error(error)
        failure.param = f"instances[{index}]" + (f".{failure.param}" if failure.param else "")
        raise failure from error.__cause__


def _body(service: Service, instance: Any, parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the body of /invocations for an instance: a text is a prompt, or the input of a pooling model."""
    if isinstance(instance, str):
        instance = {"prompt" if "generate" in service.tasks else "input": instance}
    if not isinstance(instance, dict):
        raise InvalidBody("An instance must be an object with the fields of a request, or a text.")
    body = {**parameters, **instance}
    body.pop(_FORMAT, None)
    if body.get("stream"):
        raise BadRequest("Instances cannot be streamed; send the body without `instances`.", "stream")
    return body


def _apart(request: Request, index: int) -> Request:
    """Return the request of one instance, with an id of its own and without headers of the whole request."""
    state = dict(request.scope["state"])
    subject: Subject = state["subject"]
    state["request_id"] = f"{subject.request_id}-{index}"
    state["subject"] = Subject(state["request_id"], subject.trace, subject.arrived_s, subject.span)
    headers = [(name, value) for name, value in request.scope["headers"] if name not in _OWN_HEADERS]
    return Request({**request.scope, "state": state, "headers": headers}, request.receive)


def _has_instances(body: bytes) -> bool:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and "instances" in value
