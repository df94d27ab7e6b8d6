"""Tests of prepared launches: a kernel is looked up by all that it depends on, and by nothing else."""

from types import SimpleNamespace

import pytest
import torch

from kernels import jit
from kernels.jit import installed, launch, recorded

pytestmark = pytest.mark.skipif(not installed(), reason="Triton is not installed")


class Compiled:
    """A compiled kernel that records its launches."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, launches):
        self.launches = launches

    def run(self, *given):
        self.launches.append(given)


class Kernel:
    """A kernel of Triton: x, a varying size, a stride and two constants. Counts compilations."""

    arg_names, do_not_specialize = ["x", "rows", "stride", "SIZE", "ADD"], ["rows"]

    def __init__(self):
        self.compilations, self.launches = 0, []

    def __getitem__(self, grid):
        def run(*args, **options):
            self.compilations += 1
            return Compiled(self.launches)

        return run


@pytest.fixture
def kernel(monkeypatch):
    driver = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: f"stream of {device}")
    monkeypatch.setattr(jit, "PREPARES", True)
    monkeypatch.setattr(jit.triton.runtime.driver, "_active", driver)
    monkeypatch.setattr(jit, "_prepared", {})
    monkeypatch.setattr(jit, "_varying", {})
    return Kernel()


X = torch.zeros(64)


def test_a_second_launch_passes_grid_stream_arguments_and_constants_in_order(kernel):
    for grid in ((3,), (4, 5)):
        launch(kernel, grid, X, 7, 16, ADD=True, SIZE=8)
    assert kernel.compilations == 1
    ((x, y, z, stream, function, metadata, *hooks, own, rows, stride, size, add),) = kernel.launches
    assert (x, y, z, stream, function, metadata) == (4, 5, 1, "stream of 0", "function", "metadata")
    assert hooks == [None] * 3 and own is X and (rows, stride, size, add) == (7, 16, 8, True)


def test_a_varying_size_needs_no_other_kernel_until_it_takes_64_bits(kernel):
    for rows in (1, 2, 16, 17, 2**31 - 1):
        launch(kernel, (1,), X, rows, 16, SIZE=8, ADD=True)
    assert kernel.compilations == 1 and len(jit._prepared) == 1
    launch(kernel, (1,), X, 2**31, 16, SIZE=8, ADD=True)
    assert kernel.compilations == 2


@pytest.mark.parametrize(
    ("args", "constants", "options"),
    [
        ((X.double(), 7, 16), {}, {}),
        ((X[1:], 7, 16), {}, {}),
        ((X, 7, 1), {}, {}),
        ((None, 7, 16), {}, {}),
        ((X, 7, 16), {"SIZE": 16}, {}),
        ((X, 7, 16), {"ADD": False}, {}),
        ((X, 7, 16), {}, {"warps": 8}),
        ((X, 7, 16), {}, {"stages": 3}),
    ],
    ids=["type", "alignment", "value", "none", "size", "flag", "warps", "stages"],
)
def test_anything_that_a_kernel_depends_on_needs_another_one(kernel, args, constants, options):
    usual = {"SIZE": 8, "ADD": True}
    launch(kernel, (1,), X, 7, 16, **usual)
    launch(kernel, (1,), *args, **options, **(usual | constants))
    assert kernel.compilations == 2 and not kernel.launches


def test_another_kernel_with_the_same_arguments_is_not_confused(kernel):
    other = Kernel()
    for one in (kernel, other):
        launch(one, (1,), X, 7, 16, SIZE=8, ADD=True)
    assert (kernel.compilations, other.compilations) == (1, 1)


def test_recorded_and_empty_launches_do_not_run(kernel):
    launch(kernel, (0,), X, 7, 16, SIZE=8, ADD=True)
    with recorded() as launches:
        launch(kernel, (1,), X, 7, 16, SIZE=8, ADD=True)
    assert len(launches) == 1 and kernel.compilations == 0
