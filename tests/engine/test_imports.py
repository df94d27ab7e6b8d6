"""An engine process leaves out unused modules, and loads it if a model needs it."""

import subprocess
import sys

import pytest

from tests.tiers import NIGHTLY

LEAVE_OUT = """
from types import SimpleNamespace
from engine.imports import leave_out_unused, load_meta_operations
leave_out_unused(SimpleNamespace(hardware=SimpleNamespace(kernels={kernels!r}, torch_compile={compiled})))
import torch

def transform():
    return torch.ops.aten._fft_c2c(torch.empty(3, dtype=torch.complex64, device="meta"), [0], 0, True).shape

try:
    print("at once", *transform())
except NotImplementedError:
    print("left out")
load_meta_operations()
load_meta_operations()
print("loaded", *transform())
"""


@pytest.mark.parametrize(
    ("kernels", "compiled", "first"),
    [
        pytest.param("torch", False, "left out", marks=NIGHTLY),
        ("avx2", False, "left out"),
        pytest.param("torch", True, "at once 3", marks=NIGHTLY),
        ("triton", False, "at once 3"),
    ],
)
def test_operations_on_meta_tensors_are_loaded_when_they_are_needed(kernels: str, compiled: bool, first: str) -> None:
    code = LEAVE_OUT.format(kernels=kernels, compiled=compiled)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [first, "loaded 3"]


COLLECTOR = """
import gc
from engine.imports import collector_off
with collector_off():
    print(gc.isenabled())
print(gc.isenabled(), gc.get_freeze_count() > 1000)
try:
    with collector_off():
        raise ImportError
except ImportError:
    print(gc.isenabled())
"""


def test_collector_is_off_only_during_imports() -> None:
    done = subprocess.run([sys.executable, "-c", COLLECTOR], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True", "True", "True"]
