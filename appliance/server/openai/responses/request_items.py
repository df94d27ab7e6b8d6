"""Conversion of Responses API items to chat messages.

One assistant message holds the reasoning, the text and the calls of one model turn, in that order.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from appliance.media.part import MediaPart
from appliance.output_formats.declaration import Reasoning
from appliance.server.chat.media import media_part
from engine.api.errors import RequestError

Item = dict[str, Any]
Message = dict[str, Any]

_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
IMAGE = "input_image"
_ROLES = ("user", "assistant", "system", "developer")
UNFINISHED = ("in_progress", "incomplete")


def _refused(message: str) -> RequestError:
    return RequestError(message, "input")


def kind_of(item: Item) -> str:
    """Return an item's type. An item with a role and without a type is a message."""
    kind = item.get("type")
    return kind if isinstance(kind, str) else "message" if kind is None and "role" in item else ""


def _content(content: Any, where: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _refused(f"{where} must be a string or a list of parts.")
    parts = [_part(part, f"{where}[{at}]") for at, part in enumerate(content)]
    return str(parts[0]["text"]) if len(parts) == 1 and "text" in parts[0] else parts


def _part(part: Any, where: str) -> dict[str, Any]:
    if isinstance(part, dict) and part.get("type") == IMAGE:
        found = media_part(part, where)
        url = {"url": found.url} if found.url else None
        return {"type": "image_url", "image_url": url, "uuid": found.uuid or None}
    return {"type": "text", "text": _text(part, where)}


def _text(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    known = ", ".join(_TEXT_PARTS)
    if not isinstance(kind, str):
        raise _refused(f"{where} must be an object with a string in 'type'. Allowed: {known}.")
    if kind in (IMAGE, "input_file", "input_audio"):
        raise _refused(
            f"{where}: parts of type {kind!r} are not supported; the model accepts only text. Allowed: {known}."
        )
    if kind not in _TEXT_PARTS:
        raise _refused(f"{where}: unknown content part type {kind[:100]!r}. Allowed: {known}.")
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise _refused(f"{where}: a part of type {kind!r} needs a string in {_TEXT_PARTS[kind]!r}.")
    return text


def _string(item: Item, name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str) or not value:
        raise _refused(f"{where}.{name} must be a non-empty string.")
    return value


def reasoning_text(item: Item, where: str) -> str:
    """Return the text of a reasoning item, or its summary if it has no text."""
    if item.get("encrypted_content") is not None:
        raise _refused(f"{where}.encrypted_content: encrypted reasoning is not supported. Send the item's content.")
    for name in ("content", "summary"):
        parts = item.get(name) or []
        if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
            raise _refused(f"{where}.{name} must be a list of parts.")
        texts = [part.get("text") for part in parts]
        if not all(isinstance(text, str) for text in texts):
            raise _refused(f"{where}.{name}: each part needs a string in 'text'.")
        if texts:
            return "\n".join(map(str, texts))
    return ""


class Turns:
    """Builds chat messages from a sequence of items."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._turn: Message | None = None  # open message of the assistant

    def take(self, item: Any, where: str) -> None:
        """Add an item. Raise RequestError for an invalid item or an unsupported type."""
        kind = kind_of(item) if isinstance(item, dict) else ""
        take = self._kinds().get(kind)
        if take is None:
            known = ", ".join(self._kinds())
            given = item.get("type") if isinstance(item, dict) else item
            raise _refused(f"{where}: items of type {str(given)[:100]!r} are not supported. Allowed: {known}.")
        take(item, where)

    def close(self) -> None:
        if self._turn is not None:
            if "tool_calls" not in self._turn:
                self._turn.setdefault("content", "")
            self.messages.append(self._turn)
            self._turn = None

    def _kinds(self) -> dict[str, Callable[[Item, str], None]]:
        return {
            "message": self._message,
            "reasoning": self._reasoning,
            "function_call": self._function_call,
            "function_call_output": self._output,
            "custom_tool_call": self._custom_call,
            "custom_tool_call_output": self._output,
        }

    def _message(self, item: Item, where: str) -> None:
        role = item.get("role")
        if role not in _ROLES:
            raise _refused(f"{where}.role must be {', '.join(_ROLES[:-1])} or {_ROLES[-1]}, got {str(role)[:100]!r}.")
        content = _content(item.get("content"), f"{where}.content")
        if role != "assistant":
            self.close()
            self.messages.append({"role": role, "content": content})
            return
        if self._turn is not None and self._turn.keys() & {"content", "tool_calls"}:
            self.close()
        self._open()["content"] = content

    def _reasoning(self, item: Item, where: str) -> None:
        text = reasoning_text(item, where)
        if self._turn is not None and self._turn.keys() & {"content", "tool_calls"}:
            self.close()
        if text:
            turn = self._open()
            turn["reasoning"] = f"{turn['reasoning']}\n{text}" if "reasoning" in turn else text

    def _function_call(self, item: Item, where: str) -> None:
        arguments = item.get("arguments")
        if not isinstance(arguments, str):
            raise _refused(f"{where}.arguments must be a string with JSON.")
        self._call(item, where, arguments)

    def _custom_call(self, item: Item, where: str) -> None:
        text = item.get("input")
        if not isinstance(text, str):
            raise _refused(f"{where}.input must be a string.")
        self._call(item, where, json.dumps({"input": text}, ensure_ascii=False))

    def _call(self, item: Item, where: str, arguments: str) -> None:
        name, call_id = _string(item, "name", where), _string(item, "call_id", where)
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._open().setdefault("tool_calls", []).append(call)

    def _output(self, item: Item, where: str) -> None:
        content = _content(item.get("output"), f"{where}.output")
        self.close()
        images = [] if isinstance(content, str) else [part for part in content if part["type"] == "image_url"]
        if not isinstance(content, str):
            content = [part for part in content if part["type"] == "text"]
        self.messages.append({"role": "tool", "tool_call_id": _string(item, "call_id", where), "content": content})
        if images:  # most chat templates accept only text in the role tool
            self.messages.append({"role": "user", "content": images})

    def _open(self) -> Message:
        if self._turn is None:
            self._turn = {"role": "assistant"}
        return self._turn


def item_media(items: Sequence[Any]) -> Iterator[MediaPart]:
    """Yield the images of items. Raise RequestError for an unsupported source."""
    for part, where in _image_parts(items):
        yield media_part(part, where)


def refuse_images(items: Sequence[Any]) -> None:
    """Raise RequestError that names the first image, for a model that accepts only text."""
    for part, where in _image_parts(items):
        _text(part, where)


def _image_parts(items: Sequence[Any]) -> Iterator[tuple[dict[str, Any], str]]:
    for at, item in enumerate(items):
        for name in ("content", "output"):
            content = item.get(name) if isinstance(item, dict) else None
            for index, part in enumerate(content if isinstance(content, list) else ()):
                if isinstance(part, dict) and part.get("type") == IMAGE:
                    yield part, f"input[{at}].{name}[{index}]"


def continues_last_item(items: Sequence[Any]) -> bool:
    """Return if the reply continues the last item: an unfinished message or reasoning item of the assistant."""
    last = items[-1] if items else None
    if not isinstance(last, dict) or last.get("status") not in UNFINISHED:
        return False
    kind = kind_of(last)
    return kind == "reasoning" or (kind == "message" and last.get("role") == "assistant")


def messages_of(items: Sequence[Any], reasoning: Reasoning | None) -> list[Message]:
    """Return the conversation as chat messages. Raise RequestError that names the invalid item.

    `reasoning` is the model's reasoning format. Unfinished reasoning is placed in the text after the start marker, as
    the model itself generated it.
    """
    turns = Turns()
    for at, item in enumerate(items):
        turns.take(item, f"input[{at}]")
    turns.close()
    if continues_last_item(items) and kind_of(items[-1]) == "reasoning":
        if reasoning is None:
            raise _refused("input: the last item is unfinished reasoning, but this model has no reasoning format.")
        if not turns.messages or "reasoning" not in turns.messages[-1]:
            raise _refused("input: the last item is unfinished reasoning but has no text to continue.")
        last = turns.messages[-1]
        last["content"] = f"{reasoning.start}{reasoning.trim[:1]}{last.pop('reasoning')}"
    return turns.messages
