"""Detection of reasoning in a reply (present, or already opened by the prompt), and its token limit."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from appliance.output_formats.declaration import OutputFormat, Reasoning
from engine.api.errors import RequestError
from engine.api.messages import Sampling
from engine.api.messages import Thinking as Limit
from engine.text import Tokenizer

PARAM = "thinking_token_budget"


@dataclass(frozen=True)
class Thinking:
    """State of the reasoning at the start of a reply."""

    begun: bool = False  # the reply starts within the reasoning
    open: bool = False  # the prompt contains the start marker, which `end` closes
    closed: bool = False  # the prompt closed the reasoning, so none is expected
    off: bool = False  # reasoning is switched off, so everything is content
    end: str = ""

    @property
    def possible(self) -> bool:
        return not (self.closed or self.off)


def thinking_of(prompt: str, continues: bool, reasoning: Reasoning | None, variables: Mapping[str, Any]) -> Thinking:
    """Return the state of the reasoning, from the prompt and else from the chat template's switches.

    `continues` means that the reply continues the last message of the prompt.
    """
    if reasoning is None:
        return Thinking(off=True)
    if continues:
        found = ((prompt.rfind(start), end) for start, end in reasoning.pairs if start)
        opened, end = max(found, default=(-1, ""))
        closed = max(prompt.rfind(end) for end in reasoning.ends)
        if opened > closed:
            return Thinking(begun=True, open=True, end=end)
        if closed > opened:
            return Thinking(closed=True)
    tail = prompt.rstrip()
    for start, end in reasoning.pairs:
        if start and tail.endswith(start.rstrip()):
            return Thinking(begun=True, open=True, end=end)
    if tail.endswith(reasoning.ends):
        return Thinking(closed=True)
    if not reasoning.switched_on(variables):
        return Thinking(off=True)
    return Thinking(begun=reasoning.implicit and not continues)


def thinking_limit(
    budget: int | None, native: OutputFormat, read: OutputFormat, thinking: Thinking, tokenizer: Tokenizer
) -> Limit | None:
    """Return the reasoning limit that the engine enforces, or None without a budget (None or -1) or without reasoning.

    `read` is the format with which the reply is parsed, `native` the model's own. Raise RequestError.
    """
    if budget in (None, -1):
        return None
    assert budget is not None, "None is no budget"
    if budget < 0:
        raise RequestError(f"{PARAM} must be at least 0, or -1 for no limit; got {budget}.", PARAM)
    if native.reasoning is None:
        message = (
            f"{PARAM} requires a model with a reasoning format, but the format of this model is {native.name} "
            "(model.format)."
        )
        raise RequestError(message, PARAM)
    reasoning = read.reasoning
    if reasoning is None or not thinking.possible:
        return None
    marks = (*read.calls.openings, *read.calls.starts) if read.calls is not None and read.channels is None else ()
    return Limit(
        budget=budget,
        close=tuple(tokenizer.encode(thinking.end or reasoning.end, add_special_tokens=False)),
        starts=reasoning.starts,
        ends=(*reasoning.ends, *marks),
        begun=thinking.begun,
        open=thinking.open,
        again=read.channels is not None,
    )


def check_close(limit: Limit | None, sampling: Sampling) -> None:
    """Raise RequestError if the request itself forbids the tokens that end the reasoning."""
    if limit is None:
        return
    allowed = sampling.allowed_token_ids
    if allowed is not None and not set(limit.close) <= set(allowed):
        missing = ", ".join(str(token) for token in limit.close if token not in allowed)
        raise RequestError(f"{PARAM}: allowed_token_ids must contain {missing}, which ends the reasoning.", PARAM)
    for word in sampling.bad_words:
        if any(limit.close[at : at + len(word)] == tuple(word) for at in range(len(limit.close))):
            raise RequestError(f"{PARAM}: bad_words must not contain the marker that ends the reasoning.", PARAM)
