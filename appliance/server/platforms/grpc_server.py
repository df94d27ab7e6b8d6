"""The Open Inference Protocol over gRPC: a port that passes calls to the HTTP routes of the same application.

A call has the keys, limits, metrics and log lines of its HTTP route. Metadata of a call are its headers, such as
`authorization`.
"""

import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import chain
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import quote

import grpc
import httpx
from starlette.types import ASGIApp

from appliance.config.gateway import GatewayConfig
from appliance.security.certificate import Certificate
from appliance.server.http.connections import ConnectionTable
from appliance.server.platforms.grpc_messages import CHOICE, HEALTH, MESSAGES
from appliance.server.platforms.grpc_relay import relayed
from engine.api.errors import ConfigError

BACKLOG = 1024
STOP_S = 0.5  # time for open calls after the HTTP server has ended
SERVING, NOT_SERVING = 1, 2
PASSED_ON = frozenset(("authorization", "x-api-key", "x-request-id", "traceparent", "tracestate"))
"""Metadata that become headers."""

CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    409: grpc.StatusCode.ALREADY_EXISTS,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    422: grpc.StatusCode.FAILED_PRECONDITION,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
"""Status of a call by the status of its HTTP reply; INTERNAL for others."""


class GrpcPortTaken(ConfigError):
    """Raised if the port of gRPC is not available."""

    code = "port"


