"""Format of the errors of each path: OpenAI's, Anthropic's, or the Open Inference Protocol's."""

from collections.abc import Callable

import orjson
from starlette.responses import Response

from appliance.server.errors.anthropic import is_messages, message_error_response
from appliance.server.errors.api import api_error, error_response

INFERENCE = ("/v2/models", "/v2/repository")


def response_of(path: str) -> Callable[[Exception, str], Response]:
    """Return the function that converts an exception to the response of this path. It takes the request ID, too."""
    if is_messages(path):
        return message_error_response
    if path in INFERENCE or path.startswith(tuple(f"{prefix}/" for prefix in INFERENCE)):
        return inference_error_response
    return error_response


def inference_error_response(error: Exception, request_id: str) -> Response:
    """Return `{"error": MESSAGE}`, as the Open Inference Protocol requires. The parameter is part of the message."""
    failure = api_error(error)
    named = failure.param is None or failure.param in failure.message
    message = failure.message if named else f"{failure.param}: {failure.message}"
    body = orjson.dumps({"error": message, "request_id": request_id})
    return Response(body, failure.status, failure.headers, media_type="application/json")
