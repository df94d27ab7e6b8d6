"""Build steps that pyproject.toml cannot express: the compiled CPU kernels and the demo inside the wheel.

`kernels/cpu` is compiled once for each variant (`kernels/cpu/library.py`), which becomes one extension. With a C++
compiler every variant must build, or the installation fails. Without a compiler the package installs as pure Python,
with a warning, and torch serves. `SLIPWAY_BUILD_KERNELS=0` installs without kernels although there is a compiler, and
`native` compiles only the variants that this CPU can run.
"""

import copy
import importlib.util
import os
import platform
import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools._distutils.ccompiler import new_compiler
from setuptools._distutils.sysconfig import customize_compiler
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

FOLDER = Path("kernels/cpu")
SOURCES = ("program.cpp", "linear_blocks.cpp", "pack_blocks.cpp", "pack_words.cpp", "quantize.cpp")
SWITCH = "SLIPWAY_BUILD_KERNELS"
# Files of manifests/ that become the folder appliance/demo of the wheel: `slipway serve` serves them by default.
DEMO = ("demo.yaml", "demo/*.json", "demo/*.safetensors")


def variants(native):
    """Return the variants for this type of machine, or for this CPU if native. Loads library.py by its path, because
    the package is not installed yet."""
    spec = importlib.util.spec_from_file_location("library", FOLDER / "library.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["library"] = module
    spec.loader.exec_module(module)
    return [
        one for one in module.VARIANTS if platform.machine() in one.machines and (not native or module.runs_here(one))
    ]


def compiler():
    """Return the C++ compiler that setuptools would run, or None if it is not installed."""
    found = new_compiler()
    if found.compiler_type != "unix":
        return None
    customize_compiler(found)
    command = (getattr(found, "compiler_so_cxx", None) or found.compiler_cxx)[0]
    if shutil.which(command) is None and os.environ.get("CXX"):
        raise SystemExit(f"CXX={os.environ['CXX']}: the command {command} was not found; correct or unset CXX")
    return shutil.which(command)


def extensions():
    """Return one extension for each variant, or none without a compiler."""
    wanted = os.environ.get(SWITCH, "1")
    if wanted not in ("0", "1", "native"):
        raise SystemExit(
            f"{SWITCH}={wanted}: must be 0 (do not compile the CPU kernels), native (those that this CPU can run) or 1 "
            "(the default: all)"
        )
    if wanted == "0" or compiler() is None:
        reason = f"{SWITCH} is 0" if wanted == "0" else "no C++ compiler was found"
        print(
            f"WARNING: {reason}: Slipway is built WITHOUT its compiled CPU kernels.\n"
            "WARNING: On a CPU torch will serve, several times slower, and int8 and int4 weights will be refused.\n"
            "WARNING: Install a C++ compiler (Debian: apt-get install g++) and install the package again.",
            file=sys.stderr,
        )
        return []
    return [
        Extension(
            f"kernels.cpu._{one.name}",
            sources=[str(FOLDER / name) for name in SOURCES],
            depends=[str(file) for file in sorted(FOLDER.glob("*.h"))],
            extra_compile_args=["-std=c++20", "-O3", "-g0", "-Wno-psabi", "-fno-math-errno", *one.flags],
            language="c++",
        )
        for one in variants(wanted == "native")
    ]


class BuildKernels(build_ext):
    """Compiles extensions at the same time, one on each CPU, and explains what to do if one does not compile."""

    def finalize_options(self):
        super().finalize_options()
        allowed = getattr(os, "sched_getaffinity", None)  # Linux
        self.parallel = self.parallel or (len(allowed(0)) if allowed else os.cpu_count())

    def build_extension(self, ext):
        # Extensions have the same sources and may be built at once, so each has a folder of its own for objects.
        own = copy.copy(self)
        own.build_temp = os.path.join(self.build_temp, ext.name)
        try:
            super(BuildKernels, own).build_extension(ext)
        except Exception as error:
            raise SystemExit(
                f"{ext.name} did not compile with {compiler()}: {error}\nThe CPU kernels need GCC 12 or Clang 16 or "
                f"newer (C++20). Set CXX to such a compiler, or {SWITCH}=0 to install without compiled kernels."
            ) from error


class BuildPython(build_py):
    """Copies the demo manifest and its model into the package. An editable install reads them from the checkout."""

    def run(self):
        super().run()
        if not self.editable_mode:
            for source, target in self._demo().items():
                self.mkpath(str(Path(target).parent))
                self.copy_file(source, target)

    def _demo(self):
        root = Path("manifests")
        files = [file for pattern in DEMO for file in sorted(root.glob(pattern))]
        return {str(file): str(Path(self.build_lib, "appliance", "demo", file.relative_to(root))) for file in files}

    def get_outputs(self, include_bytecode=1):
        return [*super().get_outputs(include_bytecode), *([] if self.editable_mode else self._demo().values())]


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildKernels, "build_py": BuildPython})
