"""What chat and text completions have in common on the wire. Unknown fields are ignored; ranges with a message of their
own are checked by `appliance.chat.sampling`, so that one error names one field."""

from typing import Annotated, Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field

Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, Field(le=2**63 - 1)]


class Wire(BaseModel):
    """A body, or a part of one, as the client sent it."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False, protected_namespaces=())


class Streamed(Protocol):
    """Any body that says whether its reply is a stream."""

    @property
    def stream(self) -> bool | None: ...
    def model_dump(self, *, mode: str, exclude: set[str], exclude_unset: bool) -> dict[str, Any]: ...


class StreamOptions(Wire):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class StructuredOutputs(Wire):
    """Exactly one language; `json` is a schema or its text, `structural_tag` a tag or its text. The others say how JSON
    may be written."""

    json_: dict[str, Any] | bool | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    backend: Any = Field(default=None, alias="_backend")


class JsonSchemaFormat(Wire):
    name: str = ""
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Wire):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    # Of a structural tag, in its present and its older form
    format: dict[str, Any] | None = None
    structures: list[Any] | None = None
    triggers: list[Any] | None = None


class SamplingFields(Wire):
    """How tokens are chosen and where the reply ends."""

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = None
    min_tokens: int = 0
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[TokenId] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    # Removed from the protocol in favour of structured_outputs; a warning in the log says that they are ignored
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_json_object: Any = None


class GenerationRequest(SamplingFields):
    """Fields of every route that generates."""

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    echo: bool = False
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    priority: Int64 = 0
    cache_salt: str | None = None
    ttft_deadline_ms: int | None = None
    deadline_ms: int | None = None
    user: str | None = None
    # Known, and refused where they ask for something: saying nothing would be a wrong answer.
    use_beam_search: bool = False
    logprob_token_ids: list[TokenId] | None = None
    thinking_token_budget: int | None = None
    repetition_detection: dict[str, Any] | None = None
