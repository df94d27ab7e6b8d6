"""The order of sampling stages, and their application to the rows of one step.

grammar mask -> (raw logprobs) -> EDITS -> CUTS -> (processed logprobs) -> draw
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from engine.api.errors import NOT_FINITE, NOTHING_LEFT
from engine.api.messages import Logprob
from engine.sampling.allowed import allowed_token_ids
from engine.sampling.bad_words import bad_words
from engine.sampling.bias import logit_bias
from engine.sampling.compiled import compiled_edits
from engine.sampling.compiled import grammar as compiled_grammar
from engine.sampling.draw import Draw, draw
from engine.sampling.grammar import grammar
from engine.sampling.logprobs import Threshold, kept_only, logprobs, with_ids
from engine.sampling.min_p import min_p
from engine.sampling.min_tokens import min_tokens
from engine.sampling.noise import Noise
from engine.sampling.penalties import repetition_penalty, reply_penalties
from engine.sampling.rows import Edit, Rows
from engine.sampling.temperature import temperature
from engine.sampling.top_k import top_k
from engine.sampling.top_p import top_p
from engine.sampling.truncation import Cut

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


@dataclass(frozen=True)
class Sampled:
    """Sampled tokens and logprobs by row."""

    ids: list[int]  # undefined for rows in `failed`
    drawn: Tensor  # ids as [rows] int64 on the device
    logprobs: dict[int, Logprob] = field(default_factory=dict)  # if requested
    failed: dict[int, str] = field(default_factory=dict)  # reason why no token could be sampled


class Prepared:
    """Sampling of one step, prepared on the host before the model runs. `finish` may overwrite the logits."""

    def __init__(self, rows: Rows, noise: Noise) -> None:
        self._rows, self._noise = rows, noise
        if noise.team is not None:
            self._grammar, self._edits = compiled_grammar(rows, noise.team), compiled_edits(rows, noise.team)
        else:
            self._grammar = grammar(rows)
            self._edits = [edit for stage in EDITS if (edit := stage(rows)) is not None]
        asked = rows.columns.logprobs
        self._asked = {row: asked[int(rows.slots[row])] for row in rows.using(asked)}

    def finish(self, logits: Tensor) -> Sampled:
        """Sample. logits: float32 [rows, vocab]."""
        if self._grammar is not None:
            self._grammar(logits)
        raw = [row for row, asked in self._asked.items() if not asked.processed]
        # Copied if processors work in place, and only for rows that request raw logprobs.
        copied = logits[raw] if raw and self._edits else None
        for edit in self._edits:
            edit(logits)
        processed = [row for row, asked in self._asked.items() if asked.processed]
        drawn = draw(logits, self._rows, self._noise, CUTS, processed)
        found: dict[int, Logprob] = {}
        if raw:
            found |= self._scores(logits if copied is None else copied, raw if copied is None else None, raw, drawn.ids)
        if processed:
            found |= self._processed(logits, drawn, processed)
        return Sampled(drawn.ids.tolist(), drawn.ids, found, _failures(logits, drawn))

    def _scores(
        self, logits: Tensor, at: list[int] | None, rows: list[int], ids: Tensor, border: Threshold | None = None
    ) -> dict[int, Logprob]:
        """Return the logprobs of these rows, whose logits are at the indexes `at` (None: they are all of `logits`)."""
        tops = [self._asked[row].top for row in rows]
        scored = dict(zip(rows, logprobs(logits, ids[rows], tops, self._noise.team, at=at, border=border), strict=True))
        for place, row in enumerate(rows):
            if wanted := self._asked[row].ids:
                where = [place if at is None else at[place]] * len(wanted)
                edge = None if border is None else border.of(place, len(wanted))
                named = torch.tensor(wanted, device=logits.device)
                each = logprobs(logits, named, [0] * len(wanted), self._noise.team, at=where, border=edge)
                scored[row] = with_ids(scored[row], wanted, [one.logprob for one in each])
        return scored

    def _processed(self, logits: Tensor, drawn: Draw, rows: list[int]) -> dict[int, Logprob]:
        """Return the logprobs after truncation."""
        if drawn.border is not None:
            border = Threshold(drawn.border.floor[rows], drawn.border.last[rows])
            return self._scores(logits, rows, rows, drawn.ids, border)
        chosen = logits[rows]
        for part, found, keep in drawn.cut:
            common, here, there = np.intersect1d(rows, part, return_indices=True)
            if len(common):
                chosen[here] = kept_only(chosen[here], found.ids[there], keep[there])
        return self._scores(chosen, None, rows, drawn.ids)


def _failures(logits: Tensor, drawn: Draw) -> dict[int, str]:
    finite = drawn.score.isfinite()
    if finite.all():
        return {}
    bad = (~finite).nonzero()[:, 0].tolist()
    return {row: NOTHING_LEFT if bool((logits[row] == -float("inf")).all()) else NOT_FINITE for row in bad}
