"""Remove files that serving does not use from the image's environment: `prune.py SITE_PACKAGES`.

The pinned packages bring headers, test programs, symbol tables and libraries for tracing and compiling models. Slipway
runs models eagerly with its own kernels, so none of that is imported. Builds of torch for GPUs keep everything but
tests and headers, because Triton and torch load parts of the rest by name.

Files that another release of torch lacks are ignored. The result is tested: afterwards the Dockerfile generates tokens
with torch and with the compiled kernels (`docker/verify.py`), and `docker/test_image.sh` serves from it.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

# Only used to build against torch, or to test it.
ANY_BUILD = (
    "torch/include",
    "torch/share",
    "torch/test",
    "torch/bin/*test*",
    "torch/bin/*Test",
    "torch/bin/protoc*",
    "torch/bin/upgrader_models",
    "torch/bin/*.pt*",
    "torch/lib/*.a",
    "torch/lib/libshm_windows",
    "torch/lib/*test.so",
    "torch/lib/libaoti_custom_ops.so",
    "torch/lib/libbackend_with_compiler.so",
    "numpy/**/tests",
    "numpy/_core/include",
    "numpy/_core/lib/*.a",
    "numpy/random/lib/*.a",
    "numpy/_core/_simd*.so",  # for tests of numpy
    "numpy/f2py",
    "pip/**/__pycache__",  # only model.source.pypi runs pip
    "pip/_vendor/distlib/*.exe",
    "supervisor/tests",
    "PIL/_imagingft*.so",  # fonts
    "huggingface_hub/cli",
    "**/*.pyi",  # types, and sources of Cython
    "**/*.pyx",
    "**/*.pxd",
)
# Tracing, exporting, compiling and training models, which the CPU engine never does.
CPU_BUILD = (
    "functorch",
    "numpy/distutils",
    "numpy/random",  # numpy imports it on first use; of torch, only torch.compile uses it
    "torchgen/packaged",
    "torch/_dynamo",
    "torch/_export/db",
    "torch/_export/serde",
    "torch/_inductor",
    "torch/_numpy",
    "torch/_vendor/quack",
    "torch/ao/ns",
    "torch/ao/pruning",
    "torch/ao/quantization/fx",
    "torch/backends/_nnapi",
    "torch/distributed/_shard",
    "torch/distributed/_tools",
    "torch/distributed/checkpoint",
    "torch/distributed/elastic",
    "torch/distributed/flight_recorder",
    "torch/distributed/fsdp",
    "torch/distributed/optim",
    "torch/distributed/pipelining",
    "torch/fx/experimental/migrate_gradual_types",
    "torch/onnx",
    "torch/sparse/_triton_ops*",
    "torch/testing/_internal/common_[!d]*",  # torch imports common_dtype and logging_tensor
    "torch/testing/_internal/[!_cl]*",
    "torch/utils/benchmark",
    "torch/utils/_sympy",
    "torch/utils/hipify",
    "torch/utils/tensorboard",
)
# The first three are for tracing models, setuptools for compiling extensions. Slipway downloads without hf-xet and
# fsspec.
CPU_DISTRIBUTIONS = ("sympy", "mpmath", "networkx", "setuptools", "hf-xet", "fsspec")


# Libraries that PyAV and Pillow bring, with the value by which their functions report an error: encoders, TLS, sound
# cards, processors of videos and screens. FFmpeg and Pillow are linked to them, but Slipway gives them files and only
# decodes, with FFmpeg's own decoders.
UNUSED = {"libx265-*": 0, "libSvtAv1Enc-*": -1, "libx264-*": 0, "libmp3lame-*": 0}
UNUSED |= {"libgnutls-*": -1, "libasound-*": -1, "libvpl-*": -1, "libXau-*": 0}


def is_cpu_build(site: Path) -> bool:
    """Return whether torch was built without support for GPUs, as its own version file says."""
    values = dict(re.findall(r"^(cuda|hip|xpu)\b.*= (.+)$", (site / "torch/version.py").read_text(), re.MULTILINE))
    if "cuda" not in values:
        raise SystemExit(f"{site}/torch/version.py does not say which CUDA it was built for; adapt docker/prune.py")
    return set(values.values()) == {"None"}


def size(paths: Iterable[Path]) -> int:
    """Bytes of files, of folders with all that is in them."""
    return sum(
        file.lstat().st_size
        for path in paths
        for file in (path.rglob("*") if path.is_dir() and not path.is_symlink() else [path])
        if file.is_symlink() or file.is_file()
    )


def remove(paths: Iterable[Path]) -> int:
    """Return the number of bytes freed."""
    freed = 0
    for path in paths:
        freed += size([path])
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    return freed


def uninstall(site: Path, names: Iterable[str]) -> int:
    """Return the number of bytes freed. pip removes exactly the files that these distributions installed."""
    before = size([site])
    command = [sys.executable, "-m", "pip", "--python", site.parents[2] / "bin/python", "uninstall", "--yes", *names]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return before - size([site])


def strip(library: Path) -> int:
    """Drop the symbol table that only debuggers read. Return the number of bytes freed.

    The result replaces the library only if the dynamic loader still maps it: strip breaks the files of a few linkers.
    """
    before = library.stat().st_size
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        small = Path(folder, library.name)
        subprocess.run(["strip", "--strip-unneeded", "-o", small, library], check=True)
        loaded = subprocess.run(["ldd", small], capture_output=True, text=True, check=False)
        if loaded.returncode or small.stat().st_size >= before:
            return 0
        small.chmod(library.stat().st_mode)
        small.replace(library)
    return before - library.stat().st_size


def symbols(library: Path, which: str, dynamic: bool = True) -> dict[str, str]:
    """Return the versions of symbols by name: `--defined-only` or `--undefined-only`. "" is no version."""
    command = ["nm", *(["-D"] if dynamic else []), which, "--format=posix", library]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    found = (line.split()[0].partition("@") for line in lines)
    return {name: version.lstrip("@") for name, _, version in found}


def write_stub(library: Path, functions: dict[str, str], value: int) -> None:
    """Replace a library by functions that return `value`, with the versions that `functions` has by name."""
    source = "".join(f"long {name}(void) {{ return {value}; }}\n" for name in functions)
    versions = [
        f"{version} {{ {' '.join(f'{name};' for name in functions if functions[name] == version)} }};"
        for version in sorted({*functions.values()} - {""})
    ]
    with tempfile.NamedTemporaryFile("w") as script:
        script.write("\n".join(versions) or "{ *; };")
        script.flush()
        command = ["cc", "-shared", "-fPIC", "-nostdlib", f"-Wl,-soname,{library.name}"]
        command += [f"-Wl,--version-script={script.name}", "-x", "c", "-", "-o", str(library)]
        subprocess.run(command, input=source, text=True, check=True)


def replace_unused(folder: Path) -> int:
    """Replace the libraries UNUSED by others with their names, whose functions report an error. Return the number of
    bytes freed."""
    libraries = [path for path in folder.glob("*.so*") if path.is_file()]
    unused = {path: value for pattern, value in UNUSED.items() for path in folder.glob(pattern)}
    undefined: dict[str, str] = {}
    for path in libraries:
        if path not in unused:
            undefined |= symbols(path, "--undefined-only")
    freed = 0
    for path, value in unused.items():
        functions = {name: undefined[name] for name in symbols(path, "--defined-only") if name in undefined}
        before = path.stat().st_size
        write_stub(path, functions, value)
        freed += before - path.stat().st_size
    return freed


def needed(library: Path) -> set[str]:
    """Return the names of the libraries that the dynamic loader loads for this one."""
    lines = subprocess.run(["readelf", "-d", library], check=True, capture_output=True, text=True).stdout
    return set(re.findall(r"\(NEEDED\).*\[(.+)\]", lines))


def remove_orphans(package: Path, folder: Path) -> int:
    """Remove libraries in `folder` that the modules of the package do not load, also through other libraries. Return
    the number of bytes freed."""
    libraries = {path.name: path for path in folder.glob("*.so*") if path.is_file()}
    used: set[str] = set()
    pending = set().union(*map(needed, package.rglob("*.so"))) & libraries.keys()
    while pending:
        used |= pending
        pending = set().union(*(needed(libraries[name]) for name in pending)) & libraries.keys() - used
    return remove(path for name, path in libraries.items() if name not in used)


def main(arguments: list[str]) -> None:
    if len(arguments) != 1 or not (site := Path(arguments[0])).is_dir():
        raise SystemExit("usage: prune.py SITE_PACKAGES (the folder that contains torch)")
    before, freed, cpu = size([site]), {}, is_cpu_build(site)
    if cpu:
        freed[" ".join(CPU_DISTRIBUTIONS)] = uninstall(site, CPU_DISTRIBUTIONS)
    for pattern in (*ANY_BUILD, *(CPU_BUILD if cpu else ())):
        freed[pattern] = remove(sorted(site.glob(pattern)))
    if shutil.which("cc") and shutil.which("nm"):
        for package, folder in ((site / "av", site / "av.libs"), (site / "PIL", site / "pillow.libs")):
            if folder.is_dir():
                freed[f"unused libraries of {package.name}"] = replace_unused(folder) + remove_orphans(package, folder)
    if shutil.which("strip"):
        libraries = [file for file in site.rglob("*.so*") if file.is_file() and not file.is_symlink()]
        freed["symbol tables"] = sum(map(strip, libraries))
    else:
        print("prune: strip is not installed; symbol tables are kept", file=sys.stderr)
    for name, count in sorted(freed.items(), key=lambda item: -item[1]):
        print(f"prune: {count / 1e6:8.1f} MB  {name}")
    print(f"prune: {before / 1e6:.0f} MB became {size([site]) / 1e6:.0f} MB")


if __name__ == "__main__":
    main(sys.argv[1:])
