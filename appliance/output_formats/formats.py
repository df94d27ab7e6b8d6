"""Registry of the known formats: by name, and by a model's chat template and type.

Another package registers a `Calls` or a `Reasoning` as an entry point of the group `slipway.output_formats`:

    [project.entry-points."slipway.output_formats"]
    toy = "toy_format:CALLS"

Built-in formats have precedence, by name and in the recognition of chat templates.
"""

from collections.abc import Sequence
from functools import cache
from importlib.metadata import entry_points
from typing import TypeVar

from appliance.output_formats.call_families import CALLS, HERMES
from appliance.output_formats.declaration import Calls, Channels, OutputFormat, Reasoning
from appliance.output_formats.json_call import BareArguments
from appliance.output_formats.reasoning_families import REASONINGS, THINK
from engine.api.errors import ConfigError

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

# gpt-oss. Reasoning and calls are declared for code that needs to know about them; the channels define the syntax.
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


GROUP = "slipway.output_formats"


@cache
def plugins() -> tuple[Calls | Reasoning, ...]:
    """Return the formats of other packages. Raises ConfigError if one is unusable."""
    found: list[Calls | Reasoning] = []
    for one in sorted(entry_points(group=GROUP), key=lambda one: one.name):
        package = one.dist.name if one.dist is not None else one.module
        try:
            part = one.load()
        except Exception as error:  # any code of another package
            raise ConfigError(
                f"output format {one.name}: {one.value} of the package {package} cannot be imported: {error!r}; repair "
                "or remove that package"
            ) from error
        if not isinstance(part, Calls | Reasoning) or part.name != one.name:
            raise ConfigError(
                f"output format {one.name}: {one.value} of the package {package} is no Calls or Reasoning of this "
                "name; update it"
            )
        found.append(part)
    return tuple(found)


def _calls() -> tuple[Calls, ...]:
    return (*CALLS, *(part for part in plugins() if isinstance(part, Calls)))


def _reasonings() -> tuple[Reasoning, ...]:
    return (*REASONINGS, *(part for part in plugins() if isinstance(part, Reasoning)))


def _recognised(parts: Sequence[Part], text: str, model_type: str) -> Part | None:
    for part in parts:
        fits = not part.model_types or model_type.startswith(part.model_types)
        if part.recognised_by and fits and all(mark in text for mark in part.recognised_by):
            return part
    return None


def recognise(template: str, model_type: str = "") -> OutputFormat:
    """Return the format in which a chat template writes or requests replies. Escaped quotes count as quotes.
    `model_type` is the type in config.json; it decides where templates alone are ambiguous."""
    text = template.replace('\\"', '"')
    if all(mark in text for mark in HARMONY_MARKS):
        return HARMONY
    return OutputFormat(_recognised(_reasonings(), text, model_type), _recognised(_calls(), text, model_type))


def names() -> tuple[str, ...]:
    """Return the accepted names except `auto`. Two of them may be joined by a plus."""
    parts: tuple[Calls | Reasoning, ...] = (*_calls(), *_reasonings())
    return (*dict.fromkeys(part.name for part in parts), "harmony", NO_CALLS, NO_REASONING)


def chosen(name: str, recognised: OutputFormat) -> OutputFormat:
    """Return the format with this name, or with two names joined by a plus. A part that a name does not define is taken
    from `recognised`. A name of both a call format and a reasoning format selects both. Raise KeyError with an unknown
    name."""
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
        reasoning = next((one for one in _reasonings() if one.name == part), found.reasoning)
        calls = next((one for one in _calls() if one.name == part), found.calls)
        if found.channels is not None:  # the parts are unusable without the channels
            reasoning = None if reasoning is found.reasoning else reasoning
            calls = None if calls is found.calls else calls
        found = OutputFormat(
            None if part == NO_REASONING else reasoning,
            None if part == NO_CALLS else calls,
        )
    return found


def named_call(name: str) -> Calls:
    """Return the format of a reply that is the bare arguments of one function."""
    return Calls(name, BareArguments(name))
