"""The formats that are known: by their names, and recognised by a model's chat template and type."""

from collections.abc import Sequence
from typing import TypeVar

from appliance.output_formats.call_families import CALLS, HERMES
from appliance.output_formats.declaration import Calls, Channels, OutputFormat, Reasoning
from appliance.output_formats.json_call import BareArguments
from appliance.output_formats.reasoning_families import REASONINGS, THINK

__all__ = [
    "CALLS",
    "HARMONY",
    "HARMONY_MARKS",
    "HERMES",
    "PLAIN",
    "REASONINGS",
    "THINK",
    "chosen",
    "named_call",
    "names",
    "recognise",
]

AUTO, NO_CALLS, NO_REASONING = "auto", "plain", "identity"
PLAIN = OutputFormat()

# gpt-oss. Reasoning and calls are named here for what wants to know of them; the channels are how they are written.
_CHANNELS = Channels(
    start="<|start|>",
    channel="<|channel|>",
    constrain="<|constrain|>",
    message="<|message|>",
    end="<|end|>",
    ends=("<|call|>", "<|return|>"),
    role="assistant",
    final="final",
    thinking="analysis",
    calling="commentary",
    recipient="functions.",
)
HARMONY = OutputFormat(
    Reasoning("harmony", start="<|channel|>analysis<|message|>", end="<|end|>", trim=""),
    Calls("harmony", BareArguments(""), begin="<|channel|>commentary to=functions."),
    _CHANNELS,
)
HARMONY_MARKS = ("<|channel|>", "<|start|>", "<|message|>")

Part = TypeVar("Part", Calls, Reasoning)


def _recognised(parts: Sequence[Part], text: str, model_type: str) -> Part | None:
    for part in parts:
        fits = not part.model_types or model_type.startswith(part.model_types)
        if part.recognised_by and fits and all(mark in text for mark in part.recognised_by):
            return part
    return None


def recognise(template: str, model_type: str = "") -> OutputFormat:
    """The format that a chat template writes past replies in, or asks for. Escaped quotes count as quotes.
    `model_type` is what config.json calls the model; it settles what templates alone leave open."""
    text = template.replace('\\"', '"')
    if all(mark in text for mark in HARMONY_MARKS):
        return HARMONY
    return OutputFormat(_recognised(REASONINGS, text, model_type), _recognised(CALLS, text, model_type))


def names() -> tuple[str, ...]:
    """What may be asked for, beside `auto`; two of them may be joined by a plus."""
    parts = (*CALLS, *REASONINGS)
    return (*dict.fromkeys(part.name for part in parts), "harmony", NO_CALLS, NO_REASONING)


def chosen(name: str, recognised: OutputFormat) -> OutputFormat:
    """The format of a name, or of two names joined by a plus: what a name says nothing about is as recognised. A name
    of both a way to call and a way to reason means both. Raises KeyError with a name that is not known."""
    found = recognised
    for part in name.split("+"):
        part = part.strip()
        if part == AUTO:
            continue
        if part not in names():
            raise KeyError(part)
        if part == "harmony":
            found = HARMONY
            continue
        reasoning = next((one for one in REASONINGS if one.name == part), found.reasoning)
        calls = next((one for one in CALLS if one.name == part), found.calls)
        if found.channels is not None:  # parts of channels are nothing without them
            reasoning = None if reasoning is found.reasoning else reasoning
            calls = None if calls is found.calls else calls
        found = OutputFormat(
            None if part == NO_REASONING else reasoning,
            None if part == NO_CALLS else calls,
        )
    return found


def named_call(name: str) -> Calls:
    """The reply as the bare arguments of one function."""
    return Calls(name, BareArguments(name))
