"""GPUs of a library made here that answers as the CUDA driver does, with the devices of CUDA_VISIBLE_DEVICES."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from appliance.hardware.cuda_build import Build
from appliance.hardware.machine import parse_gpus

ROOT = Path(__file__).resolve().parents[3]
CUDA13 = Build("2.13.0+cu130", "13.0")
SOURCE = """
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static int seen[4], count, held;
int cuInit(unsigned flags) {
    const char* given = getenv("CUDA_VISIBLE_DEVICES");
    char text[64] = "0,1,2,3";
    if (given) strncpy(text, given, 63);
    for (char* part = strtok(text, ","); part && count < 4; part = strtok(NULL, ",")) seen[count++] = atoi(part);
    return count ? 0 : 100;
}
int cuGetErrorString(int code, const char** text) { *text = "no CUDA-capable device is detected"; return 0; }
int cuDriverGetVersion(int* version) { *version = 13000; return 0; }
int cuDeviceGetCount(int* found) { *found = count; return 0; }
int cuDeviceGet(int* device, int index) { *device = seen[index]; return 0; }
int cuDeviceGetName(char* name, int length, int device) { snprintf(name, length, "GPU %d", device); return 0; }
int cuDevicePrimaryCtxRetain(void** context, int device) { held = device; *context = &held; return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { return 0; }
int cuCtxSetCurrent(void* context) { return 0; }
int cuMemGetInfo_v2(size_t* left, size_t* total) { *total = 80ull << 30; *left = *total - held; return 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) { *value = attribute == 75 ? 9 : 0; return 0; }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "cuda.c").write_text(SOURCE)
    command = [compiler, "-shared", "-fPIC", "-w", "-o", folder / "libcuda.so.1", folder / "cuda.c"]
    subprocess.run(command, check=True)
    return folder


@pytest.mark.parametrize(("visible", "found"), [(None, [0, 1, 2, 3]), ("2", [2]), ("3,1", [3, 1]), ("", [])])
def test_sm_34_only_the_gpus_that_the_platform_leaves_visible_are_used(library, visible, found):
    """An instance of SageMaker may run several containers, each with some of its GPUs."""
    environ = {**os.environ, "LD_LIBRARY_PATH": str(library)} | ({} if visible is None else {VARIABLE: visible})
    command = [sys.executable, "-P", "-m", "appliance.hardware.cuda_driver"]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=True)
    gpus, reason = parse_gpus(done.stdout, CUDA13)
    assert [(gpu.name, gpu.memory - gpu.free) for gpu in gpus] == [(f"GPU {number}", number) for number in found]
    assert bool(reason) == (not found) and (found or "no CUDA-capable device is detected (100)" in reason)


VARIABLE = "CUDA_VISIBLE_DEVICES"
