"""Engine deltas to what a client reads: text, token strings, reasoning and calls, cut at stop strings.

One `Choice` per sequence. A delta becomes one `Piece`; tokens behind a stop string are dropped with their logprobs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from appliance.chat.format.events import Event
from appliance.chat.format.reader import reader_of
from appliance.chat.prompt import ChatPlan, Reading
from engine.api.messages import Delta, Finish, Logprob, Timing
from engine.text import IncrementalDecoder, StopStrings, Tokenizer, TokenText


@dataclass(frozen=True)
class Scored:
    """One token with its logprob; `top` are the most likely tokens at its place. Strings hold whole characters,
    or nothing."""

    token: int
    text: str
    logprob: float
    rank: int
    top: tuple[tuple[int, str, float], ...]


def scored(entry: Logprob, strings: TokenText) -> Scored:
    """The entry with strings, as the next token behind those that `strings` has seen; then it has seen this one too."""
    top = tuple(
        (token, strings.string(token), value) for token, value in zip(entry.top_ids, entry.top_logprobs, strict=True)
    )
    return Scored(entry.token, strings.push(entry.token), entry.logprob, entry.rank, top)


@dataclass
class Piece:
    """What one delta adds. `finish` is set on the last piece."""

    text: str = ""
    ids: tuple[int, ...] = ()
    logprobs: list[Scored] = field(default_factory=list)
    finish: Finish | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: tuple[Logprob | None, ...] | None = None


class Choice:
    """One reply under way. `stopped` is set when a stop string ended it, which the engine does not know yet."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], reading: Reading) -> None:
        self.tokens = 0
        self.stopped = False
        self.timing: Timing | None = None
        self._reading = reading
        self._decoder = IncrementalDecoder(
            tokenizer, prompt, skip_special_tokens=reading.skip_special_tokens, shown_ids=reading.shown_ids
        )
        self._stops = StopStrings(reading.stops, include=reading.include_stop, min_tokens=reading.min_tokens)
        self._strings = TokenText(tokenizer, prompt)

    def take(self, delta: Delta) -> Piece:
        self.timing = delta.timing or self.timing
        piece = Piece(finish=delta.finish, stop_reason=delta.stop_reason, prompt_logprobs=delta.prompt_logprobs)
        used = 0
        for token in delta.ids:
            used += 1
            last = delta.finish == "stop" and used == len(delta.ids)
            # The token that ended the reply is counted but is no text; a complete grammar's last token is both.
            hidden = last and token in self._reading.end_ids and not self._reading.include_stop
            result = self._stops.push("" if hidden else self._decoder.push(token))
            piece.text += result.text
            if result.stop is not None:
                self.stopped = True
                piece.finish, piece.stop_reason = "stop", result.stop
                break
        if piece.finish is not None and not self.stopped:
            piece.text += self._stops.flush()
        piece.ids = delta.ids[:used]
        piece.logprobs = [scored(entry, self._strings) for entry in delta.logprobs[:used]]
        self.tokens += used
        return piece


@dataclass
class ChatPiece:
    """A piece with its text read as an output format."""

    piece: Piece
    events: list[Event]


class ChatChoice:
    """One chat reply under way: a `Choice` whose text is parsed. `reasoning_tokens` counts those inside the markers."""

    def __init__(self, tokenizer: Tokenizer, plan: ChatPlan) -> None:
        self.choice = Choice(tokenizer, plan.prompts[0].ids, plan.reading)
        self.reasoning_tokens = 0
        self._reader = reader_of(
            plan.output_format,
            functions=plan.tools.functions,
            reasons=plan.reasons,
            one_call=plan.tools.one_call,
        )

    @property
    def is_reasoning(self) -> bool:
        """Whether the next token is within the markers, or ends them."""
        return self._reader.is_reasoning

    def take(self, delta: Delta) -> ChatPiece:
        before = self._reader.is_reasoning
        piece = self.choice.take(delta)
        events = self._reader.feed(piece.text)
        if before and self._reader.is_reasoning:
            self.reasoning_tokens += len(piece.ids)
        if piece.finish is not None:
            events += self._reader.finish()
        return ChatPiece(piece, events)
