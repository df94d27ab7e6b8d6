"""Device state, from a library made here that answers as NVML does."""

import json
import os
import shutil
import subprocess
import sys
from ctypes.util import find_library
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

SOURCE = """
#include <string.h>
typedef struct { unsigned long long total, free, used; } memory;
const char* nvmlErrorString(int code) { return code == 3 ? "Not Supported" : "Unknown Error"; }
int nvmlInitWithFlags(unsigned flags) { return INIT; }
int nvmlDeviceGetCount_v2(unsigned* count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
    *device = (void*)(0x7f0000000000ull + index); return 0; }
int nvmlDeviceGetName(void* device, char* name, unsigned length) { strncpy(name, "GPU", length); return 0; }
int nvmlDeviceGetMemoryInfo(void* device, memory* m) { m->total = 80ull << 30; m->used = 1ull << 33; return 0; }
int nvmlDeviceGetTemperature(void* device, int sensor, unsigned* degrees) { *degrees = 41; return 0; }
int nvmlDeviceGetTotalEccErrors(void* device, int kind, int counter, unsigned long long* count) {
    if ((unsigned long long)device & 1) return 3;
    *count = kind == 1 && counter == 0 ? 2 : 99;
    return 0;
}
"""


@pytest.fixture
def state(tmp_path):
    """Return a function that runs the module with a library whose initialisation returns a code."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")

    def run(init: int | None) -> "subprocess.CompletedProcess[str]":
        if init is not None:
            source = tmp_path / "nvml.c"
            source.write_text(SOURCE.replace("INIT", str(init)))
            library = tmp_path / "libnvidia-ml.so.1"
            subprocess.run([compiler, "-shared", "-fPIC", "-w", "-o", library, source], check=True)
        command = [sys.executable, "-m", "appliance.hardware.nvml"]
        environ = os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}
        return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)

    return run


def test_state_of_each_device_is_printed(state):
    done = state(0)
    assert done.returncode == 0 and not done.stderr
    first, second = json.loads(done.stdout)
    assert first == {
        "index": 0, "name": "GPU", "memory": {"total": 80 << 30, "used": 1 << 33}, "temperature": 41,
        "uncorrected_memory_errors": 2,
    }  # fmt: skip
    assert second["temperature"] == 41 and second["error"] == "uncorrected_memory_errors: Not Supported (3)"


def test_failing_library_prints_one_line(state):
    done = state(9)
    assert done.returncode == 1 and done.stderr == "NVML: Driver Not Loaded (9)\n"


def test_missing_library_prints_one_line(state):
    if find_library("nvidia-ml"):
        pytest.skip("the NVIDIA driver is installed")
    done = state(None)
    assert done.returncode == 1 and done.stderr == "NVML: NVML Shared Library Not Found (12)\n"
