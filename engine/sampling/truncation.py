"""What a cut is. `Cut`: Rows and the numbers of some of them -> a function that shortens prefixes, or None where none
of these rows uses it."""

from collections.abc import Callable

import numpy as np
from torch import Tensor

from engine.sampling.candidates import Candidates
from engine.sampling.rows import Rows

Shorten = Callable[[Candidates, Tensor], Tensor]  # keep [rows] int64 -> keep
Cut = Callable[[Rows, np.ndarray], Shorten | None]
