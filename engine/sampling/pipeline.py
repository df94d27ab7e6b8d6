"""The order of sampling, and the whole of it for the rows of one step.

grammar mask -> (raw logprobs) -> EDITS -> CUTS -> (processed logprobs) -> draw
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from engine.api.messages import Logprob
from engine.sampling.allowed import allowed_token_ids
from engine.sampling.bad_words import bad_words
from engine.sampling.bias import logit_bias
from engine.sampling.cuts import Cut
from engine.sampling.draw import Draw, draw
from engine.sampling.grammar import grammar
from engine.sampling.logprobs import kept_only, logprobs
from engine.sampling.min_p import min_p
from engine.sampling.min_tokens import min_tokens
from engine.sampling.noise import Noise
from engine.sampling.penalties import repetition_penalty, reply_penalties
from engine.sampling.rows import Edit, Rows
from engine.sampling.temperature import temperature
from engine.sampling.top_k import top_k
from engine.sampling.top_p import top_p

EDITS: tuple[Callable[[Rows], Edit | None], ...] = (
    allowed_token_ids,
    logit_bias,
    min_tokens,
    repetition_penalty,
    reply_penalties,
    bad_words,
    temperature,
)
CUTS: tuple[Cut, ...] = (min_p, top_k, top_p)

NOT_FINITE = "the model's output is not finite (NaN or infinity); the weights or the dtype may be at fault"
NOTHING_LEFT = "no token is possible here: grammar, allowed_token_ids, logit_bias and bad_words exclude all of them"


@dataclass(frozen=True)
class Sampled:
    """By row: the token drawn (meaningless where `failed` says why), and logprobs where asked."""

    ids: list[int]
    drawn: Tensor  # the same, [rows] int64 on the device
    logprobs: dict[int, Logprob] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)


class Prepared:
    """Sampling of one step, prepared on the host before the model runs. `finish` may overwrite the logits."""

    def __init__(self, rows: Rows, noise: Noise) -> None:
        self._rows, self._noise = rows, noise
        self._grammar = grammar(rows)
        self._edits = [edit for stage in EDITS if (edit := stage(rows)) is not None]
        asked = rows.columns.logprobs
        self._asked = {row: asked[int(rows.slots[row])] for row in rows.using(asked)}

    def finish(self, logits: Tensor) -> Sampled:
        """logits: float32 [rows, vocab]."""
        if self._grammar is not None:
            self._grammar(logits)
        raw = [row for row, asked in self._asked.items() if not asked.processed]
        # a copy, as the edits work in place; only of the rows that ask
        raw_logits = logits[raw] if raw else None
        for edit in self._edits:
            edit(logits)
        processed = [row for row, asked in self._asked.items() if asked.processed]
        drawn = draw(logits, self._rows, self._noise, CUTS, processed)
        found: dict[int, Logprob] = {}
        if raw_logits is not None:
            found |= self._scores(raw_logits, drawn.ids, raw)
        if processed:
            found |= self._scores(self._cut_logits(logits, drawn, processed), drawn.ids, processed)
        return Sampled(drawn.ids.tolist(), drawn.ids, found, _failures(logits, drawn))

    def _scores(self, logits: Tensor, ids: Tensor, rows: list[int]) -> dict[int, Logprob]:
        return dict(
            zip(
                rows, logprobs(logits, ids[rows], [self._asked[row].top for row in rows], self._noise.team), strict=True
            )
        )

    def _cut_logits(self, logits: Tensor, drawn: Draw, rows: list[int]) -> Tensor:
        """Logits of these rows as the draw saw them: impossible outside the cuts."""
        chosen = logits[rows]
        for part, found, keep in drawn.cut:
            common, here, there = np.intersect1d(rows, part, return_indices=True)
            if len(common):
                chosen[here] = kept_only(chosen[here], found.ids[there], keep[there])
        return chosen


def _failures(logits: Tensor, drawn: Draw) -> dict[int, str]:
    finite = drawn.score.isfinite()
    if finite.all():
        return {}
    bad = (~finite).nonzero()[:, 0].tolist()
    return {row: NOTHING_LEFT if bool((logits[row] == -float("inf")).all()) else NOT_FINITE for row in bad}
