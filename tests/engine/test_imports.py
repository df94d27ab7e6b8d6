"""An engine process leaves out unused modules, and loads it if a model needs it."""

import subprocess
import sys
from types import ModuleType

import pytest

from engine.arguments import engine_config
from engine.imports import META, leave_out_unused
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
        pytest.param("triton", False, "at once 3", marks=NIGHTLY),
    ],
)
def test_operations_on_meta_tensors_are_loaded_when_they_are_needed(kernels: str, compiled: bool, first: str) -> None:
    code = LEAVE_OUT.format(kernels=kernels, compiled=compiled)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [first, "loaded 3"]


@pytest.mark.parametrize(
    ("kernels", "compiled", "left_out"), [("avx2", False, True), ("torch", True, False), ("triton", False, False)]
)
def test_modules_are_left_out_unless_their_kernels_are_used(
    kernels: str, compiled: bool, left_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("triton", META)
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))  # restored afterwards
        del sys.modules[name]
    leave_out_unused(engine_config(model="m", kernels=kernels, torch_compile=compiled, kv_bytes=1, max_context=1))
    assert [name in sys.modules for name in names] == [left_out] * 2


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
