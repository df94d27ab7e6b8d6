"""Conversion of a Messages request to a chat request. Errors use the field names of the Messages API."""

import re
from collections.abc import Sequence
from typing import Any, Final

from appliance.server.anthropic.client_tools import client_tool
from appliance.server.anthropic.content import chat_messages
from appliance.server.schema.chat import ChatRequest, Conversation, FunctionDefinition, Tool
from appliance.server.schema.common import JsonSchemaFormat, ResponseFormat
from appliance.server.schema.messages import (
    ChoiceAny,
    ChoiceAuto,
    ChoiceNone,
    ChoiceTool,
    CountRequest,
    MessagesRequest,
    MessageTool,
    ThinkingAdaptive,
    ThinkingEnabled,
)
from engine.api.errors import RequestError

LEAST_BUDGET: Final = 1024

_NAMES: Final = {
    "response_format": "output_config.format",
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking.budget_tokens",
}
_WORD = re.compile(rf"(?<![\w.])({'|'.join(_NAMES)})(?!\w|\.\w)")


def own_name(param: str) -> str:
    """Return the Messages API's name of a chat field."""
    return _NAMES.get(param, param)


def renamed(error: RequestError) -> RequestError:
    """Return an error of the chat planner with the field names of the Messages API."""
    message = str(error)
    if error.param in ("input_tokens", "input_text"):
        # agents shorten a conversation when they read this phrase
        return RequestError(f"prompt is too long: {message}", "prompt")
    if error.param in _NAMES:
        message = _WORD.sub(lambda match: _NAMES[match[1]], message)
    elif error.param == "tool_choice":
        message = message.replace('"required" or a function', '"any" or "tool"')
    return RequestError(message, own_name(error.param) if error.param else error.param)


def _tools(tools: Sequence[MessageTool] | None) -> list[Tool] | None:
    found: dict[str, Tool] = {}
    for at, tool in enumerate(tools or ()):
        where = f"tools.{at}"
        if tool.name in found:
            raise RequestError(f"{where}: tool names must be unique, and {tool.name!r} occurs twice.", where)
        found[tool.name] = Tool(type="function", function=_function(tool, where))
    return list(found.values()) or None


def _function(tool: MessageTool, where: str) -> FunctionDefinition:
    description, parameters = tool.description, tool.input_schema
    if tool.type not in (None, "custom"):
        known = client_tool(tool.type)
        if known is None:
            message = (
                f"{where}: this server does not run tools of type {tool.type!r}; use a custom tool with input_schema."
            )
            raise RequestError(message, f"{where}.type")
        description, parameters = known.description, known.parameters
    if parameters is None:
        raise RequestError(f"{where}: input_schema is missing; it is the JSON schema of the input.", where)
    given = {"description": description, "strict": tool.strict}
    return FunctionDefinition(
        name=tool.name, parameters=parameters, **{key: value for key, value in given.items() if value}
    )


def _tool_choice(body: CountRequest) -> tuple[Any, bool]:
    """Return tool_choice of a chat request, and True if the reply may have several calls."""
    match body.tool_choice:
        case None:
            return None, True
        case ChoiceAuto() as choice:
            return "auto", not choice.disable_parallel_tool_use
        case ChoiceAny() as choice:
            return "required", not choice.disable_parallel_tool_use
        case ChoiceTool(name=name):
            return {"type": "function", "function": {"name": name}}, False
        case ChoiceNone():
            return "none", True


def _variables(body: CountRequest) -> dict[str, Any]:
    """Return the chat template variables for thinking and for effort."""
    variables: dict[str, Any] = {}
    if body.output_config is not None and body.output_config.effort is not None:
        variables["reasoning_effort"] = body.output_config.effort
    match body.thinking:
        case ThinkingEnabled() | ThinkingAdaptive():
            variables["enable_thinking"] = True
        case None:
            pass
        case other if other.type == "disabled":
            variables |= {"enable_thinking": False, "reasoning_effort": "none"}
    return variables | (body.chat_template_kwargs or {})


def _conversation(body: CountRequest) -> dict[str, Any]:
    """Return the fields of a Conversation. A last message of the assistant is the beginning of the reply."""
    if body.mcp_servers:
        message = (
            "mcp_servers is not supported because this server does not run tools. List the tools in the client and "
            "send them in tools."
        )
        raise RequestError(message, "mcp_servers")
    messages = chat_messages(body.system or (), body.messages)
    if not messages:
        raise RequestError("messages must contain text.", "messages")
    continues = messages[-1]["role"] == "assistant"
    if continues and "tool_calls" in messages[-1]:
        at = f"messages.{len(body.messages) - 1}"
        message = f"{at}: a reply cannot continue after tool_use. Send its tool_result in a user message."
        raise RequestError(message, at)
    return {
        "model": body.model,
        "messages": messages,
        "tools": _tools(body.tools),
        "continue_final_message": continues,
        "add_generation_prompt": not continues,
        "chat_template_kwargs": _variables(body) or None,
    }


def conversation(body: CountRequest) -> Conversation:
    """Return the part of the request that becomes the prompt. Raise RequestError if it is not possible."""
    fields = _conversation(body)
    if isinstance(body.tool_choice, ChoiceNone):
        fields["tools"] = None  # the prompt does not show them
    return Conversation(**fields)


def _response_format(body: CountRequest) -> ResponseFormat | None:
    given = body.output_config.format if body.output_config is not None else None
    if given is not None and body.output_format is not None:
        message = "output_config.format and output_format are the same field. Leave output_format out."
        raise RequestError(message, "output_format")
    given = given or body.output_format
    if given is None:
        return None
    return ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(schema=given.schema_))


def _budget(body: MessagesRequest) -> int | None:
    if not isinstance(body.thinking, ThinkingEnabled):
        return None
    budget, name = body.thinking.budget_tokens, "thinking.budget_tokens"
    if budget < LEAST_BUDGET:
        raise RequestError(f"{name} must be at least {LEAST_BUDGET}, got {budget}.", name)
    if budget >= body.max_tokens:
        raise RequestError(f"{name} must be less than max_tokens={body.max_tokens}, got {budget}.", name)
    return budget


def chat_request(body: MessagesRequest) -> ChatRequest:
    """Return the chat request. Sampling and lengths are checked later, when the chat is planned.

    Raise RequestError for a request without an equivalent chat request.
    """
    choice, several = _tool_choice(body)
    fields = _conversation(body)
    if choice is not None and fields["tools"] is None and choice not in ("auto", "none"):
        raise RequestError("tool_choice requires tools.", "tool_choice")
    return ChatRequest(
        **fields,
        max_tokens=body.max_tokens,
        stream=body.stream,
        stop=body.stop_sequences or None,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        seed=body.seed,
        tool_choice=choice if fields["tools"] else None,
        parallel_tool_calls=several,
        response_format=_response_format(body),
        include_reasoning=body.thinking is None or body.thinking.type != "disabled",
        thinking_token_budget=_budget(body),
        user=body.metadata.user_id if body.metadata is not None else None,
        priority=body.priority,
        cache_salt=body.cache_salt,
        ttft_deadline_ms=body.ttft_deadline_ms,
        deadline_ms=body.deadline_ms,
    )
