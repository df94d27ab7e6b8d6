"""Device state, from a library made here that answers as NVML does."""

import json
import shutil
import subprocess

import pytest

from appliance.hardware import nvml

SOURCE = """
#include <string.h>
typedef struct { unsigned long long total, free, used; } memory;
const char* nvmlErrorString(int code) { return code == 3 ? "Not Supported" : "Unknown Error"; }
int nvmlInit_v2(void) { return INIT; }
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
def library(tmp_path):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")

    def make(init: int) -> str:
        source, built = tmp_path / "nvml.c", tmp_path / f"nvml{init}.so"
        source.write_text(SOURCE.replace("INIT", str(init)))
        subprocess.run([compiler, "-shared", "-fPIC", "-w", "-o", built, source], check=True)
        return str(built)

    return make


def test_state_of_each_device_is_printed(library, capsys):
    assert nvml.main(library(0)) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert first == {
        "index": 0, "name": "GPU", "memory": {"total": 80 << 30, "used": 1 << 33}, "temperature": 41,
        "uncorrected_memory_errors": 2,
    }  # fmt: skip
    assert second["temperature"] == 41 and second["error"] == "nvmlDeviceGetTotalEccErrors: Not Supported (3)"


def test_failing_or_missing_library_prints_one_line(library, capsys):
    assert nvml.main(library(9)) == 1
    assert "nvmlInit_v2: Unknown Error (9)" in capsys.readouterr().err
    assert nvml.main("/nowhere.so") == 1
    assert "/nowhere.so was not found" in capsys.readouterr().err
