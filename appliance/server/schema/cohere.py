"""Body of POST /v2/embed of Cohere's API."""

from typing import Any, Literal

from pydantic import Field

from appliance.server.schema.common import Wire
from appliance.server.schema.numbers import Int, Int64

EmbeddingType = Literal["float", "binary", "ubinary", "base64"]


class Contents(Wire):
    content: list[dict[str, Any]]


class EmbedRequest(Wire):
    """Requires exactly one of `texts`, `images` and `inputs`."""

    model: str | None = None
    texts: list[str] | None = None
    images: list[str] | None = None
    inputs: list[Contents] | None = None
    input_type: str | None = None
    embedding_types: list[EmbeddingType] | None = None
    output_dimension: Int | None = None
    truncate: Literal["NONE", "START", "END"] = "END"
    max_tokens: Int | None = Field(default=None, ge=1)
    priority: Int64 = 0
    cache_salt: str | None = None
    ttft_deadline_ms: Int | None = None
    deadline_ms: Int | None = None
