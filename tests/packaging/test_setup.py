"""setup.py: with a C++ compiler every kernel must compile; without one the package is pure Python and says so."""

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from kernels.cpu.library import FOLDER, VARIANTS, Variant, runs_here
from tests.tiers import thinned


def build(sources: Path, target: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-B",
        "setup.py",
        "-q",
        "build_ext",
        "--build-lib",
        str(target),
        "--build-temp",
        str(target),
    ]
    environment = {name: value for name, value in os.environ.items() if name not in ("CXX", "SLIPWAY_BUILD_KERNELS")}
    return subprocess.run(command, cwd=sources, env=environment | environ, capture_output=True, text=True, check=False)


def program(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_an_extension_that_does_not_compile_fails_the_build(sources: Path, tmp_path: Path) -> None:
    broken = program(tmp_path / "c++", "echo 'error: unknown option' >&2; exit 1")
    done = build(sources, tmp_path / "out", CXX=broken)
    assert done.returncode != 0
    assert f"did not compile with {broken}" in done.stderr and "SLIPWAY_BUILD_KERNELS=0" in done.stderr


def test_without_a_compiler_the_package_is_pure_and_warns(sources: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = build(sources, tmp_path / "out", PATH=str(tmp_path / "empty"))
    assert done.returncode == 0, done.stderr
    assert "WARNING: no C++ compiler was found" in done.stderr and "torch will serve" in done.stderr
    assert not list(tmp_path.rglob("*.so"))


def test_kernels_can_be_left_out_on_request(sources: Path, tmp_path: Path) -> None:
    done = build(sources, tmp_path / "out", SLIPWAY_BUILD_KERNELS="0")
    assert done.returncode == 0 and "WARNING: SLIPWAY_BUILD_KERNELS is 0" in done.stderr
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"CXX": "/nowhere/c++"}, "CXX=/nowhere/c++: the command /nowhere/c++ was not found"),
        ({"SLIPWAY_BUILD_KERNELS": "no"}, "SLIPWAY_BUILD_KERNELS=no: must be 0"),
    ],
)
def test_a_wrong_variable_fails_the_build(sources: Path, tmp_path: Path, environ: dict[str, str], message: str) -> None:
    done = build(sources, tmp_path / "out", **environ)
    assert done.returncode != 0 and message in done.stderr


def test_no_extension_is_optional(sources: Path, tmp_path: Path) -> None:
    """The build fails if any extension fails to compile, instead of dropping the extension silently."""
    fails_for_one = program(tmp_path / "c++", 'case "$*" in *_base*) exit 1 ;; esac; for last; do :; done; : >"$last"')
    log = tmp_path / "log"
    wrapper = program(tmp_path / "cxx", f'echo "$@" >>{log}; exec {fails_for_one} "$@"')
    done = build(sources, tmp_path / "out", CXX=wrapper)
    assert done.returncode != 0 and "kernels.cpu." in done.stderr


@pytest.mark.parametrize("native", [True, False])
def test_native_compiles_the_kernels_that_this_cpu_can_run(sources: Path, tmp_path: Path, native: bool) -> None:
    log = tmp_path / "log"
    compiler = program(tmp_path / "c++", f'echo "$*" >>{log}')
    done = build(sources, tmp_path / "out", CXX=compiler, SLIPWAY_BUILD_KERNELS="native" if native else "1")
    assert done.returncode == 0, done.stderr
    compiled = log.read_text()
    for one in VARIANTS:
        wanted = platform.machine() in one.machines and (runs_here(one) or not native)
        assert (f"kernels.cpu._{one.name}/" in compiled) == wanted, one.name


NOT_COMPILED = [one for one in VARIANTS if platform.machine() in one.machines and not runs_here(one)]
LAST = NOT_COMPILED[-1:]  # with the most instructions; `make test-all` checks the others too


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ here")
@pytest.mark.timeout(900)  # a busy machine
@pytest.mark.parametrize(
    "variant", thinned(NOT_COMPILED, LAST) if len(NOT_COMPILED) > 1 else NOT_COMPILED, ids=lambda one: one.name
)
def test_kernels_for_other_cpus_have_no_error(variant: Variant) -> None:
    """`make` does not compile these. The compiler checks them without making code, which takes a tenth of the time."""
    sources = [str(path) for path in sorted(FOLDER.glob("*.cpp"))]
    flags = ["-std=c++20", "-Wno-psabi", f"-I{sysconfig.get_paths()['include']}", *variant.flags]
    done = subprocess.run(["g++", "-fsyntax-only", *flags, *sources], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
