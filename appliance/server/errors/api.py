"""Translation of exceptions into the API's error object.

The object is `{"error": {"message", "type", "param", "code", "request_id"}}`; `code` is the HTTP status. Routes raise
exceptions and do not build error responses themselves. Messages never contain file paths, object addresses or
tracebacks (docs/http.md, Errors).
"""

import math
import re
from typing import Any

import orjson
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from engine.api.errors import CheckpointError, EngineGone, RequestError

_PATH = re.compile(r"(?<![\w:/.<])(?!/v1/)(?:/[\w.@+\-]+){2,}/?")
_ADDRESS = re.compile(r"\s+(?:object\s+)?at 0x[0-9a-fA-F]+")
_TRACEBACK = re.compile(r"Traceback \(most recent call last\):.*", re.DOTALL)

ENGINE_FAILURE = "The server had an error while processing your request."


def sanitise(message: str) -> str:
    """Remove file paths (except API routes), object addresses and tracebacks from a message."""
    return _PATH.sub("<path>", _ADDRESS.sub("", _TRACEBACK.sub("", message))).strip()


class ApiError(Exception):
    """Error that is reported to the client. Subclasses set `type` and `status`; `param` is the field to change."""

    status = 500
    type = "InternalServerError"

    def __init__(
        self,
        message: str,
        param: str | None = None,
        headers: dict[str, str] | None = None,
        details: dict[str, str] | None = None,
    ) -> None:
        """`details` are part of the error object of the Messages API, where clients look for an error code."""
        super().__init__(message)
        self.details = details
        self.message = sanitise(message)
        self.param = param
        self.headers = headers or {}


class BadRequest(ApiError):
    """The request is well formed but cannot be served."""

    status = 400
    type = "BadRequestError"


class InvalidInput(ApiError):
    """The request to load or unload a LoRA adapter is invalid."""

    status = 400
    type = "InvalidUserInput"


class InvalidBody(ApiError):
    """The body is not valid JSON or does not match the route's schema."""

    status = 400
    type = "Bad Request"


class Unauthorized(ApiError):
    status = 401
    type = "AuthenticationError"

    def __init__(self) -> None:
        message = "Missing or wrong API key: send it as `Authorization: Bearer <key>` or in the x-api-key header."
        super().__init__(message, headers={"WWW-Authenticate": "Bearer"})


class Forbidden(ApiError):
    """The API key does not permit this request."""

    status = 403
    type = "PermissionDeniedError"


class NotFound(ApiError):
    """The resource does not exist. The message may quote the client's input, so it is not sanitised."""

    status = 404
    type = "NotFoundError"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param)
        self.message = message


class Conflict(ApiError):
    """The resource exists."""

    status = 409
    type = "ConflictError"


class MethodNotAllowed(ApiError):
    status = 405
    type = "MethodNotAllowedError"


class TooLarge(ApiError):
    """The body exceeds limits.max_body. The rest is read and dropped, because a reset would overtake this reply."""

    status = 413
    type = "RequestEntityTooLargeError"

    def __init__(self, limit: int) -> None:
        message = f"The request body is larger than {limit} bytes, the server's limits.max_body."
        super().__init__(message)


class UnsupportedEncoding(ApiError):
    status = 415
    type = "UnsupportedMediaTypeError"

    def __init__(self, encoding: str) -> None:
        message = f"Content-Encoding {encoding[:64]!r} is not supported; send gzip, deflate or none."
        super().__init__(message, "content-encoding", headers={"Accept-Encoding": "gzip, deflate"})


class RequestTimeout(ApiError):
    """The client did not send its request in time."""

    status = 408
    type = "RequestTimeoutError"

    def __init__(self, part: str, seconds: float) -> None:
        """`part` is "head" or "body"."""
        key = f"endpoints.connections.{part}_timeout"
        message = f"The request {part} did not arrive within {seconds:g} s, the server's {key}."
        super().__init__(message, headers={"Connection": "close"})


class HeadTooLarge(ApiError):
    """The request line and headers, or the trailers, exceed a limit."""

    status = 431
    type = "RequestHeaderFieldsTooLargeError"

    def __init__(self, *, size: int = 0, headers: int = 0) -> None:
        if headers:
            message = (
                f"The request has more than {headers} header fields, the server's endpoints.connections.max_headers."
            )
        else:
            message = f"The request head is larger than {size} bytes, the server's endpoints.connections.max_head."
        super().__init__(message, headers={"Connection": "close"})


class Unavailable(ApiError):
    """Temporary failure: the same request can succeed after `retry_after_s`."""

    status = 503
    type = "ServiceUnavailableError"

    def __init__(self, message: str, retry_after_s: int, *, close: bool = False) -> None:
        headers = {"Retry-After": str(retry_after_s)}
        if close:
            headers["Connection"] = "close"
        super().__init__(message, headers=headers)


class Overloaded(Unavailable):
    """The queue is full, in requests (ER-13) or in prompt tokens (ER-14)."""

    type = "Service Unavailable"


