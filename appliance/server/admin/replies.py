"""JSON Schemas of replies by method and path, for the OpenAPI description.

Requests are described by their models (appliance/server/schema). Replies are built by their routes, and tests compare
actual replies with these schemas.
"""

from typing import Any

from appliance.observability.history import NAMES as HISTORY

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
FLAG: Schema = {"type": "boolean"}
ANY: Schema = {}


def either(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def or_null(schema: Schema) -> Schema:
    return either(schema, {"type": "null"})


def listed(schema: Schema) -> Schema:
    return {"type": "array", "items": schema}


def exactly(*values: str) -> Schema:
    return {"enum": list(values)}


def fields(**known: Schema) -> Schema:
    """Return the schema of an object that has at least these fields."""
    return {"type": "object", "properties": known, "required": list(known)}


ERROR = fields(error=fields(message=TEXT, type=TEXT, param=or_null(TEXT), code=WHOLE, request_id=TEXT))
MESSAGES_ERROR = fields(type=exactly("error"), error=fields(type=TEXT, message=TEXT), request_id=or_null(TEXT))
USAGE = fields(prompt_tokens=WHOLE, completion_tokens=WHOLE, total_tokens=WHOLE)
FINISH = or_null(exactly("stop", "length", "tool_calls", "abort", "error"))
CALL = fields(id=TEXT, type=exactly("function"), function=fields(name=TEXT, arguments=TEXT))
MESSAGE = fields(role=TEXT, content=or_null(TEXT)) | {
    "properties": {
        "role": TEXT,
        "content": or_null(TEXT),
        "tool_calls": listed(CALL),
        "reasoning": or_null(TEXT),
        "reasoning_content": or_null(TEXT),
    }
}
CHAT = fields(
    id=TEXT,
    object=exactly("chat.completion"),
    created=WHOLE,
    model=TEXT,
    choices=listed(fields(index=WHOLE, message=MESSAGE, finish_reason=FINISH, logprobs=or_null(fields(content=ANY)))),
    usage=USAGE,
)
COMPLETION = fields(
    id=TEXT,
    object=exactly("text_completion"),
    created=WHOLE,
    model=TEXT,
    choices=listed(fields(index=WHOLE, text=TEXT, finish_reason=FINISH, logprobs=or_null({"type": "object"}))),
    usage=USAGE,
)
RESPONSE = fields(
    id=TEXT,
    object=exactly("response"),
    created_at=NUMBER,
    status=exactly("completed", "incomplete", "failed", "in_progress", "queued", "cancelled"),
    model=TEXT,
    output=listed(fields(type=TEXT, id=TEXT)),
    usage=or_null(fields(input_tokens=WHOLE, output_tokens=WHOLE, total_tokens=WHOLE)),
)
ANTHROPIC = fields(
    id=TEXT,
    type=exactly("message"),
    role=exactly("assistant"),
    model=TEXT,
    content=listed(fields(type=TEXT)),
    stop_reason=or_null(TEXT),
    stop_sequence=or_null(TEXT),
    usage=fields(input_tokens=WHOLE, output_tokens=WHOLE),
)
MODEL = fields(id=TEXT)
READY = fields(status=TEXT, phase=TEXT, progress=NUMBER, engines=listed(fields(name=TEXT, phase=TEXT)))
VECTORS = fields(object=exactly("list"), model=TEXT, data=listed(fields(index=WHOLE)), usage=ANY)
RANKING = fields(results=listed(fields(index=WHOLE, relevance_score=NUMBER)))

# Replies without a body: only the status matters.
EMPTY = (("get", "/health"), ("get", "/ping"), ("post", "/ping"))
PLAIN = (("get", "/metrics"), ("get", "/metrics/"))
STREAMED = (
    ("post", "/v1/chat/completions"),
    ("post", "/v1/completions"),
    ("post", "/v1/responses"),
    ("get", "/v1/responses/{response_id}"),
    ("post", "/v1/messages"),
    ("post", "/invocations"),
    ("post", "/v2/models/{name}/generate_stream"),
    ("post", "/v2/models/{name}/versions/{version}/generate_stream"),
)
GENERATED = fields(model_name=TEXT, model_version=TEXT, text_output=TEXT)
INFERRED = fields(
    model_name=TEXT, model_version=TEXT, id=TEXT,
    outputs=listed(fields(name=TEXT, datatype=TEXT, shape=listed(WHOLE), data=listed(ANY))),
)  # fmt: skip
TENSORS = listed(fields(name=TEXT, datatype=TEXT, shape=listed(WHOLE)))
ABOUT = fields(name=TEXT, versions=listed(TEXT), platform=TEXT, inputs=TENSORS, outputs=TENSORS)
INFERENCE: dict[tuple[str, str], Schema] = {
    ("get", "/v2"): fields(name=TEXT, version=TEXT, extensions=listed(TEXT)),
    ("get", "/v2/models"): fields(models=listed(TEXT)),
    **{
        (method, f"/v2/models/{{name}}{version}{end}"): schema
        for version in ("", "/versions/{version}")
        for method, end, schema in (
            ("get", "", ABOUT),
            ("get", "/ready", fields(name=TEXT, ready=FLAG)),
            ("post", "/infer", INFERRED),
            ("post", "/generate", GENERATED),
            ("post", "/generate_stream", GENERATED),
        )
    },
    ("post", "/v1/models/{name}:predict"): fields(predictions=listed(ANY)),
}
REPLIES: dict[tuple[str, str], Schema] = {
    ("post", "/v1/chat/completions"): CHAT,
    ("post", "/v1/completions"): COMPLETION,
    ("post", "/v1/responses"): RESPONSE,
    ("get", "/v1/responses/{response_id}"): RESPONSE,
    ("post", "/v1/responses/{response_id}/cancel"): RESPONSE,
    ("delete", "/v1/responses/{response_id}"): fields(id=TEXT, object=TEXT, deleted=FLAG),
    ("get", "/v1/responses/{response_id}/input_items"): fields(object=exactly("list"), data=listed(fields(type=TEXT))),
    ("post", "/v1/responses/input_tokens"): fields(object=TEXT, input_tokens=WHOLE),
    ("post", "/v1/messages"): ANTHROPIC,
    ("post", "/v1/messages/count_tokens"): fields(input_tokens=WHOLE),
    ("get", "/v1/models"): fields(data=listed(MODEL)),
    ("get", "/v1/models/{name}"): MODEL,
    ("post", "/tokenize"): fields(count=WHOLE, max_model_len=WHOLE, tokens=listed(WHOLE)),
    ("post", "/detokenize"): fields(prompt=TEXT),
    ("get", "/ready"): READY,
    ("get", "/version"): fields(version=TEXT),
    ("get", "/load"): fields(server_load=WHOLE),
    ("get", "/load/history"): fields(interval_s=NUMBER, **dict.fromkeys(HISTORY, listed(NUMBER))),
    ("get", "/v1/requests"): fields(data=listed({"type": "object"})),
    ("post", "/v1/embeddings"): VECTORS,
    ("post", "/score"): fields(data=listed(fields(index=WHOLE, score=NUMBER))),
    ("post", "/v1/score"): fields(data=listed(fields(index=WHOLE, score=NUMBER))),
    ("post", "/generative_scoring"): fields(
        data=listed(fields(index=WHOLE, score=NUMBER, label_scores=listed(NUMBER)))
    ),
    ("post", "/rerank"): RANKING,
    ("post", "/v1/rerank"): RANKING,
    ("post", "/v2/rerank"): RANKING,
    **dict.fromkeys((("get", "/v1/health/live"), ("get", "/v2/health/live")), fields(status=TEXT)),
    **dict.fromkeys((("get", "/v1/health/ready"), ("get", "/v2/health/ready")), READY),
    **INFERENCE,
}


def responses(method: str, path: str) -> Schema:
    """Return the `responses` of an operation: the success in its media types, and errors."""
    key = (method, path)
    content: Schema = {}
    if key in PLAIN:
        content["text/plain"] = {"schema": TEXT}
    elif key not in EMPTY:
        content["application/json"] = {"schema": REPLIES.get(key, ANY)}
    if key in STREAMED:
        content["text/event-stream"] = {"schema": TEXT}
    success: Schema = {"description": "OK"} | ({"content": content} if content else {})
    error = MESSAGES_ERROR if path.startswith("/v1/messages") else ERROR
    if path.startswith("/v2/models"):
        error = fields(error=TEXT, request_id=TEXT)
    refused: Schema = {"description": "An error", "content": {"application/json": {"schema": error}}}
    broken = refused
    if key in EMPTY:
        broken = {"description": "Not ready"}
    elif path.endswith("/ready") and not path.startswith("/v2/models"):
        broken = {**success, "description": "Not ready"}
    return {"200": success, "4XX": refused, "5XX": broken}
