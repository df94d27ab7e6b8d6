"""Logit processors of `pipeline.py` with compiled CPU kernels, without torch operations on entire rows.

The stages are those of a GPU (device_stages.py), with the compiled implementation of the same operations. Their inputs
are columns of the request table.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.sampling import device_stages as stages
from engine.sampling.device_stages import State, Upload
from engine.sampling.rows import LogitProcessor, Rows
from kernels.cpu import logit_processors
from kernels.cpu.program import Team
from kernels.op import Op


@dataclass(frozen=True)
class _Columns:
    """Host columns; see PenaltyColumns."""

    prompt_tokens: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor


def grammar(rows: Rows, team: Team) -> LogitProcessor | None:
    if not rows.masks:
        return None
    upload = Upload()
    found = stages.token_mask(list(rows.masks), list(rows.masks.values()), upload)
    upload.send(rows.device)
    return None if found is None else partial(_apply, found, _state(rows, team))


def compiled_processors(rows: Rows, team: Team) -> list[LogitProcessor]:
    """Return the logit processors in use, in the order of `pipeline.LOGIT_PROCESSORS`."""
    upload = Upload()
    wanted = (
        stages.allowed_token_ids(rows, upload),
        stages.logit_bias(rows, upload),
        stages.min_tokens(rows, upload),
        stages.penalties(rows, upload, max(1, len(rows))),
        stages.bad_words(rows, upload),
        _temperature(rows, upload, team),
    )
    used = [edit for edit in wanted if edit is not None]
    if not used:
        return []
    upload.send(rows.device)
    state = _state(rows, team)
    return [partial(_apply, edit, state) for edit in used]


def _apply(edit: stages.LogitProcessor, state: State, logits: Tensor) -> None:
    edit(logits, state)


def _state(rows: Rows, team: Team) -> State:
    columns = rows.columns

    def body(op: Op) -> Callable[..., Any]:
        assert op.compiled is not None, f"{op.name} has a compiled body"
        return partial(op.compiled, team)

    return State(
        _int32(rows.slots),
        _int32(rows.lengths),
        _int32(rows.tokens),
        _Columns(
            _int32(columns.prompt_tokens),
            *map(torch.from_numpy, (columns.repetition, columns.frequency, columns.presence)),
        ),
        torch.empty(0, 0, dtype=torch.int32),
        body,
    )


def _int32(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, np.int32))


def _temperature(rows: Rows, upload: Upload, team: Team) -> stages.LogitProcessor | None:
    """Return the processor for rows with a temperature other than 1; greedy rows are unchanged."""
    values = rows.columns.temperature[rows.slots]
    users = np.flatnonzero((values != 0.0) & (values != 1.0))
    if not len(users):
        return None
    at, divisors = upload.add(users.astype(np.int32)), upload.add(values[users])
    return lambda logits, state: logit_processors.divide(team, logits, at(), divisors())
