"""Whether a reply begins inside of its reasoning, whether there is any, and how long it may get."""

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
    """`begun`: the reply begins inside of the reasoning; `open`: because the prompt wrote its start, to which `end`
    belongs. No reasoning is to be expected where the prompt closed it (`closed`), or where it is switched off and all
    is content (`off`)."""

    begun: bool = False
    open: bool = False
    closed: bool = False
    off: bool = False
    end: str = ""

    @property
    def possible(self) -> bool:
        return not (self.closed or self.off)


def thinking_of(prompt: str, continues: bool, reasoning: Reasoning | None, variables: Mapping[str, Any]) -> Thinking:
    """What the prompt shows comes first, then the switches of the chat template. `continues`: the reply goes on with
    the prompt's last message."""
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
    """The limit that the engine holds reasoning to; None for no limit (None or -1), and where no reasoning comes.
    `read` is the format as the reply is read, `native` the model's own. Raises RequestError."""
    if budget in (None, -1):
        return None
    assert budget is not None, "None is no budget"
    if budget < 0:
        raise RequestError(f"{PARAM} must be at least 0, or -1 for no limit; got {budget}.", PARAM)
    if native.reasoning is None:
        message = f"{PARAM} needs a model whose reasoning is known; this one's format is {native.name} (model.format)."
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
    """Raises RequestError where the tokens that end the reasoning are forbidden by the request itself."""
    if limit is None:
        return
    allowed = sampling.allowed_token_ids
    if allowed is not None and not set(limit.close) <= set(allowed):
        missing = ", ".join(str(token) for token in limit.close if token not in allowed)
        raise RequestError(f"{PARAM}: allowed_token_ids lacks {missing}, which ends the reasoning.", PARAM)
    for word in sampling.bad_words:
        if any(limit.close[at : at + len(word)] == tuple(word) for at in range(len(limit.close))):
            raise RequestError(f"{PARAM}: bad_words forbids the marker that ends the reasoning.", PARAM)
