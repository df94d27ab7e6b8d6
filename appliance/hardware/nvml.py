"""State of the GPUs from the NVIDIA Management Library. `python -m appliance.hardware.nvml` prints it as JSON.

Runs in a separate process, because calls into a faulty driver may hang. NVML creates no CUDA context and allocates no
device memory. Signatures: nvml.h of CUDA 12.
"""

import ctypes
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
TIMEOUT_S = 0.6
_DEVICE = Path("/dev/nvidiactl")


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class NvmlError(Exception):
    """Raised when an NVML call fails."""


class Nvml:
    """Access to NVML. Raises NvmlError if the library cannot be used."""

    def __init__(self, library: str = LIBRARY) -> None:
        try:
            self._nvml = ctypes.CDLL(library)
        except OSError as error:
            raise NvmlError(f"{library} was not found") from error
        self._nvml.nvmlErrorString.restype = ctypes.c_char_p
        self._call("nvmlInit_v2")

    def devices(self) -> list[dict[str, Any]]:
        count = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        return [self._device(index) for index in range(count.value)]

    def _device(self, index: int) -> dict[str, Any]:
        """Return memory in bytes, temperature in degrees Celsius, and memory errors since the driver was loaded.

        If a value is unavailable, the reason is returned in its place.
        """
        handle = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(handle))
        state: dict[str, Any] = {"index": index}
        name, memory = ctypes.create_string_buffer(96), _Memory()
        degrees, errors = ctypes.c_uint(), ctypes.c_ulonglong()
        try:
            self._call("nvmlDeviceGetName", handle, name, len(name))
            state["name"] = name.value.decode()
            self._call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
            state["memory"] = {"total": memory.total, "used": memory.used}
            self._call("nvmlDeviceGetTemperature", handle, 0, ctypes.byref(degrees))
            state["temperature"] = degrees.value
            self._call("nvmlDeviceGetTotalEccErrors", handle, 1, 0, ctypes.byref(errors))
            state["uncorrected_memory_errors"] = errors.value
        except NvmlError as error:
            state["error"] = str(error)
        return state

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._nvml, name)(*arguments)
        if code:
            raise NvmlError(f"{name}: {(self._nvml.nvmlErrorString(code) or b'unknown error').decode()} ({code})")


def device_state() -> Any:
    """Return the state of all GPUs, or the reason why it is unavailable. Takes at most about TIMEOUT_S."""
    if not _DEVICE.exists():
        return "no NVIDIA driver is loaded"
    command = [sys.executable, "-P", "-m", "appliance.hardware.nvml"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"the NVIDIA driver did not answer within {TIMEOUT_S} s"
    return json.loads(answer.stdout) if answer.returncode == 0 else answer.stderr.strip()[-300:]


def main(library: str = LIBRARY) -> int:
    try:
        print(json.dumps(Nvml(library).devices()))
    except NvmlError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
