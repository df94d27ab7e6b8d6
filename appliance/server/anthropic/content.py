"""Conversion of Anthropic's content blocks to chat messages for the chat template.

Consecutive messages of one role form one turn. In a user turn, each run of tool results becomes messages of the role
tool, in their order relative to the text.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from appliance.media.part import MediaPart
from appliance.server.anthropic.signature import thinking_of
from appliance.server.schema.messages import (
    Base64Source,
    Block,
    ImageBlock,
    Message,
    OtherBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    UrlSource,
)
from engine.api.errors import RequestError

# Clients put a hash of each request in this block, which would prevent every prefix cache hit.
BILLING = "x-anthropic-billing-header"

_ALLOWED = {
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}


@dataclass
class _Turn:
    """Consecutive blocks of one role, each with its path in the request."""

    role: str
    blocks: list[tuple[str, Block]] = field(default_factory=list)


def _turns(messages: Sequence[Message]) -> Iterator[_Turn]:
    turn: _Turn | None = None
    for at, message in enumerate(messages):
        if turn is None or turn.role != message.role:
            if turn is not None:
                yield turn
            turn = _Turn(message.role)
        turn.blocks += [(f"messages.{at}.content.{index}", block) for index, block in enumerate(message.content)]
    if turn is not None:
        yield turn


def _check(turn: _Turn) -> None:
    for where, block in turn.blocks:
        if isinstance(block, OtherBlock):
            raise _not_text(block, where)
        if block.type not in _ALLOWED[turn.role]:
            known = ", ".join(_ALLOWED[turn.role])
            message = f"{where}: {block.type!r} is not allowed in a message with role {turn.role}. Allowed: {known}."
            raise RequestError(message, where)


def message_media(messages: Sequence[Message]) -> Iterator[MediaPart]:
    """Yield the images of user messages and of tool results. Raise RequestError for an unsupported source."""
    for where, block in _image_blocks(messages):
        yield MediaPart("image", _url(block, where), f"{where}.source")


def refuse_images(messages: Sequence[Message]) -> None:
    """Raise RequestError that names the first image, for a model that accepts only text."""
    for where, block in _image_blocks(messages):
        raise _not_text(block, where)


def _image_blocks(messages: Sequence[Message]) -> Iterator[tuple[str, ImageBlock]]:
    for turn in _turns(messages):
        for where, block in turn.blocks:
            if isinstance(block, ImageBlock):
                yield where, block
            elif isinstance(block, ToolResultBlock):
                inner = ((f"{where}.content.{at}", part) for at, part in enumerate(block.content))
                yield from ((place, part) for place, part in inner if isinstance(part, ImageBlock))


def _url(block: ImageBlock, where: str) -> str:
    match block.source:
        case Base64Source() as source:
            return f"data:{source.media_type};base64,{source.data}"
        case UrlSource() as source:
            return source.url
    raise RequestError(f"{where}.source: the source of an image must have the type base64 or url.", f"{where}.source")


def _not_text(block: OtherBlock | ImageBlock, where: str) -> RequestError:
    return RequestError(
        f"{where}: blocks of type {block.type!r} are not supported; the model accepts only text.", where
    )


def _joined(texts: Sequence[str]) -> str:
    return "\n".join(texts)


def system_text(blocks: Sequence[TextBlock]) -> str:
    return _joined([block.text for block in blocks if not block.text.startswith(BILLING)])


def _assistant(turn: _Turn, names: dict[str, str]) -> dict[str, Any]:
    """Return one assistant message and add the function names of its calls to `names`, by call ID."""
    texts, thoughts, calls = [], [], []
    for where, block in turn.blocks:
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking or thinking_of(block.signature, where))
        elif isinstance(block, ToolUseBlock):
            names[block.id] = block.name
            function = {"name": block.name, "arguments": block.input}
            calls.append({"id": block.id, "type": "function", "function": function})
        # Thinking that another service encrypted (redacted_thinking) is useless to this model.
    message: dict[str, Any] = {"role": "assistant", "content": _joined(texts)}
    if thought := _joined([thought for thought in thoughts if thought]):
        message["reasoning"] = thought
    return message | ({"tool_calls": calls} if calls else {})


def _result(
    block: ToolResultBlock, where: str, names: dict[str, str]
) -> tuple[dict[str, Any], list[str | dict[str, Any]]]:
    """Return the message of a tool result, and its images."""
    name = names.get(block.tool_use_id)
    if name is None:
        message = f"{where}.tool_use_id: no earlier tool_use block has the id {block.tool_use_id[:100]!r}."
        raise RequestError(message, f"{where}.tool_use_id")
    texts: list[str] = []
    images: list[str | dict[str, Any]] = []
    for at, part in enumerate(block.content):
        place = f"{where}.content.{at}"
        if isinstance(part, OtherBlock):
            raise _not_text(part, place)
        if isinstance(part, ImageBlock):
            images.append(_image(part, place))
        else:
            texts.append(part.text)
    content = f"Error: {_joined(texts)}" if block.is_error else _joined(texts)
    return {"role": "tool", "tool_call_id": block.tool_use_id, "name": name, "content": content}, images


def _image(block: ImageBlock, where: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": _url(block, where)}}


def _user(turn: _Turn, names: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Yield the messages of a user turn. Images of tool results follow in a user message, because most chat templates
    accept only text in the role tool."""
    parts: list[str | dict[str, Any]] = []
    of_results: list[str | dict[str, Any]] = []
    for where, block in turn.blocks:
        if isinstance(block, ToolResultBlock):
            yield from _said(parts)
            parts = []
            result, images = _result(block, where, names)
            yield result
            of_results += images
        elif isinstance(block, TextBlock | ImageBlock):
            parts += of_results
            of_results = []
            parts.append(block.text if isinstance(block, TextBlock) else _image(block, where))
    yield from _said([*of_results, *parts])


def _said(parts: Sequence[str | dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield a user message, unless it is empty."""
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) == len(parts):
        content: Any = _joined(texts)
    else:
        content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    if parts:
        yield {"role": "user", "content": content}


def chat_messages(system: Sequence[TextBlock], messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the conversation as chat messages, the system prompt first.

    Raise RequestError that names an unsupported block.
    """
    text = system_text(system)
    result: list[dict[str, Any]] = [{"role": "system", "content": text}] if text else []
    names: dict[str, str] = {}
    for turn in _turns(messages):
        _check(turn)
        if turn.role == "assistant":
            result.append(_assistant(turn, names))
        elif turn.role == "user":
            result += _user(turn, names)
        elif text := system_text([block for _, block in turn.blocks if isinstance(block, TextBlock)]):
            result.append({"role": "system", "content": text})
    return result
