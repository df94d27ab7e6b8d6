"""JSON of function and custom tool calls in chat completion replies.

`start` and `piece` return members of streamed deltas (a piece may be empty), `whole` returns the complete call.
"""

from dataclasses import dataclass, field
from io import StringIO
from typing import Any

from appliance.output_formats.json_string import JsonString

Fields = dict[str, Any]


@dataclass
class FunctionCall:
    id: str
    name: str
    arguments: StringIO = field(default_factory=StringIO)  # a str would be copied for each token

    def start(self, index: int) -> Fields:
        return {"index": index, "id": self.id, "type": "function", "function": {"name": self.name, "arguments": ""}}

    def piece(self, index: int, text: str) -> Fields:
        self.arguments.write(text)
        return {"index": index, "function": {"arguments": text}}

    def whole(self) -> Fields:
        return {"id": self.id, "type": "function", "function": self.function()}

    def function(self) -> Fields:
        return {"name": self.name, "arguments": self.arguments.getvalue()}


@dataclass
class CustomCall:
    id: str
    name: str
    input: StringIO = field(default_factory=StringIO)
    string: JsonString = field(default_factory=JsonString)

    def start(self, index: int) -> Fields:
        return {"index": index, "id": self.id, "type": "custom", "custom": {"name": self.name, "input": ""}}

    def piece(self, index: int, text: str) -> Fields:
        decoded = self.string.feed(text)
        self.input.write(decoded)
        return {"index": index, "custom": {"input": decoded}} if decoded else {}

    def whole(self) -> Fields:
        custom = {"name": self.name, "input": self.input.getvalue()}
        return {"id": self.id, "type": "custom", "custom": custom}


def joined(first: Fields, more: Fields) -> Fields:
    """Merge the next piece of a call into its start, or into an earlier piece of the same delta."""
    for kind, member in (("function", "arguments"), ("custom", "input")):
        if kind in more:
            value = first[kind]
            return {**first, kind: {**value, member: value[member] + more[kind][member]}}
    return first
