"""Query the CUDA driver for its devices and release, and print them as JSON.

`appliance.hardware.machine` runs this module as a program. It uses libcuda through ctypes, so that it needs neither
torch nor nvidia-smi and sees the same devices as the engine. Constants and signatures: cuda.h of CUDA 12.
"""

import ctypes
import json
from typing import Any

_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*


class DriverError(Exception):
    """Raised when a driver call fails."""


class Driver:
    def __init__(self) -> None:
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise DriverError(
                "libcuda.so.1 was not found; run the container with the NVIDIA runtime (--gpus all)"
            ) from error

    def call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(code, ctypes.byref(text))
            raise DriverError(f"{name}: {(text.value or b'unknown error').decode()} ({code})")

    def number(self, name: str, *arguments: Any) -> int:
        value = ctypes.c_int()
        self.call(name, ctypes.byref(value), *arguments)
        return value.value

    def device(self, index: int) -> dict[str, Any]:
        """Return name, compute capability and memory of a device. Free memory excludes this process's CUDA context."""
        device = self.number("cuDeviceGet", index)
        name = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", name, len(name), device)
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        major, minor = (self.number("cuDeviceGetAttribute", attribute, device) for attribute in (_MAJOR, _MINOR))
        self.call("cuDevicePrimaryCtxRelease_v2", device)
        return {"name": name.value.decode(), "memory": total.value, "free": free.value, "major": major, "minor": minor}


def main() -> None:
    gpus: list[dict[str, Any]] = []
    error, version = "", None
    try:
        driver = Driver()
        version = driver.number("cuDriverGetVersion")  # 1000 · major + 10 · minor
        driver.call("cuInit", 0)
        gpus = [driver.device(index) for index in range(driver.number("cuDeviceGetCount"))]
    except DriverError as failure:
        error = str(failure)
    print(json.dumps({"gpus": gpus, "error": error, "version": version}))


if __name__ == "__main__":
    main()
