"""Compile ahead of time the modules that Triton builds with a C compiler before a first launch on an NVIDIA GPU.

There is one module that loads kernels and, up to Triton 3.6, one module for each signature of a kernel's arguments.
Both are stored in Triton's cache and are linked with libcuda.so.1. On a machine without a driver, a stub library
replaces libcuda.so.1: it has all of its functions, which do nothing. Modules that are linked with the stub find the
real library by its name when they are loaded on a GPU.

The cache keys of these modules contain two values that may differ between processes. Triton 3.9 (but not 3.6) includes
the folder of libcuda.so.1: a process finds the modules only if its TRITON_LIBCUDA_PATH names the same folder as here.
Both versions include platform.architecture(), which runs the program `file` if it is installed: each module is
therefore stored twice.
"""

import ctypes
import platform
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from kernels.jit import triton

NAME = "libcuda.so.1"
LINKAGES = ("ELF", "")  # values that platform.architecture() returns with the program `file` and without it


def functions() -> list[str]:
    """Return the driver functions in the sources of Triton's modules by their linker names: cuda.h renames some."""
    folder = Path(triton.__file__).parent / "backends/nvidia"
    text = (folder / "driver.c").read_text() + (folder / "driver.py").read_text()
    renamed = dict(
        re.findall(r"^#define\s+(cu[A-Z]\w*)\s+(cu[A-Z]\w*)\s*$", (folder / "include/cuda.h").read_text(), re.M)
    )
    called = {name for name in re.findall(r"\b(cu[A-Z]\w*)\b", text) if not name.endswith(("_t", "Handle"))}
    return sorted(called | {renamed[name] for name in called if name in renamed})


def build_stub(folder: Path, body: str = "") -> Path:
    """Build the stub of libcuda.so.1 in this folder. body: C text of functions that do more than return 0. Raises
    CalledProcessError, or FileNotFoundError without a C compiler."""
    folder.mkdir(parents=True, exist_ok=True)
    given = set(re.findall(r"\b(cu[A-Z]\w*)\s*\(", body))
    source = body + "".join(f"int {name}(void) {{ return 0; }}\n" for name in functions() if name not in given)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        file, made = Path(work, "libcuda.c"), Path(work, NAME)
        file.write_text(source)
        compiler = shutil.which("gcc") or shutil.which("clang") or "cc"
        subprocess.run([compiler, "-shared", "-fPIC", f"-Wl,-soname,{NAME}", "-o", str(made), str(file)], check=True)
        return made.rename(folder / NAME)  # atomic, because several processes may do this


class Launchers:
    """Fill the cache with these modules for compiled kernels. They are linked with the library in `folder`, which is
    built if it is missing. Use a separate process that has loaded no other libcuda.so.1."""

    def __init__(self, folder: Path) -> None:
        library = folder / NAME
        if not library.exists():
            build_stub(folder)
        triton.knobs.nvidia.libcuda_path = str(folder)
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)  # importing a module requires its functions
        from triton.backends.nvidia import driver

        self._launcher = driver.CudaLauncher
        for linkage in LINKAGES:
            _use_linkage(linkage)
            self._utils = driver.CudaUtils()

    def add(self, kernel: Any) -> None:
        """kernel: the object that Triton compiled while a driver of kernels.tools.aot was active."""
        triton.runtime.driver.active.utils = self._utils
        for linkage in LINKAGES:
            _use_linkage(linkage)
            self._launcher(kernel.src, kernel.metadata)


def _use_linkage(linkage: str) -> None:
    key = ",".join([platform.machine(), platform.system(), platform.architecture()[0], linkage])
    triton.runtime.build.platform_key = lambda: key
