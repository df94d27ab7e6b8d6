"""Tiers of tests: `make quick`, `make test` and `make test-all`.

A test that runs once for each instruction set of the CPU's kernels runs in `make test` with the portable one and with
the best one. `make test-all` adds those in between, which have the marker `variants`.
"""

import pytest

from kernels.cpu.library import FOLDER as KERNELS
from kernels.cpu.library import usable

ROOT = KERNELS.parents[1]
FOLDERS = (ROOT / "tests" / "engine", ROOT / "tests" / "kernels")
BETWEEN = frozenset(usable()[1:-1])


def is_variant(item: pytest.Item) -> bool:
    """Return whether the test runs with an instruction set that `make test` leaves out: a part of its id names one."""
    callspec = getattr(item, "callspec", None)
    if callspec is None or not BETWEEN.intersection(callspec.id.split("-")):
        return False
    return any(item.path.is_relative_to(folder) for folder in FOLDERS)
