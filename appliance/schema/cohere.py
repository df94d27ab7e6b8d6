"""The body of POST /v2/embed, Cohere's."""

from typing import Any, Literal

from pydantic import Field

from appliance.schema.common import Int64, Wire

EmbeddingType = Literal["float", "binary", "ubinary", "base64"]


class Contents(Wire):
    content: list[dict[str, Any]]


class EmbedRequest(Wire):
    """Exactly one of `texts`, `images` and `inputs`."""

    model: str | None = None
    texts: list[str] | None = None
    images: list[str] | None = None
    inputs: list[Contents] | None = None
    input_type: str | None = None
    embedding_types: list[EmbeddingType] | None = None
    output_dimension: int | None = None
    truncate: Literal["NONE", "START", "END"] = "END"
    max_tokens: int | None = Field(default=None, ge=1)
    priority: Int64 = 0
    cache_salt: str | None = None
    ttft_deadline_ms: int | None = None
    deadline_ms: int | None = None
