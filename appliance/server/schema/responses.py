"""Bodies of POST /v1/responses and POST /v1/responses/input_tokens.

Items stay as the client wrote them. `appliance.server.openai.responses.request_items` interprets them.
"""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from appliance.server.schema.common import StructuredOutputs, Wire
from appliance.server.schema.numbers import Flag, Float, Int, Int64, TokenId

INCLUDABLE = (
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
)
LOGPROBS = "message.output_text.logprobs"

Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]


class ReasoningOptions(Wire):
    """Amount of reasoning. Summaries are not generated: the reasoning item contains the reasoning itself."""

    model_config = ConfigDict(extra="allow", frozen=True)

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class TextFormat(Wire):
    type: Literal["text", "json_object", "json_schema"]
    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: Flag | None = None


class TextOptions(Wire):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesStreamOptions(Wire):
    """`include_obfuscation` requests padding against observers of message lengths; none is added."""

    include_obfuscation: Flag | None = None


class PromptRequest(Wire):
    """Fields that determine the prompt of a response and the constraints on its reply."""

    model: str | None = None
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: Flag | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    # Extensions of vLLM
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None
    # Rejected if they request something, because ignoring them would give a wrong reply.
    conversation: Any = None
    prompt: Any = None
    context_management: Any = None
    moderation: Any = None
    previous_input_messages: Any = None


class InputTokensRequest(PromptRequest):
    pass


class ResponsesRequest(PromptRequest):
    input: str | list[dict[str, Any]]
    stream: Flag | None = False
    stream_options: ResponsesStreamOptions | None = None
    store: Flag | None = None
    background: Flag | None = None
    include: list[str] | None = None
    include_reasoning: Flag = True
    max_output_tokens: Int | None = None
    max_tool_calls: Annotated[Int, Field(ge=1)] | None = None
    top_logprobs: Int | None = None
    metadata: Metadata | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    temperature: Float | None = None
    top_p: Float | None = None
    # Extensions of vLLM
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
    min_tokens: Int = 0
    logit_bias: dict[str, Float] | None = None
    allowed_token_ids: list[TokenId] | None = None
    bad_words: list[str] | None = None
    skip_special_tokens: Flag = True
    thinking_token_budget: Int | None = None
    priority: Int64 = 0
    cache_salt: str | None = None
    ttft_deadline_ms: Int | None = None
    deadline_ms: Int | None = None
    request_id: str | None = None
    session_id: str | None = None
