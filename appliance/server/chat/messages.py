"""Conversion of request messages to the form that chat templates expect.

Content becomes plain text, arguments become objects, nulls are removed, and call IDs get the format of the model
family.
"""

import hashlib
import json
import re
import string
from typing import Any

from appliance.output_formats.declaration import Ids
from appliance.server.chat.custom_tools import CUSTOM_INPUT
from appliance.server.chat.media import MediaText, part_modality
from engine.api.errors import RequestError

_MEDIA = frozenset(
    (
        "image_url",
        "input_audio",
        "audio_url",
        "video_url",
        "image_embeds",
        "audio_embeds",
        "video_embeds",
        "prompt_embeds",
        "file",
    )
)
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_REASONING = ("reasoning_content", "reasoning", "thinking")


def part_text(part: Any, where: str, param: str = "messages", reads: str = "only text") -> str:
    """Return the text of a content part. reads: what the model accepts. Raise RequestError for another type of part."""
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise RequestError(f"{where}: a content part must be an object with a string in 'type'.", param)
    if kind in _MEDIA:
        raise RequestError(f"{where}: parts of type {kind!r} are not supported; the model accepts {reads}.", param)
    if kind not in _TEXT_PARTS:
        known = ", ".join(_TEXT_PARTS)
        raise RequestError(f"{where}: unknown content part type {kind[:100]!r}. Allowed: {known}.", param)
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise RequestError(f"{where}: a part of type {kind!r} needs a string in {_TEXT_PARTS[kind]!r}.", param)
    return text


def _content(content: Any, where: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(part_text(part, f"{where}[{at}]") for at, part in enumerate(content))
    raise RequestError(f"{where} must be a string, a list of parts or null.", "messages")


def _content_with_media(content: Any, where: str, media: MediaText) -> str | list[dict[str, str]] | None:
    """Return the content of a message for a model that accepts media, in a form that its template accepts."""
    if isinstance(content, list) and media.takes_parts:
        return [_part(part, f"{where}[{at}]", media) for at, part in enumerate(content)]
    text = _content(content, where)
    return text if media.takes_text or text is None else [{"type": "text", "text": text}]


def _part(part: Any, where: str, media: MediaText) -> dict[str, str]:
    if (kind := media.modality(part)) is not None:
        return {"type": kind}
    return {"type": "text", "text": part_text(part, where, reads=media.reads)}


def spoken_text(message: dict[str, Any]) -> str:
    """Return the text of a message without its media."""
    content = message.get("content")
    if isinstance(content, list):
        content = [part for part in content if part_modality(part) is None]
    return _content(content, "messages[-1].content") or ""


def _arguments(arguments: Any) -> Any:
    """Return arguments as an object, as templates expect them. Text that is not a JSON object stays unchanged."""
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    if isinstance(call, dict) and call.get("type") == "custom":
        call = _custom_call(call, where)
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where} must be an object with function.name.", "messages")
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments", {}))}}


def _custom_call(call: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a custom tool call as a call of the corresponding function."""
    custom = call.get("custom")
    if not isinstance(custom, dict) or not isinstance(custom.get("input"), str):
        raise RequestError(f"{where} must have custom.name and custom.input, both strings.", "messages")
    function = {"name": custom.get("name"), "arguments": {CUSTOM_INPUT: custom["input"]}}
    return {"id": call.get("id"), "type": "function", "function": function}


def _with_tool_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Convert messages in the legacy form (`function_call`, role `function`) to tool calls and tool results."""
    found: list[dict[str, Any]] = []
    last_id = ""
    for at, message in enumerate(messages):
        called = message.get("function_call")
        if called is not None and not message.get("tool_calls"):
            last_id = f"call_{at}"
            call = {"id": last_id, "type": "function", "function": called}
            message = {**message, "function_call": None, "tool_calls": [call]}
        elif message.get("role") == "function":
            message = {**message, "role": "tool", "tool_call_id": last_id or f"call_{at}"}
        found.append(message)
    return found


def template_messages(
    messages: list[dict[str, Any]], template: str, ids: Ids = "", media: MediaText | None = None
) -> list[dict[str, Any]]:
    """Return copies of the messages in the form of Hugging Face templates.

    A developer role becomes system unless `template` mentions it. Call IDs are converted to `ids`, the format of the
    model family. Media become parts of type image, video or audio if the model accepts them. Raise RequestError that
    names an invalid message.
    """
    if not messages:
        raise RequestError("messages must not be empty.", "messages")
    given = _with_tool_messages(messages)
    found = [_message(message, f"messages[{at}]", template, media) for at, message in enumerate(given)]
    return _with_ids(found, ids) if ids else found


_ALPHABET = string.digits + string.ascii_letters
_FORMS = {"short": re.compile(r"[0-9A-Za-z]{9}"), "functions": re.compile(r"functions\.[^\s:]+:[0-9]+")}


def short_id(text: str) -> str:
    """Return nine letters and digits that are a deterministic digest of a text."""
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest())
    return "".join(_ALPHABET[number // len(_ALPHABET) ** place % len(_ALPHABET)] for place in range(9))


def _with_ids(messages: list[dict[str, Any]], ids: Ids) -> list[dict[str, Any]]:
    """Convert the IDs of calls, and of results that refer to them, to the format of the model family."""
    named: dict[Any, str] = {}
    count = 0
    for message in messages:
        for call in message.get("tool_calls", ()):
            given = call.get("id")
            if not (isinstance(given, str) and _FORMS[ids].fullmatch(given)):
                own = f"functions.{call['function']['name']}:{count}"
                call["id"] = own if ids == "functions" else short_id(str(given or own))
                if isinstance(given, str):
                    named[given] = call["id"]
            count += 1
        answered = message.get("tool_call_id")
        if isinstance(answered, str) and answered in named:
            message["tool_call_id"] = named[answered]
    return messages


def _message(message: dict[str, Any], where: str, template: str, media: MediaText | None) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where}: role must be a non-empty string.", "messages")
    result = {key: value for key, value in message.items() if value is not None}
    if role == "developer" and "developer" not in template:
        result["role"] = "system"
    given, place = message.get("content"), f"{where}.content"
    content = _content(given, place) if media is None else _content_with_media(given, place, media)
    if content is not None:
        result["content"] = content
    calls = message.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list):
            raise RequestError(f"{where}.tool_calls must be a list.", "messages")
        result["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{at}]") for at, call in enumerate(calls)]
        if not calls:
            del result["tool_calls"]
    reasoning = next((message[key] for key in _REASONING if message.get(key) is not None), None)
    if reasoning is not None:
        result |= dict.fromkeys(_REASONING, reasoning)
    return result
