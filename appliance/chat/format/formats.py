"""The formats that are known. A model's own is recognised by its chat template, call part and reasoning part on their
own."""

from appliance.chat.format.declaration import Calls, OutputFormat, Reasoning
from appliance.chat.format.json_call import BareArguments, JsonCall

THINK = Reasoning("think", start="<think>", end="</think>")

# Hermes 2 Pro, Qwen 2.5 and Qwen 3: <tool_call>\n{"name": "f", "arguments": {…}}\n</tool_call>, repeated.
HERMES = Calls(
    "hermes",
    begin="<tool_call>",
    end="</tool_call>",
    body=JsonCall(),
    recognised_by=("<tool_call>", '"arguments"', '"name"'),
)

CALLS = (HERMES,)
REASONINGS = (THINK,)
PLAIN = OutputFormat()


def recognise(template: str) -> OutputFormat:
    """The format that a chat template writes past replies in, or asks for. Escaped quotes count as quotes."""
    text = template.replace('\\"', '"')
    calls = next((calls for calls in CALLS if all(mark in text for mark in calls.recognised_by)), None)
    reasoning = next((reasoning for reasoning in REASONINGS if reasoning.end in text), None)
    return OutputFormat(reasoning, calls)


def named_call(name: str) -> Calls:
    """The reply as the bare arguments of one function."""
    return Calls(name, begin="", end="", body=BareArguments(name))
