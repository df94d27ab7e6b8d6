"""Conversion of engine deltas to text, token strings, reasoning and calls, cut at stop strings.

Each sequence has one `Choice`. A delta becomes one `Piece`. Tokens after a stop string are dropped with their logprobs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from appliance.output_formats.events import Event, joined
from appliance.output_formats.reader import reader_of
from appliance.server.chat.offered_calls import OfferedCalls
from appliance.server.chat.parsed import ChatPlan, Reading
from engine.api.messages import Delta, Finish, Logprob, Timing
from engine.text import IncrementalDecoder, StopStrings, Tokenizer, TokenText


@dataclass(frozen=True)
class ScoredToken:
    """One token with its logprob. `text` has complete characters only and may be empty."""

    token: int
    text: str
    logprob: float
    rank: int
    top: tuple[tuple[int, str, float], ...]  # most likely tokens at this position


def scored_token(entry: Logprob, strings: TokenText) -> ScoredToken:
    """Return the entry with strings, decoded as the token after those that `strings` has seen."""
    top = tuple(
        (token, strings.string(token), value) for token, value in zip(entry.top_ids, entry.top_logprobs, strict=True)
    )
    return ScoredToken(entry.token, strings.push(entry.token), entry.logprob, entry.rank, top)


@dataclass(slots=True)
class Piece:
    """Output of one delta."""

    text: str = ""
    ids: tuple[int, ...] = ()
    logprobs: list[ScoredToken] = field(default_factory=list)
    finish: Finish | None = None  # set on the last piece
    stop_reason: str | int | None = None
    prompt_logprobs: tuple[Logprob | None, ...] | None = None
    texts: list[str] = field(default_factory=list)  # part of `text` that each token adds
    routes: tuple[bytes, ...] = ()  # experts of computed tokens, see `Delta.routes`


class Choice:
    """One running reply. `stopped` is set when a stop string ended it, which the engine does not know yet."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], reading: Reading) -> None:
        self.tokens = 0
        self.stopped = False
        self.finish: Finish | None = None
        self.timing: Timing | None = None
        self._reading = reading
        self._decoder = IncrementalDecoder(
            tokenizer, prompt, skip_special_tokens=reading.skip_special_tokens, shown_ids=reading.shown_ids
        )
        self._stops = None
        if reading.stops:
            self._stops = StopStrings(reading.stops, include=reading.include_stop, min_tokens=reading.min_tokens)
        self._strings = TokenText(tokenizer, prompt)

    def take(self, delta: Delta) -> Piece:
        if delta.timing is not None:
            self.timing = delta.timing
        ids, finish = delta.ids, delta.finish
        piece = Piece("", ids, [], finish, delta.stop_reason, delta.prompt_logprobs)
        for at, token in enumerate(ids):
            text = "" if finish == "stop" and self._is_hidden_end(ids, at) else self._decoder.push(token)
            if self._stops is None:
                piece.texts.append(text)
                continue
            result = self._stops.push(text)
            piece.texts.append(result.text)
            if result.stop is not None:
                self.stopped = True
                piece.ids = ids[: at + 1]
                piece.finish, piece.stop_reason = "stop", result.stop
                break
        piece.text = piece.texts[0] if len(piece.texts) == 1 else "".join(piece.texts)
        if piece.finish is not None and self._stops is not None and not self.stopped:
            piece.text += self._stops.flush()
        if delta.routes:
            piece.routes = delta.routes[: len(delta.routes) - len(ids) + len(piece.ids)]
        if delta.logprobs:
            piece.logprobs = [scored_token(entry, self._strings) for entry in delta.logprobs[: len(piece.ids)]]
        self.tokens += len(piece.ids)
        self.finish = piece.finish
        return piece

    def _is_hidden_end(self, ids: Sequence[int], at: int) -> bool:
        """Return if the token ended the reply, so that it is counted but hidden.

        The last token of a complete grammar is also text.
        """
        return at == len(ids) - 1 and ids[at] in self._reading.end_ids and not self._reading.include_stop


@dataclass(slots=True)
class ChatPiece:
    """A piece with its text parsed by the output format."""

    piece: Piece
    events: list[Event]


class ChatChoice:
    """One running chat reply: a `Choice` whose text is parsed.

    `reasoning_tokens` counts the tokens within the markers, regardless of how they are grouped into deltas.
    `is_reasoning` is True while the next token is within the markers or ends them.
    """

    def __init__(self, tokenizer: Tokenizer, plan: ChatPlan) -> None:
        self.choice = Choice(tokenizer, plan.prompts[0].ids, plan.reading)
        self.reasoning_tokens = 0
        self._reader = reader_of(
            plan.output_format,
            functions=plan.tools.functions,
            reasons=plan.reasons,
            one_call=plan.tools.one_call,
        )
        self.is_reasoning = self._reader.is_reasoning
        self._offered = OfferedCalls(function.name for function in plan.tools.functions)

    def take(self, delta: Delta) -> ChatPiece:
        piece = self.choice.take(delta)
        events: list[Event] = []
        done = 0
        for text in piece.texts:
            done += len(text)
            events += self._reader.feed(text)
            before, self.is_reasoning = self.is_reasoning, self._reader.is_reasoning
            self.reasoning_tokens += before and self.is_reasoning
        if done < len(piece.text):  # text that was held back as a possible start of a stop string
            events += self._reader.feed(piece.text[done:])
            self.is_reasoning = self._reader.is_reasoning
        if piece.finish is not None:
            events += self._reader.finish()
        events = self._offered.take(events, final=piece.finish is not None)
        return ChatPiece(piece, events if len(piece.texts) < 2 else joined(events))
