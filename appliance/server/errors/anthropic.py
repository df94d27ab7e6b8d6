"""Errors on /v1/messages and below, in the format of Anthropic's clients.

The format is `{"type": "error", "error": {"type", "message"}, "request_id"}`, for errors from any layer.
"""

from typing import Any

import orjson
from starlette.responses import Response

from appliance.server.errors.api import api_error

PATH = "/v1/messages"
REQUEST_ID = "request-id"  # header in which these clients expect the request ID

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


def is_messages(path: str) -> bool:
    return path == PATH or path.startswith(f"{PATH}/")


def message_error(error: Exception, request_id: str) -> dict[str, Any]:
    """Return the error object for any exception.

    The format has no field for the parameter, so the message starts with it.
    """
    failure = api_error(error)
    kind = TYPES.get(failure.status, "invalid_request_error" if failure.status < 500 else "api_error")
    named = failure.param is None or failure.param in failure.message
    message = failure.message if named else f"{failure.param}: {failure.message}"
    fields: dict[str, Any] = {"type": kind, "message": message}
    if failure.details is not None:
        fields["details"] = failure.details
    return {"type": "error", "error": fields, "request_id": request_id}


def message_error_response(error: Exception, request_id: str) -> Response:
    failure = api_error(error)
    headers = {**failure.headers, REQUEST_ID: request_id}
    return Response(
        orjson.dumps(message_error(failure, request_id)), failure.status, headers, media_type="application/json"
    )
