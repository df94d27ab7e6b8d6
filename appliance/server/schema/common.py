"""Fields shared by chat and text completions.

`appliance.server.http.fields` handles fields outside a schema. `appliance.server.chat.sampling` checks ranges that have
their own error message, so that each error names one field.
"""

from typing import Annotated, Any, Literal, Protocol

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from appliance.server.schema.numbers import Flag, Float, Int, Int64, TokenId


class Wire(BaseModel):
    """A body, or a part of one, as the client sent it."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False, protected_namespaces=())


def _json_schema(value: Any) -> Any:
    """Accept empty lists for empty objects, as PHP encodes them."""
    if value == []:
        return {}
    if isinstance(value, dict) and value.get("properties") == []:
        return {**value, "properties": {}}
    return value


JsonSchema = Annotated[dict[str, Any], BeforeValidator(_json_schema)]


class Streamed(Protocol):
    """A body with the fields `stream` and `model`."""

    @property
    def stream(self) -> bool | None: ...
    @property
    def model(self) -> str | None: ...
    def model_dump(self, *, mode: str, exclude: set[str], exclude_unset: bool) -> dict[str, Any]: ...


class StreamOptions(Wire):
    include_usage: Flag | None = None
    continuous_usage_stats: Flag | None = None


class StructuredOutputs(Wire):
    """Constraints on the reply. Exactly one language is allowed.

    `json` is a schema and `structural_tag` a tag, as an object or as text. The other fields restrict how JSON is
    written.
    """

    json_: dict[str, Any] | bool | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: Flag | None = None
    structural_tag: Any = None
    disable_any_whitespace: Flag = False
    disable_additional_properties: Flag = False
    whitespace_pattern: str | None = None
    backend: Any = Field(default=None, alias="_backend")


class JsonSchemaFormat(Wire):
    name: str = ""
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: Flag | None = None


class ResponseFormat(Wire):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    # Fields of a structural tag, in its current and its older form
    format: dict[str, Any] | None = None
    structures: list[Any] | None = None
    triggers: list[Any] | None = None


class SamplingFields(Wire):
    """Options for sampling tokens and for ending the reply."""

    n: Int | None = None
    temperature: Float | None = None
    top_p: Float | None = None
    top_k: Int | None = None
    min_p: Float | None = None
    presence_penalty: Float | None = None
    frequency_penalty: Float | None = None
    repetition_penalty: Float | None = None
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: Flag = False
    ignore_eos: Flag = False
    max_tokens: Int | None = None
    min_tokens: Int = 0
    logit_bias: dict[str, Float] | None = None
    allowed_token_ids: list[TokenId] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: Int | None = None
    skip_special_tokens: Flag = True
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None


class GenerationRequest(SamplingFields):
    """Fields of every route that generates text."""

    model: str | None = None
    stream: Flag | None = False
    stream_options: StreamOptions | None = None
    echo: Flag = False
    truncate_prompt_tokens: Int | None = None
    truncation_side: Literal["left", "right"] | None = None
    return_tokens_as_token_ids: Flag | None = None
    return_token_ids: Flag | None = None
    return_routed_experts: Flag | None = None
    priority: Int64 = 0
    cache_salt: str | None = None
    ttft_deadline_ms: Int | None = None
    deadline_ms: Int | None = None
    user: str | None = None
    # Rejected if they request something, because ignoring them would give a wrong reply.
    use_beam_search: Flag = False
    logprob_token_ids: list[TokenId] | None = None
    thinking_token_budget: Int | None = None
    repetition_detection: dict[str, Any] | None = None
