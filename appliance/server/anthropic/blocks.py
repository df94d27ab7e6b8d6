"""Events of a reply to content blocks: as the events of a stream, and whole.

Blocks follow each other: one is open at a time, and what is of another kind closes it. Text behind a call is a block of
its own.
"""

import hashlib
import json
from dataclasses import dataclass, field
from io import StringIO
from typing import Any, Literal

import orjson
from pydantic_core import from_json

from appliance.output_formats.events import CallArguments, CallBroken, CallStart, Content, Event, ReasoningText
from appliance.server.anthropic.signature import sign

Kind = Literal["thinking", "text", "tool_use"]
Thoughts = Literal["shown", "omitted", "dropped"]
"""What becomes of thinking: a block, a block without its text, or nothing."""


@dataclass
class Block:
    """`call` is the index of a call; `gained` its arguments, or the text, as they come."""

    kind: Kind
    call: int = -1
    name: str = ""
    id: str = ""
    gained: StringIO = field(default_factory=StringIO)  # a str would be copied for each token

    @property
    def text(self) -> str:
        return self.gained.getvalue()


def _input(text: str) -> Any:
    """Arguments as the model wrote them, down to its digits; of what was cut, as much as is complete."""
    try:
        if isinstance(json.loads(text), dict):
            return orjson.Fragment(text)
    except (ValueError, RecursionError):
        pass
    try:
        partial = from_json(text, allow_partial=True)
    except ValueError:
        return {}
    return orjson.Fragment(json.dumps(partial)) if isinstance(partial, dict) else {}


@dataclass
class Blocks:
    """The content of one reply so far. `salt` makes the ids of its calls, the same ones whenever it is read again."""

    salt: str
    thoughts: Thoughts = "shown"
    blocks: list[Block] = field(default_factory=list)
    is_open: bool = False
    broken: dict[int, str] = field(default_factory=dict)  # what a call that was none was as text

    def take(self, events: list[Event]) -> list[dict[str, Any]]:
        """What the events add to a stream. A call that proves broken was sent: there it ends, and whole it is text."""
        told: list[dict[str, Any]] = []
        for event in events:
            if isinstance(event, Content):
                told += self._text("text", event.text)
            elif isinstance(event, ReasoningText):
                told += self._text("thinking", event.text) if self.thoughts != "dropped" else []
            elif isinstance(event, CallStart):
                told += self._open(Block("tool_use", event.index, event.name, self._call_id(event.index)))
            elif isinstance(event, CallArguments):
                told += self._add(event.text)
            elif isinstance(event, CallBroken):
                self.broken[event.index] = event.text
                told += self.close()
                if not any(block.call == event.index for block in self.blocks):
                    told += self._text("text", event.text)
        return told

    def close(self) -> list[dict[str, Any]]:
        """Ends the open block, if there is one."""
        if not self.is_open:
            return []
        self.is_open = False
        block, told = self.blocks[-1], []
        if block.kind == "thinking":
            told.append(self._delta({"type": "signature_delta", "signature": self._signature(block)}))
        return [*told, {"type": "content_block_stop", "index": len(self.blocks) - 1}]

    def end(self) -> list[dict[str, Any]]:
        """Ends the content: nothing at all is an empty text."""
        return [*([] if self.blocks else self._open(Block("text"))), *self.close()]

    def has_calls(self, *, streamed: bool) -> bool:
        return any(block.kind == "tool_use" and (streamed or block.call not in self.broken) for block in self.blocks)

    def _call_id(self, index: int) -> str:
        return "toolu_" + hashlib.blake2b(f"{self.salt}/{index}".encode(), digest_size=12).hexdigest()

    def _signature(self, block: Block) -> str:
        return sign(block.text, shown=self.thoughts == "shown")

    def _text(self, kind: Kind, text: str) -> list[dict[str, Any]]:
        if not text:
            return []
        opens = not self.is_open or self.blocks[-1].kind != kind
        return [*(self._open(Block(kind)) if opens else []), *self._add(text)]

    def _open(self, block: Block) -> list[dict[str, Any]]:
        told = self.close()
        self.blocks.append(block)
        self.is_open = True
        empty: dict[str, dict[str, Any]] = {
            "thinking": {"type": "thinking", "thinking": "", "signature": ""},
            "text": {"type": "text", "text": ""},
            "tool_use": {"type": "tool_use", "id": block.id, "name": block.name, "input": {}},
        }
        start = {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": empty[block.kind]}
        return [*told, start]

    def _add(self, text: str) -> list[dict[str, Any]]:
        block = self.blocks[-1]
        block.gained.write(text)
        if block.kind == "text":
            return [self._delta({"type": "text_delta", "text": text})]
        if block.kind == "tool_use":
            return [self._delta({"type": "input_json_delta", "partial_json": text})]
        return [self._delta({"type": "thinking_delta", "thinking": text})] if self.thoughts == "shown" else []

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}

    def whole(self) -> list[dict[str, Any]]:
        """All content. A broken call is the text that it was, one with the text beside it."""
        content: list[dict[str, Any]] = []
        for block in self.blocks:
            if block.kind == "thinking":
                shown = block.text if self.thoughts == "shown" else ""
                content.append({"type": "thinking", "thinking": shown, "signature": self._signature(block)})
            elif block.kind == "tool_use" and block.call not in self.broken:
                fields = {"id": block.id, "name": block.name, "input": _input(block.text)}
                content.append({"type": "tool_use", **fields})
            else:
                text = self.broken.get(block.call, block.text)
                if content and content[-1]["type"] == "text":
                    content[-1]["text"] += text
                else:
                    content.append({"type": "text", "text": text})
        return content or [{"type": "text", "text": ""}]
