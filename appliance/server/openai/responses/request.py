"""Conversion of a Responses API request to a chat request.

Items become messages, tools become functions, and the text format becomes a response format. Errors from the chat route
are reported with the field names of this API.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from appliance.server.chat.chat_prompt import plan_chat
from appliance.server.chat.custom_tools import custom_parameters
from appliance.server.chat.parsed import ChatPlan, Served
from appliance.server.openai.responses.request_items import (
    Message,
    continues_last_item,
    messages_of,
    refuse_images,
)
from appliance.server.schema.chat import ChatRequest
from appliance.server.schema.responses import INCLUDABLE, LOGPROBS, PromptRequest, ResponsesRequest
from engine.api.errors import RequestError

_SAME = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed"),
    *("stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens", "logit_bias"),
    *("allowed_token_ids", "bad_words", "skip_special_tokens", "structured_outputs", "thinking_token_budget"),
    *("priority", "cache_salt", "ttft_deadline_ms", "deadline_ms", "user", "include_reasoning", "parallel_tool_calls"),
    "chat_template",
)
_WORDS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "tool_choice.function.name": "tool_choice.name",
    "tool_choice.function": "tool_choice",
}
_WORD = re.compile("|".join(rf"\b{re.escape(word)}\b" for word in sorted(_WORDS, key=len, reverse=True)))
_REFUSED = {
    "conversation": "conversations are not stored. Use previous_response_id, or send the items in input.",
    "prompt": "prompt templates are not stored. Send instructions and input.",
    "context_management": "the context is not compacted. Use truncation.",
    "moderation": "this server does not moderate content.",
    "previous_input_messages": "send earlier messages as items in input.",
}


def _check(body: PromptRequest) -> None:
    for name, why in _REFUSED.items():
        if getattr(body, name):
            raise RequestError(f"{name} is not supported by this server: {why}", name)
    if not isinstance(body, ResponsesRequest):
        return
    for name in body.include or ():
        if name not in INCLUDABLE:
            raise RequestError(f"include: {name[:100]!r} is unknown. Allowed: {', '.join(INCLUDABLE)}.", "include")
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options can only be set when stream is true.", "stream_options")


# Tools


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    kind, name = tool.get("type"), tool.get("name")
    if kind not in ("function", "custom"):
        raise RequestError(
            f"{where}: tools of type {str(kind)[:100]!r} are not supported, because this server does not run tools. "
            "Allowed: function and custom.",
            "tools",
        )
    if not isinstance(name, str) or not name:
        raise RequestError(f"{where}.name must be a non-empty string.", "tools")
    parameters: Any = tool.get("parameters")
    strict: Any = tool.get("strict")
    if kind == "custom":
        parameters, strict = custom_parameters(tool.get("format"), where), True
    elif parameters is not None and not (isinstance(parameters, dict) or parameters == []):
        raise RequestError(f"{where}.parameters must be a JSON schema, or null.", "tools")
    function = {"name": name, "description": tool.get("description"), "parameters": parameters, "strict": strict}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def custom_tools(tools: Sequence[Mapping[str, Any]] | None) -> frozenset[str]:
    """Return the names of custom tools, whose calls have a text input instead of arguments."""
    return frozenset(str(tool.get("name")) for tool in tools or () if tool.get("type") == "custom")


def _tool_choice(choice: Any, tools: Sequence[Mapping[str, Any]]) -> Any:
    if choice in (None, "none", "auto") or (isinstance(choice, str) and choice != "required"):
        return choice if tools or choice != "auto" else None
    if not tools:
        raise RequestError("When using tool_choice, tools must be set.", "tool_choice")
    if choice == "required":
        return choice
    kind = choice.get("type")
    if kind in ("function", "custom"):
        return {"type": "function", "function": {"name": _known(choice, tools)}}
    if kind != "allowed_tools":
        raise RequestError(
            f"tool_choice of type {str(kind)[:100]!r} is not supported. Allowed: none, auto, required, and objects "
            "of type function, custom and allowed_tools.",
            "tool_choice",
        )
    allowed = choice.get("tools")
    if not isinstance(allowed, list) or not all(isinstance(each, dict) for each in allowed):
        raise RequestError("tool_choice.tools must be a list of tools.", "tool_choice")
    names = [{"type": "function", "function": {"name": _known(each, tools)}} for each in allowed]
    return {"type": kind, "allowed_tools": {"mode": choice.get("mode", "auto"), "tools": names}}


def _known(choice: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> str:
    name = choice.get("name")
    if not isinstance(name, str) or not name:
        raise RequestError("tool_choice: each tool must have a name, a non-empty string.", "tool_choice")
    if not any(tool.get("name") == name and tool.get("type") == choice.get("type") for tool in tools):
        raise RequestError(
            "The tool specified in tool_choice does not match any of the specified tools.", "tool_choice"
        )
    return name


# The request


def _text_fields(body: PromptRequest) -> dict[str, Any]:
    form = body.text.format if body.text else None
    if form is None or form.type == "text":
        return {}
    if body.structured_outputs is not None:
        raise RequestError(
            "You can only use one kind of structured output: text.format or structured_outputs.", "structured_outputs"
        )
    if form.type == "json_object":
        return {"response_format": {"type": "json_object"}}
    if form.schema_ is None:
        raise RequestError("text.format of type json_schema needs a schema.", "text.format.schema")
    schema = {"name": form.name, "schema": form.schema_, "strict": form.strict}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def chat_request(body: PromptRequest, items: Sequence[Any], served: Served) -> ChatRequest:
    """Return a chat request with all `items` as its conversation, after the instructions. Raise RequestError."""
    _check(body)
    if served.text.media is None:
        refuse_images(items)
    messages = messages_of(items, served.text.output_format.reasoning)
    if body.instructions is not None:
        messages = [{"role": "system", "content": body.instructions}, *messages]
    fields: dict[str, Any] = {name: getattr(body, name) for name in _SAME if name in body.model_fields_set}
    tools = [_tool(tool, f"tools[{at}]") for at, tool in enumerate(body.tools or ())]
    fields |= {"messages": messages, "tools": tools or None, **_text_fields(body)}
    fields["tool_choice"] = _tool_choice(body.tool_choice, body.tools or ())
    fields["continue_final_message"] = continues_last_item(items)
    variables = dict(body.chat_template_kwargs or {})
    if body.text is not None and body.text.verbosity is not None:
        variables.setdefault("verbosity", body.text.verbosity)
    fields["chat_template_kwargs"] = variables or None
    fields["reasoning_effort"] = body.reasoning.effort if body.reasoning else None
    if isinstance(body, ResponsesRequest):
        fields["max_completion_tokens"] = body.max_output_tokens
        if LOGPROBS in (body.include or ()):
            fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    if fields.get("parallel_tool_calls", True) is None:
        del fields["parallel_tool_calls"]
    if fields.get("structured_outputs") is not None:
        fields["structured_outputs"] = fields["structured_outputs"].model_dump(by_alias=True, exclude_unset=True)
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise RequestError(f"{where}: {first['msg']}", where.partition(".")[0]) from None


def plan_response(body: PromptRequest, items: Sequence[Any], served: Served) -> ChatPlan:
    """Return the parsed request.

    With `truncation: auto`, drop messages that do not fit the context window. Raise RequestError for a request that
    cannot be served.
    """
    try:
        request = chat_request(body, items, served)
        plan = _fitting(request, served) if body.truncation == "auto" else plan_chat(request, served)
    except RequestError as error:
        raise _in_own_words(error) from error
    return replace(plan, bound_by=_WORDS.get(plan.bound_by, plan.bound_by))


def _fitting(request: ChatRequest, served: Served) -> ChatPlan:
    """Return the parsed request with as many of the latest messages as leave room for the reply.

    The room is the reply's maximum length, or an eighth of the context window if the request does not set one. System
    messages and the last message are always kept. Call results are dropped together with their calls.
    """
    window = served.config.max_context
    room = request.max_completion_tokens or window // 8

    def plan(left_out: int) -> ChatPlan | RequestError:
        kept = _without(request.messages, left_out)
        try:
            return plan_chat(request.model_copy(update={"messages": kept}), served)
        except RequestError as error:
            if error.param not in ("input_tokens", "input_text"):
                raise
            return error

    whole = plan(0)
    if isinstance(whole, ChatPlan):
        return whole
    most = sum(message["role"] not in ("system", "developer") for message in request.messages) - 1

    def fits(found: ChatPlan | RequestError) -> bool:
        return isinstance(found, ChatPlan) and len(found.prompts[0].ids) + room <= window

    found = _first_that(fits, plan, 1, most) if most > 0 else whole
    if isinstance(found, RequestError):
        raise found
    return found


def _first_that(
    holds: Callable[[ChatPlan | RequestError], bool],
    plan: Callable[[int], ChatPlan | RequestError],
    low: int,
    high: int,
) -> ChatPlan | RequestError:
    """Return the first fitting plan by binary search: dropping more messages never needs more room."""
    found = plan(high)
    while low < high:
        middle = (low + high) // 2
        tried = plan(middle)
        if holds(tried):
            found, high = tried, middle
        else:
            low = middle + 1
    return found


def _without(messages: list[Message], left_out: int) -> list[Message]:
    kept, known = [], set()
    for message in messages:
        system = message["role"] in ("system", "developer")
        if not system and left_out > 0:
            left_out -= 1
            continue
        if message["role"] == "tool" and message["tool_call_id"] not in known and message is not messages[-1]:
            continue
        known |= {call["id"] for call in message.get("tool_calls", ())}
        kept.append(message)
    return kept


def _in_own_words(error: RequestError) -> RequestError:
    text = _WORD.sub(lambda found: _WORDS[found[0]], str(error))
    return RequestError(text, _WORDS.get(error.param or "", error.param))
