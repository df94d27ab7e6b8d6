"""Beam search: the most likely continuations, found by extending the best ones token by token.

Each step extends all beams of all prompts in one batch, and the prefix cache has the tokens that they share. A finished
beam ends with an end token. Its score is the sum of its log probabilities over length ** length_penalty, as in
transformers and vLLM.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from engine.api.errors import RequestError
from engine.api.messages import Logprob

Extend = Callable[[Sequence[tuple[int, ...]], int], Sequence[Logprob]]
"""Returns, for each prompt, the log probabilities of the given number of most likely next tokens."""


@dataclass(frozen=True)
class BeamParams:
    """Parameters of `beam_search`."""

    beam_width: int
    """Number of beams that are kept and returned."""
    max_tokens: int = 16
    length_penalty: float = 1.0
    """Above 0 favours longer replies, below 0 shorter ones."""
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise RequestError(f"{name} must be a whole number of at least 1, got {value!r}", name)


@dataclass(frozen=True)
class Beam:
    """A continuation."""

    ids: tuple[int, ...]
    logprob: float
    """Sum of the log probabilities of `ids`."""
    finished: bool = False
    """It ends with an end token."""
    text: str = ""

    def score(self, length_penalty: float) -> float:
        return float(self.logprob / max(1, len(self.ids)) ** length_penalty)


@dataclass
class _Search:
    """State of one prompt."""

    prompt: tuple[int, ...]
    beams: list[Beam] = field(default_factory=lambda: [Beam((), 0.0)])
    finished: list[Beam] = field(default_factory=list)


def beam_search(
    prompts: Sequence[tuple[int, ...]], params: BeamParams, ends: frozenset[int], extend: Extend
) -> list[list[Beam]]:
    """Return the best beams of each prompt, the best first. ends: end tokens."""
    ends = frozenset() if params.ignore_eos else ends
    searches = [_Search(prompt) for prompt in prompts]
    for _ in range(params.max_tokens):
        open_beams = [(search, beam) for search in searches for beam in search.beams]
        if not open_beams:
            break
        # Enough candidates for `beam_width` open beams even if each of them may end.
        found = extend([search.prompt + beam.ids for search, beam in open_beams], 2 * params.beam_width)
        candidates: dict[int, list[Beam]] = {id(search): [] for search in searches}
        for (search, beam), logprobs in zip(open_beams, found, strict=True):
            for token, logprob in zip(logprobs.top_ids, logprobs.top_logprobs, strict=True):
                candidates[id(search)].append(Beam((*beam.ids, token), beam.logprob + logprob, token in ends))
        for search in searches:
            _keep(search, candidates[id(search)], params)
    return [_best(search, params) for search in searches]


def _keep(search: _Search, candidates: list[Beam], params: BeamParams) -> None:
    """Replace the beams of a prompt by the best candidates, and move those that ended to `finished`."""
    best = sorted(candidates, key=lambda beam: -beam.logprob)[: 2 * params.beam_width]
    search.finished += [beam for beam in best if beam.finished]
    search.beams = [beam for beam in best if not beam.finished][: params.beam_width]


def _best(search: _Search, params: BeamParams) -> list[Beam]:
    every = [*search.finished, *search.beams]
    return sorted(every, key=lambda beam: -beam.score(params.length_penalty))[: params.beam_width]


def with_text(beam: Beam, text: str) -> Beam:
    return replace(beam, text=text)
