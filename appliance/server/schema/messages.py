"""Bodies of POST /v1/messages and POST /v1/messages/count_tokens, in Anthropic's format.

Fields without an effect here (cache_control, service_tier, container, citations, …) count as unknown and are ignored.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from appliance.server.schema.common import JsonSchema, Wire
from appliance.server.schema.numbers import Flag, Float, Int, Int64


class TextBlock(Wire):
    type: Literal["text"] = "text"
    text: str


class ThinkingBlock(Wire):
    """A thinking block. If `thinking` is empty, `signature` contains it, as in a reply with omitted thinking."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(Wire):
    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(Wire):
    type: Literal["tool_use"]
    id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    input: dict[str, Any]


class Base64Source(Wire):
    type: Literal["base64"]
    media_type: str = ""
    data: str


class UrlSource(Wire):
    type: Literal["url"]
    url: str


class FileSource(Wire):
    """A file of Anthropic's Files API, which this server does not have."""

    type: Literal["file"]


class ImageBlock(Wire):
    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource | FileSource, Field(discriminator="type")] | None = None


class OtherBlock(Wire):
    """A known but unsupported block: the model accepts no documents, and the server does not run tools."""

    type: Literal[
        "document",
        "search_result",
        "server_tool_use",
        "web_search_tool_result",
        "web_fetch_tool_result",
        "code_execution_tool_result",
        "container_upload",
        "tool_reference",
    ]


def _as_blocks(value: Any) -> Any:
    """Convert text to a list with one text block."""
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


Texts = Annotated[list[TextBlock], BeforeValidator(_as_blocks, json_schema_input_type=str | list[TextBlock])]

_ResultBlock = Annotated[TextBlock | ImageBlock | OtherBlock, Field(discriminator="type")]
_Result = Annotated[list[_ResultBlock], BeforeValidator(_as_blocks, json_schema_input_type=str | list[_ResultBlock])]


class ToolResultBlock(Wire):
    type: Literal["tool_result"]
    tool_use_id: str
    content: _Result = []
    is_error: Flag | None = None


Block = Annotated[
    TextBlock | ImageBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock | OtherBlock,
    Field(discriminator="type"),
]
_Content = Annotated[list[Block], BeforeValidator(_as_blocks, json_schema_input_type=str | list[Block])]


class Message(Wire):
    role: Literal["user", "assistant", "system"]
    content: _Content


class MessageTool(Wire):
    """A function of the client. The `type` of a predefined tool of Anthropic's API contains a date."""

    type: str | None = None
    name: str = Field(min_length=1)
    description: str | None = None
    input_schema: JsonSchema | None = None
    strict: Flag | None = None


class ChoiceAuto(Wire):
    type: Literal["auto"]
    disable_parallel_tool_use: Flag = False


class ChoiceAny(Wire):
    type: Literal["any"]
    disable_parallel_tool_use: Flag = False


class ChoiceTool(Wire):
    type: Literal["tool"]
    name: str


class ChoiceNone(Wire):
    type: Literal["none"]


ToolChoice = Annotated[ChoiceAuto | ChoiceAny | ChoiceTool | ChoiceNone, Field(discriminator="type")]

Display = Literal["summarized", "omitted"]


class ThinkingEnabled(Wire):
    type: Literal["enabled"]
    budget_tokens: Int64
    display: Display | None = None


class ThinkingAdaptive(Wire):
    type: Literal["adaptive"]
    display: Display | None = None


class ThinkingOther(Wire):
    """`between_tools` leaves the decision to the chat template."""

    type: Literal["disabled", "between_tools"]


Thinking = Annotated[ThinkingEnabled | ThinkingAdaptive | ThinkingOther, Field(discriminator="type")]


class JsonFormat(Wire):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Wire):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class Metadata(Wire):
    user_id: str | None = None


class CountRequest(Wire):
    """Fields that determine the prompt. `output_format` is the older name of output_config.format."""

    model: str = Field(min_length=1)
    messages: list[Message] = Field(min_length=1)
    system: Texts | None = None
    tools: list[MessageTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None
    mcp_servers: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountRequest):
    max_tokens: Int64 = Field(gt=0)
    stream: Flag | None = False
    stop_sequences: list[str] | None = None
    temperature: Float | None = None
    top_p: Float | None = None
    top_k: Int64 | None = None
    metadata: Metadata | None = None
    # Extensions of this server, as on the chat route.
    seed: Int64 | None = None
    priority: Int64 = 0
    cache_salt: str | None = None
    ttft_deadline_ms: Int | None = None
    deadline_ms: Int | None = None
