"""Body of POST /v1/completions."""

from typing import Annotated, Any

from pydantic import AfterValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from appliance.server.schema.common import GenerationRequest
from appliance.server.schema.numbers import Flag, Int

_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        _TOKENS,
        {"type": "array", "items": _TOKENS},
    ]
}


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _checked_prompt(value: Any) -> Any:
    """Validate each element once. A union of lists would try every type on a prompt of 100,000 token IDs."""
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value:
        if _is_ids(value) or all(isinstance(item, str) for item in value) or all(_is_ids(item) for item in value):
            return value
        raise PydanticCustomError(
            "prompt",
            "prompt must be a string, a list of strings, of token ids, or of lists of token ids",
            {"param": "prompt"},
        )
    raise PydanticCustomError("prompt", "prompt must not be empty", {"param": "prompt"})


def _checked_beginning(value: Any) -> Any:
    if value is None or isinstance(value, str) or _is_ids(value):
        return value
    message = "decoder_prompt must be a string or a non-empty list of token ids"
    raise PydanticCustomError("decoder_prompt", message, {"param": "decoder_prompt"})


Prompt = Annotated[Any, AfterValidator(_checked_prompt), WithJsonSchema(_PROMPT_SCHEMA)]

DecoderPrompt = Annotated[
    Any, AfterValidator(_checked_beginning), WithJsonSchema({"anyOf": [{"type": "string"}, _TOKENS, {"type": "null"}]})
]


class CompletionRequest(GenerationRequest):
    prompt: Prompt = Field(default=None, validate_default=True)
    prompt_embeds: Any = None
    suffix: str | None = None
    decoder_prompt: DecoderPrompt = None
    logprobs: Int | None = None
    add_special_tokens: Flag = True
