"""Body of POST /v1/chat/completions. Messages stay as the client wrote them, since templates may read any field."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from appliance.server.schema.common import GenerationRequest, JsonSchema, Wire
from appliance.server.schema.numbers import Flag, Int


class FunctionDefinition(Wire):
    model_config = ConfigDict(extra="allow", frozen=True)

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: JsonSchema | None = None
    strict: Flag | None = None


class Tool(Wire):
    model_config = ConfigDict(extra="allow", frozen=True)

    type: Literal["function"]
    function: FunctionDefinition


class CustomDefinition(Wire):
    name: str = Field(min_length=1)
    description: str | None = None
    format: dict[str, Any] | None = None


class CustomTool(Wire):
    """A tool whose calls have one text input instead of arguments."""

    type: Literal["custom"]
    custom: CustomDefinition


class TemplateOptions(Wire):
    """Inputs of the chat template other than the messages."""

    tools: list[Annotated[Tool | CustomTool, Field(discriminator="type")]] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: Flag | None = None
    continue_final_message: Flag = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None


class Conversation(TemplateOptions):
    """Fields that the chat template renders to a prompt."""

    model: str | None = None
    messages: list[dict[str, Any]]
    add_special_tokens: Flag = False


class ChatRequest(Conversation, GenerationRequest):
    max_completion_tokens: Int | None = None
    logprobs: Flag | None = False
    top_logprobs: Int | None = None
    tool_choice: Any = None
    functions: list[FunctionDefinition] | None = None
    """Legacy form of `tools`. Replies to it have `function_call` instead of `tool_calls`."""
    function_call: str | dict[str, Any] | None = None
    """Legacy form of `tool_choice`."""
    parallel_tool_calls: Flag | None = True
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    include_reasoning: Flag = True