class Failed(Exception):
    """An HTTP reply that is an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.code = CODES.get(status, grpc.StatusCode.INTERNAL)


class Calls:
    """Requests to the application, in this process."""

    def __init__(self, app: ASGIApp) -> None:
        self._client = httpx.AsyncClient(transport=httpx.ASGITransport(app, raise_app_exceptions=False), timeout=None)

    async def send(self, method: str, path: str, headers: dict[str, str], body: Any = None) -> Any:
        """Return the JSON value of a reply. Raise Failed."""
        try:
            url = httpx.URL("http://slipway", path=path)
            request = self._client.build_request(method, url, json=body, headers=headers)
        except httpx.InvalidURL:
            raise Failed(404, "No model has a name of this length.") from None
        except ValueError:  # JSON has no NaN and no infinity
            raise Failed(400, "A parameter is not a finite number.") from None
        reply = await self._client.send(request)
        try:
            value = reply.json() if reply.content else {}
        except ValueError:
            value = {}
        if reply.is_success:
            return value
        error = value.get("error", reply.reason_phrase) if isinstance(value, dict) else reply.reason_phrase
        raise Failed(reply.status_code, error["message"] if isinstance(error, dict) else str(error))

    async def is_ready(self, path: str) -> bool:
        try:
            await self.send("GET", path, {})
        except Failed:
            return False
        return True


Handler = Callable[[Calls, Any, dict[str, str]], Awaitable[Any]]


async def _server_live(calls: Calls, asked: Any, headers: dict[str, str]) -> Any:
    return MESSAGES["ServerLiveResponse"](live=await calls.is_ready("/v2/health/live"))


async def _server_ready(calls: Calls, asked: Any, headers: dict[str, str]) -> Any:
    return MESSAGES["ServerReadyResponse"](ready=await calls.is_ready("/v2/health/ready"))


async def _model_ready(calls: Calls, asked: Any, headers: dict[str, str]) -> Any:
    try:
        found = await calls.send("GET", f"{_model(asked.name, asked.version)}/ready", headers)
    except Failed as failed:
        if failed.code is not grpc.StatusCode.UNAVAILABLE:
            raise
        found = {"ready": False}
    return MESSAGES["ModelReadyResponse"](ready=found["ready"])


async def _server_metadata(calls: Calls, asked: Any, headers: dict[str, str]) -> Any:
    return MESSAGES["ServerMetadataResponse"](**await calls.send("GET", "/v2", headers))


async def _model_metadata(calls: Calls, asked: Any, headers: dict[str, str]) -> Any:
    return MESSAGES["ModelMetadataResponse"](**await calls.send("GET", _model(asked.name, asked.version), headers))


async def _model_infer(calls: Calls, asked: Any, headers: dict[str, str]) -> Any:
    body = {
        "id": asked.id,
        "parameters": _parameters(asked.parameters),
        "inputs": [_input(asked, index) for index in range(len(asked.inputs))],
        "outputs": [{"name": one.name} for one in asked.outputs],
    }
    reply = await calls.send("POST", f"{_model(asked.model_name, asked.model_version)}/infer", headers, body)
    found = MESSAGES["ModelInferResponse"](
        model_name=reply["model_name"], model_version=reply["model_version"], id=reply["id"]
    )
    for output in reply["outputs"]:
        tensor = found.outputs.add(name=output["name"], datatype=output["datatype"], shape=output["shape"])
        if asked.raw_input_contents:
            found.raw_output_contents.append(_raw(output["datatype"], output["data"]))
        elif output["datatype"] == "BYTES":
            tensor.contents.bytes_contents.extend(text.encode() for text in output["data"])
        else:
            tensor.contents.fp32_contents.extend(output["data"])
    return found


async def _load(calls: Calls, asked: Any, headers: dict[str, str]) -> Any:
    await calls.send("POST", f"/v2/repository/models/{_quoted(asked.model_name)}/load", headers)
    return MESSAGES["RepositoryModelLoadResponse"]()


async def _unload(calls: Calls, asked: Any, headers: dict[str, str]) -> Any:
    await calls.send("POST", f"/v2/repository/models/{_quoted(asked.model_name)}/unload", headers)
    return MESSAGES["RepositoryModelUnloadResponse"]()


async def _check_health(calls: Calls, asked: Any, headers: dict[str, str]) -> Any:
    ready = await calls.is_ready("/ready")
    return HEALTH["HealthCheckResponse"](status=SERVING if ready else NOT_SERVING)


INFERENCE: dict[str, Handler] = {
    "ServerLive": _server_live,
    "ServerReady": _server_ready,
    "ModelReady": _model_ready,
    "ServerMetadata": _server_metadata,
    "ModelMetadata": _model_metadata,
    "ModelInfer": _model_infer,
    "RepositoryModelLoad": _load,
    "RepositoryModelUnload": _unload,
}


def _model(name: str, version: str) -> str:
    return f"/v2/models/{_quoted(name)}" + (f"/versions/{_quoted(version, safe='')}" if version else "")


def _quoted(name: str, safe: str = "/") -> str:
    """Return a name, quoted for a path. httpx would apply `..`, so dots are quoted too."""
    return quote(name, safe=safe).replace(".", "%2E")


def _parameters(given: Any) -> dict[str, Any]:
    """Return parameters as JSON values."""
    return {name: getattr(value, choice) for name, value in given.items() if (choice := value.WhichOneof(CHOICE))}


def _input(asked: Any, index: int) -> dict[str, Any]:
    """Return an input tensor as JSON. Raise Failed for a content that is no list of texts."""
    tensor = asked.inputs[index]
    try:
        if asked.raw_input_contents:
            data = [text.decode() for text in _elements(asked.raw_input_contents[index])]
        else:
            data = [text.decode() for text in tensor.contents.bytes_contents]
    except (UnicodeDecodeError, struct.error, IndexError) as error:
        raise Failed(400, f"The content of the input {tensor.name[:100]} is damaged: {error}.") from error
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape), "data": data}


def _elements(raw: bytes) -> list[bytes]:
    """Return the elements of a BYTES tensor: each is preceded by its length, a little-endian uint32."""
    found, at = [], 0
    while at < len(raw):
        (length,) = struct.unpack_from("<I", raw, at)
        if at + 4 + length > len(raw):
            raise struct.error("an element is longer than the tensor")
        found.append(raw[at + 4 : at + 4 + length])
        at += 4 + length
    return found


def _raw(datatype: str, data: list[Any]) -> bytes:
    """Return a tensor of BYTES or FP32 as raw content."""
    if datatype != "BYTES":
        return struct.pack(f"<{len(data)}f", *data)
    return b"".join(chain.from_iterable((struct.pack("<I", len(text)), text) for text in map(str.encode, data)))


def _method(calls: Calls, handler: Handler) -> Callable[[Any, Any], Awaitable[Any]]:
    async def run(asked: Any, context: Any) -> Any:
        metadata = context.invocation_metadata() or ()
        headers = {name: value for name, value in metadata if name in PASSED_ON and isinstance(value, str)}
        try:
            return await handler(calls, asked, headers)
        except Failed as failed:
            await context.abort(failed.code, str(failed))

    return run


def _services(calls: Calls) -> tuple[Any, ...]:
    """Return the services by name, with their methods."""
    inference = {
        name: grpc.unary_unary_rpc_method_handler(
            _method(calls, handler),
            MESSAGES[f"{name}Request"].FromString,
            MESSAGES[f"{name}Response"].SerializeToString,
        )
        for name, handler in INFERENCE.items()
    }
    check = grpc.unary_unary_rpc_method_handler(
        _method(calls, _check_health),
        HEALTH["HealthCheckRequest"].FromString,
        HEALTH["HealthCheckResponse"].SerializeToString,
    )
    return (
        grpc.method_handlers_generic_handler("inference.GRPCInferenceService", inference),
        grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": check}),
    )


@asynccontextmanager
async def grpc_served(
    config: Callable[[], GatewayConfig], app: ASGIApp, table: ConnectionTable, certificate: Certificate | None = None
) -> AsyncIterator[None]:
    """Serve gRPC on `endpoints.grpc_port`, with the certificate and the limits of connections of the HTTP port. Raise
    GrpcPortTaken."""
    first = config()
    host, port = first.endpoints.host, first.endpoints.grpc_port
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise GrpcPortTaken(
            f"endpoints.grpc_port: {host}:{port} cannot be used ({error.strerror}). Choose another."
        ) from error
    server = grpc.aio.server(
        options=[("grpc.max_receive_message_length", first.limits.max_body)],
        maximum_concurrent_rpcs=first.endpoints.connections.max,
    )
    server.add_generic_rpc_handlers(_services(Calls(app)))
    with TemporaryDirectory(prefix="slipway-grpc-") as folder:
        path = f"{folder}/socket"
        server.add_insecure_port(f"unix:{path}")
        await server.start()
        async with relayed(listener, path, table, config, certificate):
            try:
                yield
            finally:
                await server.stop(STOP_S)
