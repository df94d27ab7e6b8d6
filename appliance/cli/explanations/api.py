"""Explanations of the errors of the HTTP API, by status, type or class. This module loads the gateway's modules."""

from appliance.cli.explanations.layout import field
from appliance.config.aliases import flat
from appliance.server.errors.api import ApiError

# Meaning and advice by the name of the class in appliance.server.errors.api.
API: dict[str, tuple[str, str]] = {
    "ApiError": (
        "The server failed with an unexpected error.",
        "The gateway's log has the traceback with the request's ID (error.request_id).",
    ),
    "BadRequest": (
        "The request is well formed but has a value that cannot be served.",
        "Change the field in error.param. The operator can change limits.* and model.max_context.",
    ),
    "InvalidInput": (
        "A request to load or unload a LoRA adapter has a wrong name or path, or the adapter is loaded already.",
        "Change the field in error.param. docs/adapters.md describes the folders that are allowed.",
    ),
    "InvalidBody": (
        "The body is not valid JSON, or a field has the wrong type.",
        "Compare the field in error.param with /openapi.json.",
    ),
    "InvalidRequest": (
        "A request to /v1/responses has a value that cannot be served.",
        "Change the field in error.param. docs/http.md lists the supported fields of the Responses API.",
    ),
    "Unauthorized": (
        "The route requires an API key, and the request has none or an unknown one.",
        "Send `Authorization: Bearer KEY` with a key from the list in endpoints.api_keys.",
    ),
    "Forbidden": (
        "The API key of the request does not permit it. Only keys with adapters=yes load and unload LoRA adapters, and "
        "only keys with profile=yes use the profiler.",
        "Use such a key, or ask the operator to add adapters=yes or profile=yes to its line in endpoints.api_keys.",
    ),
    "NotFound": (
        "The path does not exist, or the requested model is not served.",
        "GET /v1/models lists the names, which are set by model.names.",
    ),
    "NoSession": (
        "A body with `requestType: CLOSE` is to close a session of SageMaker, but the request names none.",
        "Send the header X-Amzn-SageMaker-Session-Id with the id that the new session returned.",
    ),
    "Conflict": (
        "POST /models names a model or LoRA adapter that is loaded already.",
        "Use it, or unload it first with DELETE /models/NAME.",
    ),
    "MethodNotAllowed": ("The path does not support this method.", "Use a method from the Allow header."),
    "RequestTimeout": (
        "The request's head or body did not arrive within endpoints.connections.head_timeout or body_timeout.",
        "Send it faster, or raise the key in the message.",
    ),
    "HeadTooLarge": (
        "Request line and headers, or trailers, are larger than endpoints.connections.max_head, or there are too many.",
        "Send fewer or smaller headers (cookies are often the reason), or raise the key in the message.",
    ),
    "TooLarge": ("The body is larger than limits.max_body.", "Send less, or raise limits.max_body."),
    "FileTooLarge": (
        "The audio file is larger than limits.max_audio_file.",
        "Send a compressed file (FLAC, Ogg or MP3), or raise limits.max_audio_file and, if necessary, limits.max_body.",
    ),
    "UnsupportedEncoding": (
        "The body has an unsupported Content-Encoding.",
        "Send it with Content-Encoding gzip or deflate, or without one.",
    ),
    "Unavailable": (
        "The service cannot accept requests now: its engines are loading or restarting, or it is shutting down.",
        "Repeat the request after Retry-After. /ready shows the progress of the engines.",
    ),
    "Overloaded": (
        "As many requests wait as limits.max_waiting allows, or as many prompt tokens as limits.max_waiting_tokens; or "
        "the request's ttft_deadline_ms or deadline_ms cannot be met behind what waits.",
        "Repeat the request after Retry-After. Add engines (parallelism.data) if this happens often.",
    ),
    "RateLimited": (
        "The API key has used its requests or tokens per minute.",
        "Repeat the request after Retry-After. The limits are set by limits.per_key or in the list of keys.",
    ),
    "DeadlineExceeded": (
        "The request's deadline_ms passed, or its ttft_deadline_ms passed before the first token.",
        "Increase the deadline or reduce max_tokens. `slipway why ID` shows where the time went.",
    ),
    "ModelFault": (
        "The served model or its settings are faulty, such as a chat template that fails on every conversation.",
        "A retry does not help. The gateway's log shows what the operator has to correct.",
    ),
    "EngineFailed": (
        "The engine crashed or failed while it ran this request.",
        "Repeat the request; the engine is restarted. The last lines of its log show the cause.",
    ),
    "Unprocessable": (
        "The request is understood and never served as it is: its Idempotency-Key belongs to another request, or the "
        "request is quarantined.",
        "Use another key or another request; error.message says which.",
    ),
    "Quarantined": (
        "Engines ended under this very request, and again while it ran alone; it and others with its content are "
        "refused.",
        "Change its content or parameters; the log of the engine says what ended it, which is worth a report.",
    ),
    "TaskNotServed": (
        "The model is not served for the task of this route. With endpoints.compat: openai the status is 404.",
        "Use a service whose model has the task; error.message lists the tasks of this one.",
    ),
    "NotSupported": (
        "The server does not support this; a retry does not help.",
        "docs/http.md lists what is supported.",
    ),
}


def explain_error(word: str) -> str:
    def below(kind: type[ApiError]) -> list[type[ApiError]]:
        return [kind, *(inner for one in kind.__subclasses__() for inner in below(one))]

    lines = []
    for kind in below(ApiError):
        if flat(word) in (str(kind.status), flat(kind.type), flat(kind.__name__)):
            meaning, cure = API[kind.__name__]
            lines += [f"HTTP {kind.status}, error.type {kind.type!r}", field("meaning", meaning), field("cure", cure)]
    return "\n".join(lines)
