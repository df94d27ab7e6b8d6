"""tools and tool_choice of a request: the available functions and the calls that the reply must make (docs/http.md)."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from appliance.output_formats.constraint import Constraint, Language
from appliance.output_formats.declaration import Calls, Function
from appliance.output_formats.events import CallStart
from appliance.output_formats.formats import CALLS, HERMES, named_call
from appliance.server.chat.functions import Offered, offered
from appliance.server.chat.language import schema_language
from appliance.server.chat.messages import short_id
from appliance.server.schema.chat import ChatRequest, Tool
from engine.api.errors import RequestError
from engine.api.messages import Grammar

Mode = Literal["none", "auto", "required", "named"]


@dataclass(frozen=True)
class ToolUse:
    """Tool calls that a reply may make."""

    mode: Mode
    functions: tuple[Function, ...] = ()
    calls: Calls | None = None  # call format, or None if calls are not parsed
    one_call: bool = False
    bound: bool = False  # the prompt shows further functions, which must not be called
    before: int = 0  # number of calls in earlier messages
    legacy: bool = False
    """The reply has `function_call` instead of `tool_calls`."""
    custom: frozenset[str] = frozenset()
    """Functions that are custom tools, whose calls are returned with their text."""
    avoided: Calls | None = None
    """Format of calls that the reply must not contain, with `tool_choice: none`."""

    def call_id(self, call: CallStart, salt: str) -> str:
        """Return the ID of a call, in the format that the model's template expects. `salt` identifies the reply."""
        ids = self.calls.ids if self.calls is not None else ""
        if ids and call.id:
            return call.id
        if ids == "functions":
            return f"functions.{call.name}:{self.before + call.index}"
        whole = f"{salt}/{call.index}"
        if ids == "short":
            return short_id(whole)
        return f"chatcmpl-tool-{hashlib.blake2b(whole.encode(), digest_size=16).hexdigest()}"


def _functions(tools: Sequence[Tool]) -> tuple[Function, ...]:
    return tuple(
        Function(tool.function.name, tool.function.parameters or {}, bool(tool.function.strict)) for tool in tools
    )


def _named(choice: Mapping[str, Any], functions: tuple[Function, ...]) -> Function:
    kind = choice.get("type", "function")
    function = choice.get(kind) if kind in ("function", "custom") else None
    if not isinstance(function, dict):
        raise RequestError('tool_choice must be {"type": "function", "function": {"name": …}}.', "tool_choice.function")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise RequestError("tool_choice.function.name must be a non-empty string.", "tool_choice.function.name")
    for known in functions:
        if known.name == name:
            return known
    raise RequestError("The tool specified in tool_choice does not match any of the specified tools.", "tool_choice")


def _allowed(choice: Mapping[str, Any], functions: tuple[Function, ...]) -> tuple[str, tuple[Function, ...]]:
    """Return the mode of an allowed_tools choice, and its functions in their original order."""
    asked = choice.get("allowed_tools")
    tools = asked.get("tools") if isinstance(asked, dict) else None
    if not isinstance(asked, dict) or asked.get("mode") not in ("auto", "required"):
        raise RequestError("tool_choice: the mode of allowed_tools must be auto or required.", "tool_choice")
    if not isinstance(tools, list) or not tools or not all(isinstance(tool, dict) for tool in tools):
        raise RequestError("tool_choice: allowed_tools requires a non-empty list of tools.", "tool_choice")
    names = {_named(tool, functions).name for tool in tools}
    return asked["mode"], tuple(each for each in functions if each.name in names)


def tool_use(body: ChatRequest, native: Calls | None) -> ToolUse:
    """Return the request's tool use. `native` is the model's own call format, or None if its template has none."""
    given = offered(body)
    if given.tools is not None and not given.tools:
        raise RequestError("tools must not be empty. Leave the field out instead.", "tools")
    use = _tool_use(given, native)
    before = sum(len(calls) for message in body.messages if isinstance(calls := message.get("tool_calls"), list))
    one_call = use.one_call or given.legacy or (use.mode != "none" and body.parallel_tool_calls is False)
    return replace(use, one_call=one_call, before=before, legacy=given.legacy, custom=given.custom)


def _tool_use(given: Offered, native: Calls | None) -> ToolUse:
    functions, choice = _functions(given.tools or ()), given.choice
    if choice is None:
        choice = "auto" if functions else "none"
    bound = isinstance(choice, dict) and choice.get("type") == "allowed_tools" and bool(functions)
    if bound:
        choice, functions = _allowed(choice, functions)
    named = isinstance(choice, dict)
    if not named and choice not in ("none", "auto", "required"):
        raise RequestError(f"tool_choice must be none, auto, required or a function, got {choice!r}.", "tool_choice")
    if not functions and (named or choice == "required"):
        raise RequestError("When using tool_choice, tools must be set.", "tools")
    if named:
        function = _named(choice, functions)
        # Use the model's own call format if it has one, because it was not trained to write bare arguments.
        return ToolUse("named", (function,), native or named_call(function.name), one_call=True)
    if choice == "none" or not functions:
        return ToolUse("none", functions, avoided=native if functions else None)
    if choice == "required":
        return ToolUse("required", functions, native or HERMES, bound=bound)
    if native is None:
        known = ", ".join(calls.name for calls in CALLS)
        raise RequestError(
            '"auto" tool choice needs a model whose chat template shows how it calls tools, and this one does not '
            f'(known: {known}). Use tool_choice "required" or a function, or none; or set model.format or '
            "model.chat_template.",
            "tool_choice",
        )
    return ToolUse("auto", functions, native, bound=bound)


def _bound(function: Function) -> Function:
    """Return a function with its parameters reduced to keywords that masks can enforce.

    Strict functions keep all keywords.
    """
    if not function.parameters:
        return function
    language = schema_language(function.parameters, strict=function.strict, param="tools")
    return Function(function.name, language.source, function.strict)


def tool_grammar(use: ToolUse, language: Language | None, constraint: Constraint) -> Grammar | None:
    """Return the grammar of the reply: the required calls, the language, or both as alternatives.

    A required call takes precedence over a response format.
    """
    if use.calls is None:
        if language is None and use.avoided is not None:
            return constraint.text_without_calls(use.avoided)
        return None if language is None else constraint.reply(language)
    if use.mode in ("required", "named"):
        if language is not None and language.param != "response_format":
            message = (
                f"tool_choice {use.mode} and {language.param} cannot be combined, because the reply has only tool "
                "calls."
            )
            raise RequestError(message, language.param)
        return constraint.calls(use.calls, tuple(map(_bound, use.functions)), one_call=use.one_call)
    loose = tuple(_bound(each) if each.strict else Function(each.name, {"type": "object"}) for each in use.functions)
    if language is not None:
        return constraint.calls(use.calls, loose, one_call=use.one_call, otherwise=language)
    if use.bound or any(function.strict for function in use.functions):
        return constraint.text_with_calls(use.calls, loose, one_call=use.one_call)
    return None
