"""Bodies of pooling routes: shared fields, and /v1/embeddings, /pooling and /classify."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from appliance.server.schema.chat import TemplateOptions
from appliance.server.schema.common import Wire
from appliance.server.schema.numbers import Flag, Int, Int64

EncodingFormat = Literal["float", "base64", "bytes", "bytes_only"]
EmbedDtype = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
Endianness = Literal["native", "little", "big"]


class PoolingFields(Wire):
    """Fields of every pooling route.

    `use_activation` False requests the numbers before normalisation, softmax or sigmoid.
    """

    model: str | None = None
    user: str | None = None
    truncate_prompt_tokens: Int | None = None
    truncation_side: Literal["left", "right"] | None = None
    padding: Literal["max_length", "do_not_pad"] | None = None
    request_id: str | None = None
    priority: Int64 = 0
    mm_processor_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None
    use_activation: Flag | None = None
    ttft_deadline_ms: Int | None = None
    deadline_ms: Int | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_normalize(cls, value: Any) -> Any:
        if isinstance(value, dict) and "normalize" in value:
            message = "Parameter normalize was removed; use use_activation instead."
            raise PydanticCustomError("removed", message, {"param": "normalize"})
        return value


class Encoded(Wire):
    """Format of vectors. `embed_dtype` and `endianness` apply to base64 and bytes."""

    encoding_format: EncodingFormat = "float"
    embed_dtype: EmbedDtype = "float32"
    endianness: Endianness = "native"


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _checked_input(value: Any) -> Any:
    """Validate each element once, as for completion prompts.

    An empty text is valid, since special tokens may be added to it.
    """
    if value is None or isinstance(value, str) or _is_ids(value):
        return value
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value) or all(_is_ids(item) for item in value):
            return value
        if all(isinstance(item, str | dict) for item in value):
            return [{"type": "text", "text": item} if isinstance(item, str) else item for item in value]
        message = "input must be a string, a list of strings or content parts, of token ids, or of lists of token ids"
        raise PydanticCustomError("input", message, {"param": "input"})
    raise PydanticCustomError("input", "input must not be empty", {"param": "input"})


def _checked_messages(value: Any) -> Any:
    if value is None:
        return value
    if isinstance(value, list) and value:
        if all(isinstance(item, dict) for item in value):
            return value
        if all(isinstance(item, list) and item and all(isinstance(one, dict) for one in item) for item in value):
            return value
    message = "messages must be a conversation, a list of objects, or a list of conversations; none may be empty"
    raise PydanticCustomError("messages", message, {"param": "messages"})


_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_TEXTS = {"type": "array", "items": {"type": "string"}}
_INPUT_SCHEMA = {"anyOf": [{"type": "string"}, _TEXTS, _TOKENS, {"type": "array", "items": _TOKENS}]}
_INPUT_SCHEMA["anyOf"].append({"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "object"}]}})
_TALK = {"type": "array", "items": {"type": "object"}}
_MESSAGES_SCHEMA = {"anyOf": [_TALK, {"type": "array", "items": _TALK}]}


class PromptRequest(PoolingFields, TemplateOptions):
    """Requires `input` (texts, content parts or token ids) or `messages` (one conversation or several).

    By default, special tokens are added to texts but not to conversations.
    """

    input: Annotated[Any, AfterValidator(_checked_input), WithJsonSchema(_INPUT_SCHEMA)] = None
    messages: Annotated[Any, AfterValidator(_checked_messages), WithJsonSchema(_MESSAGES_SCHEMA)] = None
    add_special_tokens: Flag | None = None
    add_generation_prompt: Flag | None = False
    input_type: str | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> "PromptRequest":
        if (self.input is None) == (self.messages is None):
            message = "exactly one of input and messages must be given"
            raise PydanticCustomError("input", message, {"param": "input"})
        return self


class LateChunking(Wire):
    """Vectors of chunks with the context of the complete text: means over `chunk_size` tokens."""

    chunk_size: Int = Field(ge=1)


class EmbeddingRequest(PromptRequest, Encoded):
    dimensions: Int | None = None
    late_chunking_params: LateChunking | None = None


class PoolingRequest(PromptRequest, Encoded):
    task: str | None = None
    dimensions: Int | None = None


class ClassifyRequest(PromptRequest):
    pass


class EncodeRequest(PoolingFields):
    """Items to embed, as content parts of messages, and the type of the numbers."""

    input: Annotated[list[dict[str, Any]], Field(min_length=1)]
    media_io_kwargs: dict[str, Any] | None = None
    embed_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
