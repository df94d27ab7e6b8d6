"""Explanations of the errors of the HTTP API, by status, type or class. This module loads the gateway's modules."""

from appliance.cli.explanations.layout import field
from appliance.config.suggest import flat
from appliance.server.errors.api import ApiError

# Meaning and advice by the name of the class in appliance.server.errors.api.
API: dict[str, tuple[str, str]] = {
    "ApiError": (
        "The server failed in a way that nobody foresaw.",
        "The gateway's log has the traceback beside the request's id (error.request_id).",
    ),
    "BadRequest": (
        "The request is well formed and cannot be served as it stands.",
        "Change the field that error.param names; limits.* and model.max_context are the operator's to change.",
    ),
    "InvalidBody": (
        "The body is no JSON, or has a field of the wrong type.",
        "Compare the field that error.param names with /openapi.json.",
    ),
    "InvalidRequest": (
        "A request to /v1/responses that cannot be served as it stands.",
        "Change the field that error.param names; docs/http.md says what the Responses API takes here.",
    ),
    "Unauthorized": (
        "The route wants an API key, and the request has none, or another one.",
        "Send `Authorization: Bearer KEY` with a key of the list that endpoints.api_keys names.",
    ),
    "NotFound": (
        "There is no such path, or the request names a model that is not served.",
        "GET /v1/models lists the names; model.names gives them.",
    ),
    "MethodNotAllowed": ("The path takes another method.", "The Allow header names it."),
    "RequestTimeout": (
        "The request's head or body did not arrive within endpoints.connections.head_timeout or body_timeout.",
        "Send it faster, or raise the key that the message names.",
    ),
    "HeadTooLarge": (
        "Request line and headers, or trailers, are larger than endpoints.connections.max_head, or there are too many.",
        "Send fewer or smaller headers (cookies are often the reason), or raise the key that the message names.",
    ),
    "TooLarge": ("The body is larger than limits.max_body.", "Send less, or raise limits.max_body."),
    "UnsupportedEncoding": (
        "The body is compressed in a way that is not read.",
        "Send it with Content-Encoding gzip or deflate, or without one.",
    ),
    "Unavailable": (
        "The service cannot take requests now: its engines load or restart, or it is being stopped.",
        "Send the same request again after Retry-After; /ready says how far the engines are.",
    ),
    "Overloaded": (
        "As many requests wait as limits.max_waiting allows, or as many prompt tokens as limits.max_waiting_tokens; or "
        "the request's ttft_deadline_ms or deadline_ms cannot be met behind what waits.",
        "Send the same request again after Retry-After; add engines (parallelism.data) if it is often so.",
    ),
    "RateLimited": (
        "The API key has used the requests or the tokens that it may use in a minute.",
        "Send the same request again after Retry-After; the limits stand in limits.per_key, or in the list of keys.",
    ),
    "DeadlineExceeded": (
        "The request's deadline_ms passed, or its ttft_deadline_ms without a first token; it was ended.",
        "Give it more time, or ask for less; slipway why ID tells where its time went.",
    ),
    "ModelFault": (
        "The served model or its settings are at fault, such as a chat template that fails on every conversation.",
        "Sending it again does not help; the gateway's log says what the operator can correct.",
    ),
    "EngineFailed": (
        "The engine ended, or gave up, under this request.",
        "Send it again: the engine is restarted. Read the last lines of its log for the cause.",
    ),
    "Unprocessable": (
        "The request is understood and never served as it is: its Idempotency-Key belongs to another request, or the "
        "request is quarantined.",
        "Send another key, or another request; error.message says which.",
    ),
    "Quarantined": (
        "Engines ended under this very request, and again while it ran alone; it and others with its content are "
        "refused.",
        "Change its content or parameters; the log of the engine says what ended it, which is worth a report.",
    ),
    "TaskNotServed": (
        "The route is of a task that the model is not served to; with endpoints.compat: openai this is 404.",
        "Send it to a service whose model has the task: error.message says which tasks this one serves.",
    ),
    "NotSupported": ("The server does not do this, and no retry will help.", "docs/http.md says what is served."),
}


def tell_error(word: str) -> str:
    def below(kind: type[ApiError]) -> list[type[ApiError]]:
        return [kind, *(inner for one in kind.__subclasses__() for inner in below(one))]

    lines = []
    for kind in below(ApiError):
        if flat(word) in (str(kind.status), flat(kind.type), flat(kind.__name__)):
            meaning, cure = API[kind.__name__]
            lines += [f"HTTP {kind.status}, error.type {kind.type!r}", field("meaning", meaning), field("cure", cure)]
    return "\n".join(lines)