class EngineFailed(ApiError):
    """The engine crashed or gave up while it computed this request."""

    def __init__(self, message: str = ENGINE_FAILURE) -> None:
        super().__init__(message)


class ModelFault(ApiError):
    """A fault of the served model or its settings: every such request fails until the operator corrects it."""

    def __init__(self, message: str) -> None:
        failure = f"{message} This is a fault of the served model, not of the request; the operator can correct it."
        super().__init__(failure, headers={"x-should-retry": "false"})


class DeadlineExceeded(ApiError):
    """The request missed its deadline. Automatic retries are disabled, because the client's time is over."""

    status = 504
    type = "DeadlineExceededError"

    def __init__(self) -> None:
        message = (
            "The deadline of this request has passed (ttft_deadline_ms before the first token, then deadline_ms). "
            "Increase the deadline or reduce max_tokens."
        )
        super().__init__(message, headers={"x-should-retry": "false"})


class RateLimited(ApiError):
    """An API key has used its allowance per minute."""

    status = 429
    type = "RateLimitError"

    def __init__(self, unit: str, per_minute: int, seconds: float, headers: dict[str, str]) -> None:
        """`seconds` is the time until the same request is accepted."""
        message = (
            f"This API key has used its {per_minute:,} {unit} per minute. The next request is accepted after "
            f"{seconds:.1f} s; x-ratelimit-reset-{unit} says when the full allowance is available again."
        )
        super().__init__(message, headers={**headers, "Retry-After": str(max(1, math.ceil(seconds)))})


class Unprocessable(ApiError):
    """The request was understood but will never be accepted unchanged."""

    status = 422
    type = "UnprocessableEntityError"


class Quarantined(Unprocessable):
    """A request with this content crashed engines while it ran alone."""

    def __init__(self, seconds: float, tokens: int | None = None) -> None:
        """`seconds` is how long this content is rejected. `tokens` is the length of its reply at the last crash, if
        known.
        """
        at = "" if tokens is None else f" at token {tokens} of its reply"
        super().__init__(
            f"This request is isolated because a request with the same content crashed engines{at} while it ran alone. "
            f"The same content is rejected for {max(1, math.ceil(seconds / 60))} min; change the prompt or a sampling "
            "parameter.",
            headers={"x-should-retry": "false"},
        )


class NotSupported(ApiError):
    """Not implemented. The header disables retries, since the SDKs otherwise retry each 5xx."""

    status = 501
    type = "NotImplementedError"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param, headers={"x-should-retry": "false"})


class TaskNotServed(NotSupported):
    """Reply of a route whose task the model does not support, as in vLLM.

    The message names the path, so it is not sanitised.
    """

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message, param)
        self.message = message


class ClientGone(Exception):
    """The client closed its connection before the reply was complete, so no response is sent."""

    status = 499


def _from_http(error: HTTPException) -> ApiError:
    headers = dict(error.headers or {})
    if error.status_code == 404:
        return NotFound("Not Found: this path does not exist; GET /openapi.json lists the routes.")
    if error.status_code == 405:
        return MethodNotAllowed(f"Method Not Allowed: use {headers.get('Allow', 'another method')}.", headers=headers)
    status = error.status_code
    translated = (BadRequest if status < 500 else ApiError)(str(error.detail), headers=headers)
    translated.status = status
    return translated


def api_error(error: Exception) -> ApiError:
    """Return the API error for any exception. Unexpected exceptions are reported without details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return BadRequest(str(error), error.param)
    if isinstance(error, CheckpointError):
        return ModelFault(str(error))
    if isinstance(error, EngineGone):
        return EngineFailed()
    if isinstance(error, HTTPException):
        return _from_http(error)
    if isinstance(error, RequestValidationError):
        fault = error.errors()[0]
        return InvalidBody(f"1 validation error: {fault['msg']}", ".".join(map(str, fault["loc"])))
    if isinstance(error, NotImplementedError):
        return NotSupported(str(error) or "The server does not support this.")
    if isinstance(error, ValueError | OverflowError):
        return BadRequest(str(error))
    return ApiError("Internal server error")


def is_unexpected(error: Exception) -> bool:
    """Return if the exception was not raised deliberately, so that its traceback belongs in the log."""
    deliberate = ApiError | RequestError | EngineGone | CheckpointError | HTTPException | RequestValidationError
    return not isinstance(error, deliberate)


def error_object(error: Exception, request_id: str) -> dict[str, Any]:
    """Return the error object of any exception, for a response body or for a record within a stream (ER-17)."""
    failure = api_error(error)
    return {
        "error": {
            "message": failure.message,
            "type": failure.type,
            "param": failure.param,
            "code": failure.status,
            "request_id": request_id,
        }
    }


def error_response(error: Exception, request_id: str) -> Response:
    failure = api_error(error)
    body = orjson.dumps(error_object(failure, request_id))
    return Response(body, failure.status, failure.headers, media_type="application/json")
