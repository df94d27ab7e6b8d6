"""Tools of a chat request as functions: custom tools, and the legacy `functions` and `function_call`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from appliance.server.chat.custom_tools import custom_parameters
from appliance.server.schema.chat import ChatRequest, CustomTool, FunctionDefinition, Tool
from engine.api.errors import RequestError


@dataclass(frozen=True)
class Offered:
    """The tools that a request offers, as tools of type function."""

    tools: tuple[Tool, ...] | None
    choice: Any
    legacy: bool = False
    """The request uses `functions`, so its reply uses `function_call`."""
    custom: frozenset[str] = frozenset()
    """Names of the custom tools."""


def function_tools(tools: Sequence[Tool | CustomTool] | None) -> tuple[Tool, ...] | None:
    """Return the tools, with custom ones as functions of one string.

    Raise RequestError for a format that cannot be enforced.
    """
    if tools is None:
        return None
    return tuple(each if isinstance(each, Tool) else _function(each, f"tools[{at}]") for at, each in enumerate(tools))


def _function(tool: CustomTool, where: str) -> Tool:
    parameters = custom_parameters(tool.custom.format, f"{where}.custom")
    described = {} if tool.custom.description is None else {"description": tool.custom.description}
    function = FunctionDefinition(name=tool.custom.name, parameters=parameters, strict=True, **described)
    return Tool(type="function", function=function)


def offered(body: ChatRequest) -> Offered:
    """Return the tools that a request offers. Raise RequestError for both forms at once and for invalid tools."""
    if body.functions is not None or body.function_call is not None:
        return _legacy(body)
    custom = frozenset(tool.custom.name for tool in body.tools or () if isinstance(tool, CustomTool))
    return Offered(function_tools(body.tools), body.tool_choice, custom=custom)


def _legacy(body: ChatRequest) -> Offered:
    for old, new in (("functions", "tools"), ("function_call", "tool_choice")):
        if getattr(body, new) is not None:
            raise RequestError(f"{new} cannot be combined with functions and function_call. Use only {new}.", old)
    if not body.functions:
        if body.function_call in (None, "none", "auto") and body.functions is None:
            return Offered(None, None)
        raise RequestError("functions must be a non-empty list.", "functions")
    tools = tuple(Tool(type="function", function=function) for function in body.functions)
    choice = body.function_call
    if isinstance(choice, dict):
        name = choice.get("name")
        if name not in [tool.function.name for tool in tools]:
            raise RequestError("The function in function_call is not one of functions.", "function_call")
        return Offered(tools, {"type": "function", "function": {"name": name}}, legacy=True)
    if choice not in (None, "none", "auto"):
        raise RequestError('function_call must be none, auto or {"name": …}.', "function_call")
    return Offered(tools, choice, legacy=True)
