"""Tiers of tests: `make quick`, `make test` and `make test-all`.

`make test` omits two kinds of tests that `make test-all` runs:

variants  a test that runs once for each instruction set of the CPU's kernels. `make test` runs it with the portable one
          and with the best one. tests/kernels compares each kernel of both; in tests/engine, whose tests compute models
          of the same kernels, the portable one runs one of PORTABLE cases of a test, and the others are nightly.
nightly   a test that repeats a property for more architectures, cases, requests or time. The marker names the test of
          `make test` that covers the property; `thinned` and `paired` mark the parameters of one test, and
          `sampled(n)` all but every n-th case of a test. `examples` reduces the examples of Hypothesis.

tests/test_tiers.py checks both.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest

from kernels.cpu.library import FOLDER as KERNELS
from kernels.cpu.library import usable

ROOT = KERNELS.parents[1]
MODELS = ROOT / "tests" / "engine"
FOLDERS = (MODELS, ROOT / "tests" / "kernels")
BETWEEN = frozenset(usable()[1:-1])
LAST = frozenset(usable()[1:][-1:])  # empty if no better one is usable
PORTABLE = 5
FEW = False
"""True if nightly tests are left out. conftest.py sets it before it imports test modules."""
NIGHTLY = pytest.mark.nightly("the same test, with the parameters that are not marked")


def is_variant(item: pytest.Item) -> bool:
    """Return whether the test runs with an instruction set that `make test` leaves out: a part of its id names one."""
    callspec = getattr(item, "callspec", None)
    if callspec is None or not BETWEEN.intersection(callspec.id.split("-")):
        return False
    return any(item.path.is_relative_to(folder) for folder in FOLDERS)


def is_portable(item: pytest.Item) -> bool:
    """Return whether the test computes a model with the portable instruction set, and a better one is usable."""
    callspec = getattr(item, "callspec", None)
    if callspec is None or not LAST.intersection(callspec.id.split("-")):
        return False
    return item.path.is_relative_to(MODELS)


def mark_tiers(items: Iterable[pytest.Item]) -> None:
    """Mark the variants, all but every n-th of the other cases of a test with the marker `sampled(n)`, and all but
    some of its remaining cases with the portable instruction set."""
    cases: Counter[str] = Counter()
    portable: Counter[str] = Counter()
    for item in items:
        test = item.nodeid.partition("[")[0]
        if is_variant(item):
            item.add_marker("variants")
            continue
        if marker := item.get_closest_marker("sampled"):
            cases[test] += 1
            if (cases[test] - 1) % marker.args[0]:
                item.add_marker(NIGHTLY)
                continue
        if is_portable(item) and item.get_closest_marker("nightly") is None:
            portable[test] += 1
            if (portable[test] - 1) % PORTABLE:
                item.add_marker(NIGHTLY)


def examples(most: int) -> int:
    """Return the number of examples of a test with Hypothesis. `make test` has a quarter of them."""
    return -(-most // 4) if FEW else most


def thinned(cases: Iterable[Any], kept: Collection[Any]) -> list[Any]:
    """Return the parameters of a test; `make test` runs only those in `kept`. Raise ValueError if `kept` has an unknown
    case, no case or every case."""
    cases = list(cases)
    if unknown := [one for one in kept if one not in cases]:
        raise ValueError(f"{unknown}: no such cases; the cases are {cases}")
    if not 0 < len(kept) < len(cases):
        raise ValueError(f"{len(kept)} of {len(cases)} cases are kept; thinning needs at least one case on each side")
    return [pytest.param(one, marks=() if one in kept else NIGHTLY) for one in cases]


def paired(cases: Iterable[Any], others: Sequence[Any]) -> list[Any]:
    """Return all pairs of two parameters of a test; `make test` runs each case with one of the others, in turn. Use it
    if a case and another parameter do not interact, for example a family and the kernels that compute it. Raise
    ValueError for a pytest.param: the test would receive it instead of its value."""
    cases = list(cases)
    if marked := [one for one in (*cases, *others) if hasattr(one, "marks")]:
        raise ValueError(f"{marked}: parameters of a pair have no marks")
    return [
        pytest.param(case, other, marks=() if at == number % len(others) else NIGHTLY)
        for number, case in enumerate(cases)
        for at, other in enumerate(others)
    ]
