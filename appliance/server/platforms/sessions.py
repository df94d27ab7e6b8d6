"""Requests on /invocations that open or close a session of Amazon SageMaker."""

import json
from typing import Any

from fastapi import Request
from starlette.responses import JSONResponse, Response

from appliance.server.errors.api import ApiError, BadRequest
from appliance.server.http.body import apart
from appliance.server.http.service import Service
from appliance.server.http.sessions import HEADER

KIND = "requestType"


class NoSession(ApiError):
    """A session is to be closed, but none is named. The status is the one of AWS's containers."""

    status = 424
    type = "FailedDependencyError"


async def session_reply(service: Service, request: Request, body: bytes) -> Response | None:
    """Open or close a session if the body asks for it. Return None for another body."""
    if KIND.encode() not in body:
        return None
    value = await apart(len(body), _object, body)
    if KIND not in value:
        return None
    sessions, kind = service.sessions, value[KIND]
    if not sessions.keep_s:
        raise BadRequest("Stateful sessions are not enabled: endpoints.sessions.keep is 0s.", KIND)
    if more := sorted(value.keys() - {KIND}):
        raise BadRequest(f"A body with {KIND} has no other fields; remove {more[0][:100]}.", KIND)
    if kind == "NEW_SESSION":
        name, end = sessions.open()
        headers = {"X-Amzn-SageMaker-New-Session-Id": f"{name}; Expires={end:%Y-%m-%dT%H:%M:%SZ}"}
        return JSONResponse({"message": f"Session {name} created"}, headers=headers)
    if kind == "CLOSE":
        name = request.headers.get(HEADER, "")
        if not name:
            raise NoSession(f"{KIND} CLOSE requires the header {HEADER}.", HEADER)
        sessions.close(name)
        headers = {"X-Amzn-SageMaker-Closed-Session-Id": name}
        return JSONResponse({"message": f"Session {name} closed"}, headers=headers)
    raise BadRequest(f"{KIND} must be NEW_SESSION or CLOSE.", KIND)


def _object(body: bytes) -> dict[str, Any]:
    """Return the object in a body, or {} for anything else: the route of a request reports faults of its body."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
