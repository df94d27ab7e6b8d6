"""Body of POST /generative_scoring."""

from typing import Annotated, Any

from pydantic import AfterValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from appliance.server.schema.common import Wire
from appliance.server.schema.numbers import Flag, Int, Int64, TokenId

_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_SIDE_SCHEMA = {"anyOf": [{"type": "string"}, _IDS]}
_ITEMS_SCHEMA = {"type": "array", "minItems": 1, "items": _SIDE_SCHEMA}


def _is_side(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(type(each) is int for each in value))


def _checked_query(value: Any) -> Any:
    if not _is_side(value):
        raise PydanticCustomError("query", "query must be a text or a list of token ids", {"param": "query"})
    return value


def _checked_items(value: Any) -> Any:
    if not isinstance(value, list) or not value or not all(map(_is_side, value)):
        raise PydanticCustomError(
            "items", "items must be a list of texts or of lists of token ids, at least one", {"param": "items"}
        )
    return value


class LabelScoresRequest(Wire):
    """Prompts that consist of a query and an item each. `label_token_ids` are the candidates for the next token."""

    model: str | None = None
    query: Annotated[Any, AfterValidator(_checked_query), WithJsonSchema(_SIDE_SCHEMA)]
    items: Annotated[Any, AfterValidator(_checked_items), WithJsonSchema(_ITEMS_SCHEMA)]
    label_token_ids: list[TokenId] = Field(min_length=1)
    apply_softmax: Flag = True
    item_first: Flag = False
    add_special_tokens: Flag = True
    priority: Int64 = 0
    cache_salt: str | None = None
    ttft_deadline_ms: Int | None = None
    deadline_ms: Int | None = None
    user: str | None = None
