"""Bodies of /score and /rerank. One side of a pair is a text, or an object with `content`: a text or its parts."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from appliance.server.schema.common import Wire
from appliance.server.schema.numbers import Flag, Int
from appliance.server.schema.pooling import PoolingFields

PAIRS = (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2"))
"""Field names of the two sides."""


class Parts(Wire):
    """A text that consists of parts."""

    content: str | list[dict[str, Any]]


def _with_parts(value: Any) -> Any:
    """Convert an image or its embeddings, which is one content part."""
    is_part = isinstance(value, dict) and value.get("type") in ("image_url", "input_image", "image_embeds")
    return {"content": [value]} if is_part else value


Side = Annotated[str | Parts, BeforeValidator(_with_parts)]
Sides = Side | list[Side]


class ScoringFields(PoolingFields):
    """`max_tokens_per_query` and `max_tokens_per_doc` truncate a side before the pair is joined; 0: no limit."""

    max_tokens_per_query: Int = 0
    max_tokens_per_doc: Int = 0
    instruction: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ScoreRequest(ScoringFields):
    queries: Sides | None = None
    documents: Sides | None = None
    items: Sides | None = None
    data_1: Sides | None = None
    data_2: Sides | None = None
    text_1: Sides | None = None
    text_2: Sides | None = None

    @model_validator(mode="after")
    def _one_pair(self) -> "ScoreRequest":
        if len(self.given()) != 1:
            names = "; ".join(f"{first} and {second}" for first, second in PAIRS)
            message = f"exactly one pair of sides must be given: {names}"
            raise PydanticCustomError("sides", message, {"param": PAIRS[-1][0]})
        return self

    def given(self) -> list[tuple[str, str]]:
        """Return the pairs of field names that are both set."""
        return [pair for pair in PAIRS if all(getattr(self, name) is not None for name in pair)]


def _document(value: Any) -> Any:
    """Convert `{text}`, a document in Cohere's and Jina's APIs.

    A message part also has a text but is not a document.
    """
    if isinstance(value, dict) and isinstance(value.get("text"), str) and "type" not in value:
        return {"content": value["text"]}
    return value


Document = Annotated[Side, BeforeValidator(_document)]


class RerankRequest(ScoringFields):
    query: Side
    documents: list[Document]
    top_n: Int | None = Field(default=None, ge=0)
    return_documents: Flag = True
