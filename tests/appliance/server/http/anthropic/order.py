"""Check the event order of a /v1/messages stream, independent of the code that writes it: each record is an event of
the official client, in the order given here, and the events add up to a message."""

import json
from typing import Any

from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
DELTAS = {
    "text": {"text_delta"},
    "thinking": {"thinking_delta", "signature_delta"},
    "tool_use": {"input_json_delta"},
}


def records(text: str) -> list[dict[str, Any]]:
    """Return the JSON of each record; its event name must equal its type."""
    found = []
    for part in text.removesuffix("\n\n").split("\n\n"):
        if part.startswith(":"):
            continue
        lines = dict(line.split(": ", 1) for line in part.split("\n"))
        assert set(lines) <= {"event", "id", "data"}, part
        data = json.loads(lines["data"])
        assert lines["event"] == data["type"], part
        found.append(data)
    return found


def assembled(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that a complete stream adds up to, as a dict of a `Message`."""
    events = [event for event in events if event["type"] != "ping"]
    for event in events:
        EVENT.validate_python(event)
    assert [at for at, event in enumerate(events) if event["type"] == "message_start"] == [0]
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    message: dict[str, Any] = json.loads(json.dumps(events[0]["message"]))
    assert message["content"] == [] and message["stop_reason"] is None and message["usage"]["output_tokens"] == 0
    blocks(events[1:-2], message["content"])
    message |= events[-2]["delta"]
    message["usage"] |= events[-2]["usage"]
    Message.model_validate(message)
    return message


def blocks(events: list[dict[str, Any]], content: list[dict[str, Any]], *, whole: bool = True) -> None:
    """Join the content of block events. `whole`: the last block is closed too."""
    is_open, signed, arguments = False, False, ""
    for event in events:
        kind = event["type"]
        if kind == "content_block_start":
            assert not is_open and event["index"] == len(content), event
            content.append(dict(event["content_block"]))
            is_open, signed, arguments = True, False, ""
            continue
        assert is_open and event["index"] == len(content) - 1, event
        block = content[-1]
        if kind == "content_block_stop":
            is_open = False
            assert signed == (block["type"] == "thinking")
            if block["type"] == "tool_use" and arguments:
                block["input"] = json.loads(arguments) if whole else arguments
            continue
        assert kind == "content_block_delta", event
        delta = event["delta"]
        assert delta["type"] in DELTAS[block["type"]] and not signed
        if delta["type"] == "text_delta":
            block["text"] += delta["text"]
        elif delta["type"] == "thinking_delta":
            block["thinking"] += delta["thinking"]
        elif delta["type"] == "signature_delta":
            assert delta["signature"]
            block["signature"], signed = delta["signature"], True
        else:
            arguments += delta["partial_json"]
    assert not is_open
