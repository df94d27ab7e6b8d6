"""The compiled kernels (kernels/cpu): one library per set of instructions, all from one source.

Each is optional: without a C++ compiler the package installs all the same, `slipway plan` says so, and torch serves.
"""

import importlib.util
import platform
import sys
from pathlib import Path

from setuptools import Extension, setup

FOLDER = Path("kernels/cpu")


def variants():
    """kernels/cpu/library.py names them; it is loaded by its path, as nothing is installed yet."""
    spec = importlib.util.spec_from_file_location("library", FOLDER / "library.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["library"] = module
    spec.loader.exec_module(module)
    return [one for one in module.VARIANTS if platform.machine() in one.machines]


setup(
    ext_modules=[
        Extension(
            f"kernels.cpu._{one.name}",
            sources=[str(FOLDER / "program.cpp")],
            depends=[str(file) for file in sorted(FOLDER.glob("*.h"))],
            extra_compile_args=["-std=c++20", "-O3", "-g0", "-Wno-psabi", "-fno-math-errno", *one.flags],
            language="c++",
            optional=True,
        )
        for one in variants()
    ]
)
