"""Interface of truncation stages (min_p, top_k, top_p). A `TruncationStage` takes Rows and indexes of some of them, and
returns a function that shortens prefixes, or None if none of these rows uses it."""

from collections.abc import Callable

import numpy as np
from torch import Tensor

from engine.sampling.candidates import Candidates
from engine.sampling.rows import Rows

Shorten = Callable[[Candidates, Tensor], Tensor]  # keep [rows] int64 -> keep
TruncationStage = Callable[[Rows, np.ndarray], Shorten | None]
