"""State of the GPUs from the NVIDIA Management Library. `python -m appliance.hardware.nvml` prints it as JSON.

Runs in a separate process, because calls into a faulty driver may hang. NVML creates no CUDA context and allocates no
device memory.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

TIMEOUT_S = 0.6
_DEVICE = Path("/dev/nvidiactl")


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


def _devices(nvml: Any) -> list[dict[str, Any]]:
    """Return for each GPU its memory in bytes, temperature in degrees Celsius, and memory errors since the driver was
    loaded. `error` is the reason why a value and those after it are missing."""
    uncorrected = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
    states: list[dict[str, Any]] = [{"index": index} for index in range(nvml.nvmlDeviceGetCount())]
    for state in states:
        handle = nvml.nvmlDeviceGetHandleByIndex(state["index"])
        for key, call, arguments in (
            ("name", nvml.nvmlDeviceGetName, ()),
            ("memory", nvml.nvmlDeviceGetMemoryInfo, ()),
            ("temperature", nvml.nvmlDeviceGetTemperature, (nvml.NVML_TEMPERATURE_GPU,)),
            ("uncorrected_memory_errors", nvml.nvmlDeviceGetTotalEccErrors, uncorrected),
        ):
            try:
                value = call(handle, *arguments)
            except nvml.NVMLError as error:
                state["error"] = f"{key}: {error} ({error.value})"
                break
            state[key] = {"total": value.total, "used": value.used} if key == "memory" else value
    return states


def main() -> int:
    import pynvml  # only in this process: it has 8,000 lines

    try:
        pynvml.nvmlInit()
        print(json.dumps(_devices(pynvml)))
    except pynvml.NVMLError as error:
        print(f"NVML: {error} ({error.value})", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
