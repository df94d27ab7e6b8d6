"""Conversion of reply events to content blocks, both as stream events and as the complete content.

Only one block is open at a time; an event of another kind closes it. Text after a call starts a new block.
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
"""Output of thinking: a block, a block without its text, or nothing."""


@dataclass
class Block:
    """One content block."""

    kind: Kind
    call: int = -1  # index of a call
    name: str = ""
    id: str = ""
    # arguments of the call, or text; a str would be copied for each token
    gained: StringIO = field(default_factory=StringIO)

    @property
    def text(self) -> str:
        return self.gained.getvalue()


def _input(text: str) -> Any:
    """Return a call's arguments exactly as the model wrote them.

    Truncated arguments are returned as far as complete.
    """
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
    """The content of one reply so far.

    Call IDs are derived from `salt`, so that they do not change when it is read again.
    """

    salt: str
    thoughts: Thoughts = "shown"
    blocks: list[Block] = field(default_factory=list)
    is_open: bool = False
    broken: dict[int, str] = field(default_factory=dict)  # text of calls that turned out to be malformed, by call index

    def take(self, events: list[Event]) -> list[dict[str, Any]]:
        """Return the stream events for parser events.

        A malformed call was already sent: its block ends there, and the complete content has it as text.
        """
        added: list[dict[str, Any]] = []
        for event in events:
            if isinstance(event, Content):
                added += self._text("text", event.text)
            elif isinstance(event, ReasoningText):
                added += self._text("thinking", event.text) if self.thoughts != "dropped" else []
            elif isinstance(event, CallStart):
                added += self._open(Block("tool_use", event.index, event.name, self._call_id(event.index)))
            elif isinstance(event, CallArguments):
                added += self._add(event.text)
            elif isinstance(event, CallBroken):
                self.broken[event.index] = event.text
                added += self.close()
                if not any(block.call == event.index for block in self.blocks):
                    added += self._text("text", event.text)
        return added

    def close(self) -> list[dict[str, Any]]:
        """End the open block, if there is one."""
        if not self.is_open:
            return []
        self.is_open = False
        block, added = self.blocks[-1], []
        if block.kind == "thinking":
            added.append(self._delta({"type": "signature_delta", "signature": self._signature(block)}))
        return [*added, {"type": "content_block_stop", "index": len(self.blocks) - 1}]

    def end(self) -> list[dict[str, Any]]:
        """End the content. Empty content becomes one empty text block."""
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
        added = self.close()
        self.blocks.append(block)
        self.is_open = True
        empty: dict[str, dict[str, Any]] = {
            "thinking": {"type": "thinking", "thinking": "", "signature": ""},
            "text": {"type": "text", "text": ""},
            "tool_use": {"type": "tool_use", "id": block.id, "name": block.name, "input": {}},
        }
        start = {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": empty[block.kind]}
        return [*added, start]

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
        """Return the complete content. A malformed call becomes text and is joined with the text around it."""
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
