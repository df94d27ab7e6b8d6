"""One token a row: the most likely one of greedy rows, argmax(logit + noise) of the others.

Rows with min_p, top_k or top_p draw among their candidates only; the noise is a token's own, so that a token's score is
the same whichever way its row goes.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.sampling.candidates import Candidates, candidates
from engine.sampling.logprobs import Threshold
from engine.sampling.noise import Noise, row_keys
from engine.sampling.rows import Rows
from engine.sampling.truncation import Cut
from kernels.cpu.program import Team

NARROW, WIDE = 256, 1024  # sorted candidates: at first, and where a top_k wants more


@dataclass(frozen=True)
class Draw:
    """`score` [rows] is finite where the row could draw. What was left of the rows that were cut: by torch `cut` tells,
    of those that are to be explained; by compiled kernels the `border` of each row."""

    ids: Tensor  # [rows] int64
    score: Tensor  # [rows] float32
    cut: tuple[tuple[np.ndarray, Candidates, Tensor], ...] = ()
    border: Threshold | None = None


def draw(
    logits: Tensor, rows: Rows, noise: Noise, cuts: Sequence[Cut], explained: Collection[int] = frozenset()
) -> Draw:
    """explained: rows for which it is wanted what was left, if they are cut."""
    greedy = rows.greedy
    border = _everything(logits) if noise.team is not None and explained else None
    if greedy.all():
        ids, score = _greedy(logits, torch.arange(len(rows), device=logits.device), noise)
        return Draw(ids, score, border=border)
    ids = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    score = torch.empty(len(rows), dtype=torch.float32, device=logits.device)
    if greedy.any():
        at = rows.to_device(np.flatnonzero(greedy))
        ids[at], score[at] = _greedy(logits, at, noise)
    chosen = np.flatnonzero(~greedy)
    keys = rows.to_device(row_keys(rows.columns.seed[rows.slots], rows.lengths))
    columns, slots = rows.columns, rows.slots[chosen]
    is_cut = (columns.top_k[slots] > 0) | (columns.top_p[slots] < 1.0) | (columns.min_p[slots] > 0.0)
    _draw_whole(logits, rows.to_device(chosen[~is_cut]), keys, noise, ids, score)
    parts: tuple[tuple[np.ndarray, Candidates, Tensor], ...] = ()
    cut_rows = chosen[is_cut]
    if noise.team is not None and len(cut_rows):
        at = rows.to_device(cut_rows)
        ids[at], score[at], floor, last = _compiled_cut(logits, rows, cut_rows, keys[at], noise.team)
        if border is not None:
            border.floor[at], border.last[at] = floor, last
    elif len(cut_rows):
        parts = _cut(logits, rows, cut_rows, cuts)
        for part, found, keep in parts:
            at = rows.to_device(part)
            perturbed = found.values + noise.some_tokens(keys[at], found.ids)
            beyond = torch.arange(found.width, device=logits.device) >= keep[:, None]
            best, score[at] = _best(perturbed.masked_fill_(beyond, -torch.inf))
            ids[at] = found.ids.gather(1, best[:, None])[:, 0]
    return Draw(ids, score, parts, border)


def _everything(logits: Tensor) -> Threshold:
    """The border that cuts nothing off, for rows to write theirs into."""
    rows, vocab = logits.shape
    return Threshold(torch.full((rows,), -torch.inf), torch.full((rows,), vocab - 1))


def _best(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Index of each row's largest value (NaN counts as largest, the first of equals wins), and that value."""
    if scores.device.type == "cpu":
        score, best = scores.max(1)  # the same index as argmax, in a fifth of its time: 1.5 ms for 16 rows of 152k
        return best, score
    best = scores.argmax(1)
    return best, scores.gather(1, best[:, None])[:, 0]


def _greedy(logits: Tensor, at: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
    """The best tokens of these rows as they are."""
    if noise.team is not None:
        return noise.team.best(logits, at)
    return _best(logits if len(at) == len(logits) else logits[at])


def _draw_whole(logits: Tensor, at: Tensor, keys: Tensor, noise: Noise, ids: Tensor, score: Tensor) -> None:
    """Draws over the whole vocabulary, for as many rows at once as the device likes."""
    if noise.team is not None:
        ids[at], score[at] = noise.team.best(logits, at, keys[at])
        return
    for part in at.split(noise.rows_at_once(logits.device)):
        ids[part], score[part] = _best(noise.all_tokens(keys[part]).add_(logits[part]))


def _compiled_cut(
    logits: Tensor, rows: Rows, chosen: np.ndarray, keys: Tensor, team: Team
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens and scores of rows that are cut, and where the cuts end."""
    columns, slots = rows.columns, rows.slots[chosen]
    cuts = (columns.top_k[slots], columns.top_p[slots], columns.min_p[slots])
    return team.best_of_cut(logits, rows.to_device(chosen), keys, *map(rows.to_device, cuts))


def _cut(
    logits: Tensor, rows: Rows, chosen: np.ndarray, cuts: Sequence[Cut]
) -> tuple[tuple[np.ndarray, Candidates, Tensor], ...]:
    """Candidates and prefixes of the chosen rows: narrow ones first, then in full where that was not enough."""
    columns, slots = rows.columns, rows.slots[chosen]
    width = WIDE if ((columns.top_k[slots] > NARROW) & (columns.top_k[slots] <= WIDE)).any() else NARROW
    found, keep = _shorten(logits, rows, chosen, cuts, width)
    resolved = found.resolved(keep)
    if resolved.all():
        return ((chosen, found, keep),)
    done = resolved.cpu().numpy()
    narrow = Candidates(found.values[resolved], found.ids[resolved], found.vocab, None)
    rest = chosen[~done]
    return (chosen[done], narrow, keep[resolved]), (rest, *_shorten(logits, rows, rest, cuts, logits.shape[1]))


def _shorten(
    logits: Tensor, rows: Rows, chosen: np.ndarray, cuts: Sequence[Cut], width: int
) -> tuple[Candidates, Tensor]:
    shortens = [shorten for cut in cuts if (shorten := cut(rows, chosen)) is not None]
    normalise = bool((rows.columns.top_p[rows.slots[chosen]] < 1.0).any())
    some = logits if len(chosen) == len(logits) else logits[rows.to_device(chosen)]
    found = candidates(some, min(width, logits.shape[1]), normalise=normalise)
    keep = torch.full((len(chosen),), found.vocab, dtype=torch.int64, device=logits.device)
    for shorten in shortens:
        keep = shorten(found, keep)
    return found, keep
