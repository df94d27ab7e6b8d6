"""A process that believes in its GPU: real launches through Triton's own driver, on a libcuda.so.1 that does nothing.

python tests/kernels/pretend_gpu.py sm_90 all   launches all operations at their bench cases on memory of the host, and
                                               prints {launches, compiled} as JSON
python tests/kernels/pretend_gpu.py sm_90 few   launches the operations of `few` in tests/kernels/representatives.py

The library that does nothing is built from BODY. LD_LIBRARY_PATH names its folder.
"""

import json
import sys
from collections.abc import Callable

import torch

from kernels import jit, tuning
from kernels.op import Case, Make, Op
from kernels.tools.aot import TARGETS, Target
from tests.kernels.representatives import bench_cases, few_cases

# Driver calls that a launch makes first. Attribute 0 of a function is the maximum number of threads per block.
BODY = """
int cuCtxGetCurrent(void **context) { *context = (void *)1; return 0; }
int cuFuncGetAttribute(int *value, int attribute, void *function) { *value = attribute == 0 ? 1024 : 0; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = 227 << 10; return 0; }
int cuPointerGetAttribute(void *data, int attribute, unsigned long long pointer) {
    *(unsigned long long *)data = pointer; return 0;
}
int cuModuleLoadData(void **module, const void *image) { *module = (void *)1; return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) { *function = (void *)1; return 0; }
static int launched = 0;
int cuLaunchKernelEx(const void *config, void *function, void **params, void **extra) { launched++; return 0; }
int cuLaunchedKernels(void) { return launched; }
"""


class Unwritten(Make):
    """Make float tensors in uninitialized host memory, because bench cases need gigabytes of them."""

    def normal(self, *shape, dtype=None, scale=1.0):
        return torch.empty(shape, dtype=dtype or self.dtype)


def assume_multiprocessors() -> None:
    """Let launches on memory of the host count programs as on the meta device, for which kernels are compiled ahead."""
    found = jit.resident_programs
    for module in [one for one in sys.modules.values() if getattr(one, "resident_programs", None) is found]:
        module.resident_programs = lambda device, each=4: found(torch.device("meta"), each)


def launch(name: str, chosen: Callable[[Target], list[tuple[Op, Case]]]) -> dict[str, int]:
    import ctypes

    import triton
    from triton.backends.nvidia.driver import CudaDriver, CudaLauncher, CudaUtils

    target = TARGETS[name]
    driver = CudaDriver.__new__(CudaDriver)
    driver.utils, driver.launcher_cls = CudaUtils(), CudaLauncher
    driver.get_current_device, driver.get_current_stream = lambda: 0, lambda device: 0
    driver.get_device_capability = lambda device: divmod(target.arch, 10)
    triton.runtime.driver.set_active(driver)
    compiled = []
    triton.knobs.compilation.listener = lambda **seen: compiled.append(seen["cache_hit"])
    assume_multiprocessors()
    with tuning.assumed(target.devices[0], target.shared, tensor_memory=target.columns > 0):
        for op, case in chosen(target):
            op(*op.inputs(Unwritten(torch.device("cpu"), torch.bfloat16), **case.sizes))
    return {"launches": ctypes.CDLL("libcuda.so.1").cuLaunchedKernels(), "compiled": compiled.count(False)}


if __name__ == "__main__":
    print(json.dumps(launch(sys.argv[1], {"all": bench_cases, "few": few_cases}[sys.argv[2]])))
