"""The order of sampling stages, and their application to the rows of one step.

grammar mask -> rules of transcripts -> (raw logprobs) -> LOGIT_PROCESSORS -> TRUNCATION -> (processed logprobs) -> draw
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
from engine.sampling.compiled import compiled_processors
from engine.sampling.compiled import grammar as compiled_grammar
from engine.sampling.draw import Draw, draw
from engine.sampling.grammar import grammar
from engine.sampling.logprobs import Threshold, kept_only, logprobs, with_ids
from engine.sampling.min_p import min_p
from engine.sampling.min_tokens import min_tokens
from engine.sampling.noise import Noise
from engine.sampling.penalties import repetition_penalty, reply_penalties
from engine.sampling.rows import LogitProcessor, Rows
from engine.sampling.speech import speech_begin, speech_rules
from engine.sampling.temperature import temperature
from engine.sampling.top_k import top_k
from engine.sampling.top_p import top_p
from engine.sampling.truncation import TruncationStage

LOGIT_PROCESSORS: tuple[Callable[[Rows], LogitProcessor | None], ...] = (
    allowed_token_ids,
    logit_bias,
    min_tokens,
    repetition_penalty,
    reply_penalties,
    bad_words,
    temperature,
)
TRUNCATION: tuple[TruncationStage, ...] = (min_p, top_k, top_p)


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
            self._grammar, self._processors = compiled_grammar(rows, noise.team), compiled_processors(rows, noise.team)
        else:
            self._grammar = grammar(rows)
            self._processors = [processor for stage in LOGIT_PROCESSORS if (processor := stage(rows)) is not None]
        self._speech = speech_rules(rows)
        if (begin := speech_begin(rows)) is not None:
            self._processors = [begin, *self._processors]
        requests = rows.columns.logprobs
        self._requests = {row: requests[int(rows.slots[row])] for row in rows.using(requests)}

    def finish(self, logits: Tensor) -> Sampled:
        """Sample. logits: float32 [rows, vocab]."""
        if self._grammar is not None:
            self._grammar(logits)
        if self._speech is not None:
            self._speech(logits)
        raw = [row for row, request in self._requests.items() if not request.processed]
        # Copied if processors work in place, and only for rows that request raw logprobs.
        copied = logits[raw] if raw and self._processors else None
        for processor in self._processors:
            processor(logits)
        processed = [row for row, request in self._requests.items() if request.processed]
        drawn = draw(logits, self._rows, self._noise, TRUNCATION, processed)
        found: dict[int, Logprob] = {}
        if raw:
            found |= self._scores(logits if copied is None else copied, raw if copied is None else None, raw, drawn.ids)
        if processed:
            found |= self._processed(logits, drawn, processed)
        return Sampled(drawn.ids.tolist(), drawn.ids, found, _failures(logits, drawn))

    def _scores(
        self, logits: Tensor, at: list[int] | None, rows: list[int], ids: Tensor, threshold: Threshold | None = None
    ) -> dict[int, Logprob]:
        """Return the logprobs of these rows, whose logits are at the indexes `at` (None: they are all of `logits`)."""
        tops = [self._requests[row].top for row in rows]
        scored = dict(
            zip(rows, logprobs(logits, ids[rows], tops, self._noise.team, at=at, threshold=threshold), strict=True)
        )
        for place, row in enumerate(rows):
            if wanted := self._requests[row].ids:
                where = [place if at is None else at[place]] * len(wanted)
                edge = None if threshold is None else threshold.of(place, len(wanted))
                named = torch.tensor(wanted, device=logits.device)
                each = logprobs(logits, named, [0] * len(wanted), self._noise.team, at=where, threshold=edge)
                scored[row] = with_ids(scored[row], wanted, [one.logprob for one in each])
        return scored

    def _processed(self, logits: Tensor, drawn: Draw, rows: list[int]) -> dict[int, Logprob]:
        """Return the logprobs after truncation."""
        if drawn.threshold is not None:
            threshold = Threshold(drawn.threshold.floor[rows], drawn.threshold.last[rows])
            return self._scores(logits, rows, rows, drawn.ids, threshold)
        chosen = logits[rows]
        for part, found, keep in drawn.truncated:
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
