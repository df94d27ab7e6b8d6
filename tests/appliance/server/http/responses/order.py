"""Independent check of the events of a response: the models are the official client's, and the order is a state
machine that is independent of the code under test."""

import json
from typing import Any

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TERMINAL = ("response.completed", "response.incomplete", "response.failed")
# Item → the kind of its part, of its deltas, and the field of the whole in its done event.
GAINS = {
    "reasoning": ("reasoning_text", "response.reasoning_text", "text"),
    "message": ("output_text", "response.output_text", "text"),
    "function_call": ("", "response.function_call_arguments", "arguments"),
    "custom_tool_call": ("", "response.custom_tool_call_input", "input"),
}
# Keys that the Open Responses schema requires in every object, with any value.
REQUIRED = (
    *("id", "object", "created_at", "completed_at", "status", "incomplete_details", "model", "previous_response_id"),
    *("instructions", "output", "error", "tools", "tool_choice", "truncation", "parallel_tool_calls", "text", "top_p"),
    *("presence_penalty", "frequency_penalty", "top_logprobs", "temperature", "reasoning", "user", "usage"),
    *("max_output_tokens", "max_tool_calls", "store", "background", "service_tier", "metadata", "safety_identifier"),
    "prompt_cache_key",
)


def check_object(response: dict[str, Any]) -> dict[str, Any]:
    """The object, if it is one."""
    assert not set(REQUIRED) - set(response)
    Response.model_validate(response)
    assert response["object"] == "response" and isinstance(response["created_at"], int)
    never_null = ("service_tier", "metadata", "text", "top_logprobs", "presence_penalty", "store", "background")
    assert all(response[name] is not None for name in never_null)
    assert (response["status"] == "completed") == (response["completed_at"] is not None)
    assert (response["status"] == "failed") == (response["error"] is not None)
    return response


class Order:
    """Check events one by one: a stack of response, item and part, with consecutive sequence numbers."""

    def __init__(self, first: int = 0) -> None:
        self.number = first
        self.seen: list[str] = []
        self.items: list[dict[str, Any]] = []
        self.id = ""
        self.response: dict[str, Any] | None = None  # the final one
        self._item: dict[str, Any] | None = None
        self._part = False
        self._gained = ""
        self._done = False

    def take(self, event: dict[str, Any]) -> None:
        assert self.response is None, "nothing follows the terminal event"
        EVENT.validate_python(event)
        kind = event["type"]
        assert event["sequence_number"] == self.number
        self.number += 1
        self.seen.append(kind)
        if "response" in event:
            self._whole(kind, event["response"])
        elif kind == "response.output_item.added":
            self._added(event)
        elif kind == "response.output_item.done":
            self._left(event)
        else:
            self._within(kind, event)

    def _whole(self, kind: str, response: dict[str, Any]) -> None:
        assert self._item is None, "an item is open"
        check_object(response)
        self.id = self.id or response["id"]
        assert response["id"] == self.id
        if kind in TERMINAL:
            self.response = response
            assert response["output"] == self.items
            assert response["usage"] is not None
            assert response["status"] in (kind.rpartition(".")[2], "cancelled")
            return
        assert response["output"] == [] and response["usage"] is None
        if len(self.seen) == 1:
            assert kind == "response.created"
        elif len(self.seen) == 2:
            assert kind == ("response.queued" if response["background"] else "response.in_progress")
        else:
            assert self.seen[1:] == ["response.queued", "response.in_progress"]

    def _added(self, event: dict[str, Any]) -> None:
        assert len(self.seen) > 2 and self._item is None
        assert event["output_index"] == len(self.items)
        item = event["item"]
        assert item["status"] == "in_progress"
        part = GAINS[item["type"]][0]
        assert item["content"] == [] if part else item[GAINS[item["type"]][2]] == ""
        self._item, self._part, self._gained, self._done = item, False, "", False

    def _within(self, kind: str, event: dict[str, Any]) -> None:
        assert self._item is not None
        assert event["item_id"] == self._item["id"] and event["output_index"] == len(self.items)
        part, gain, field = GAINS[self._item["type"]]
        if part:
            assert event["content_index"] == 0
        if kind == "response.content_part.added":
            assert part and not self._part and event["part"]["type"] == part and event["part"]["text"] == ""
            self._part = True
        elif kind == "response.content_part.done":
            assert part and self._part and self._done and event["part"]["text"] == self._gained
            self._part = False
        elif kind == f"{gain}.delta":
            assert event["delta"] and not self._done and (self._part or not part)
            self._gained += event["delta"]
        else:
            assert kind == f"{gain}.done" and not self._done and event[field] == self._gained
            self._done = True

    def _left(self, event: dict[str, Any]) -> None:
        assert self._item is not None and self._done and not self._part
        done = event["item"]
        assert event["output_index"] == len(self.items)
        assert (done["id"], done["type"]) == (self._item["id"], self._item["type"])
        assert done.get("call_id") == self._item.get("call_id") and done["status"] in ("completed", "incomplete")
        part, _, field = GAINS[done["type"]]
        text = "".join(each["text"] for each in done["content"]) if part else done[field]
        assert text == self._gained
        self.items.append(done)
        self._item = None


def check_order(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The final response of events that are in order, from the first to the last."""
    order = Order()
    for event in events:
        order.take(event)
    assert order.response is not None, "no terminal event"
    return order.response


def read_events(text: str) -> list[dict[str, Any]]:
    """Return the events of a raw stream: each record names its event, and there is no final [DONE]."""
    records = text.split("\n\n")
    assert records.pop() == ""
    found = []
    for record in records:
        if record.startswith(":"):
            continue
        lines = [line for line in record.split("\n") if not line.startswith("id: ")]
        assert len(lines) == 2 and lines[0].startswith("event: ") and lines[1].startswith("data: ")
        found.append(json.loads(lines[1][6:]))
        assert lines[0][7:] == found[-1].get("type", "error")
    return found
