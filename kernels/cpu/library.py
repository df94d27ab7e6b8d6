"""The compiled kernels: list of the usable variants, and loading of one. Free of torch, so that planning can import it.

Each variant is the same source compiled for another instruction set (setup.py). The preferred variant is the first one
in VARIANTS that is compiled and that this CPU can run.
"""

import ctypes
import os
import platform
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent
CPU_FACTS = Path("/proc/cpuinfo")
ACTIVATIONS = (
    "silu",
    "gelu",
    "gelu_tanh",
    "relu",
    "quick_gelu",
)  # with a compiled body, in the order of ActKind in program.h


class Tiling(NamedTuple):
    """Weight layout of a compiled variant."""

    variant: str
    width: int  # floats of a vector
    word8: int  # inputs of a word of 8-bit weights
    word4: int  # inputs of a word of 4-bit weights
    bf16: bool = False  # matrices that are not quantized are multiplied in bf16 by activations rounded to bf16

    @property
    def matrix(self) -> bool:
        """Return whether the variant has matrix tiles (AMX)."""
        return self.variant == "amx"

    @property
    def exact(self) -> "Tiling":
        """Return the layout of matrices that are exempt from bf16 arithmetic."""
        return self._replace(bf16=False)


@dataclass(frozen=True)
class Variant:
    """One set of instructions that the kernels are compiled for."""

    name: str
    machines: tuple[str, ...]
    needs: frozenset[str]  # required flags of /proc/cpuinfo, on ARM its features
    flags: tuple[str, ...]  # options of the compiler
    cut: tuple[int, int, int]  # the numbers of its Tiling

    @property
    def tiling(self) -> Tiling:
        return Tiling(self.name, *self.cut)


_X86 = ("x86_64", "AMD64")
_ARM = ("aarch64", "arm64")
_AVX512_PARTS = ("f", "bw", "vl", "dq", "vnni")
_AVX512 = (*(f"-mavx512{part}" for part in _AVX512_PARTS), "-mfma", "-mf16c", "-mprefer-vector-width=512")
_AVX512_NEEDS = frozenset(("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"))
_AVX2, _AVX2_NEEDS = ("-mavx2", "-mfma", "-mf16c"), frozenset(("avx2", "fma", "f16c"))
BF16_VARIANTS = ("amx", "avx512bf16")  # variants that can multiply in bf16
_AMX = ("-mamx-tile", "-mamx-bf16", "-mamx-int8")
VARIANTS = (
    Variant("amx", _X86, _AVX512_NEEDS | {"amx_tile", "amx_bf16", "amx_int8"}, (*_AVX512, *_AMX), (16, 4, 4)),
    Variant("avx512bf16", _X86, _AVX512_NEEDS | {"avx512_bf16"}, (*_AVX512, "-mavx512bf16"), (16, 4, 4)),
    Variant("avx512", _X86, _AVX512_NEEDS, _AVX512, (16, 4, 4)),
    Variant("avxvnni", _X86, _AVX2_NEEDS | {"avx_vnni"}, (*_AVX2, "-mavxvnni"), (8, 4, 4)),
    Variant("avx2", _X86, _AVX2_NEEDS, _AVX2, (8, 4, 4)),
    Variant("neon", _ARM, frozenset(("asimddp",)), ("-march=armv8.2-a+dotprod",), (4, 4, 4)),
    Variant("base", (*_X86, *_ARM), frozenset(), (), (4, 1, 1)),
)

# Functions on rows of logits (logits.h) and their arguments: p for an address, n for a 64-bit number. The first two
# arguments are the team and the logits.
SAMPLING = {
    "draw": "ppnpnppp",
    "draw_truncated": "ppnpnpppppppp",
    "logprobs": "ppnnpnpnppppppp",
    "token_mask": "ppnnpnpn",
    "min_tokens": "ppnnpnpnn",
    "divide": "ppnnpnp",
    "logit_bias": "ppnnpnpp",
    "penalties": "ppnnpnpppnpppp",
    "bad_words": "ppnnpnpppnpppn",
}
# Functions of the collectives in shared memory (shm_collective.h): argument types and, after the colon, the type of the
# result.
SHM_COLLECTIVE = {
    "collective_bytes": "nn:n",
    "collective_open": "pnnn:p",
    "collective_close": "p:",
    "collective_abort": "p:",
    "collective_gather": "pppn:n",
}
# Functions that pack and quantize weights (pack_blocks.cpp, pack_words.cpp, quantize.cpp).
PACKING = {
    "pack_blocks": "npnnnnp:",
    "restore_blocks": "npnnp:",
    "pack_words": "npnnnnnnnnnp:",
    "pack_codes": "nnpnnnnnnnnnnp:",
    "pack_columns": "npnnnnnnnnp:",
    "pack_across": "pnnnnnnnnp:",
    "search_scales": "pnnpnnnpp:",
}


class MissingKernels(Exception):
    """The requested compiled kernels do not exist; the message names the usable ones."""


def tiling(name: str, *, bf16: bool = False) -> Tiling | None:
    """Return the weight layout of the variant of this name, which need not run here, or None if there is none. bf16:
    with bf16 arithmetic."""
    return next((one.tiling._replace(bf16=bf16) for one in VARIANTS if one.name == name), None)


def usable() -> tuple[str, ...]:
    """Return the names of the variants that are compiled and that this CPU can run, the fastest first."""
    return _usable_on(FOLDER, CPU_FACTS)


@cache  # packing asks for each weight; reading /proc/cpuinfo and the folder takes 2 ms
def _usable_on(folder: Path, facts: Path) -> tuple[str, ...]:
    return _usable(folder, _cpu_flags(facts))


def best() -> str:
    """Return the fastest usable variant, or torch if there is none."""
    return next(iter(usable()), "torch")


def in_threads(threads: int, count: int, unit: int, part: Callable[[int, int], None]) -> None:
    """Call `part` with the first and the last of `count` items plus 1, in several threads. Parts consist of whole
    units."""
    each = -(-count // (threads * unit)) * unit
    if threads == 1 or each >= count:
        part(0, count)
    else:
        list(_pool(threads).map(part, range(0, count, each), [*range(each, count, each), count]))


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="packing")


os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not survive a fork


def load(name: str) -> ctypes.CDLL:
    """Load the library of a variant and declare its functions. Raise MissingKernels."""
    names = usable()
    if name not in names:
        raise MissingKernels(
            f"compiled kernels {name!r}: usable here are {', '.join(names) or 'none'}; reinstall the package with a "
            f"C++ compiler, or set hardware.kernels to torch"
        )
    return _open(name)


def _usable(folder: Path, flags: Collection[str]) -> tuple[str, ...]:
    found = [one.name for one in VARIANTS if one.needs <= set(flags) and _file(folder, one.name) is not None]
    return tuple(name for name in found if name != "amx" or _open(name).slipway_has_amx())


def runs_here(variant: Variant) -> bool:
    """Return whether this CPU has the instructions of a variant, compiled or not."""
    return variant.needs <= _cpu_flags(CPU_FACTS)


def _file(folder: Path, name: str) -> Path | None:
    return next(iter(sorted(folder.glob(f"_{name}.*so"))), None)


def _cpu_flags(facts: Path) -> frozenset[str]:
    try:
        lines = facts.read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), ":")  # the name on ARM
    return frozenset(flags.split(":", 1)[1].split())


def cpu_name() -> str:
    """Return the CPU's model name, on ARM its machine type and part numbers."""
    try:
        lines = CPU_FACTS.read_text().splitlines()
    except OSError:
        return platform.machine()
    facts = dict(reversed([(key.strip(), value.strip()) for key, _, value in (line.partition(":") for line in lines)]))
    numbers = [facts[key] for key in ("CPU implementer", "CPU part", "CPU variant", "CPU revision") if key in facts]
    return facts.get("model name") or " ".join([platform.machine(), *numbers])


@cache
def _open(name: str) -> ctypes.CDLL:
    file = _file(FOLDER, name)
    assert file is not None, "only variants that are compiled are opened"
    library = ctypes.CDLL(str(file))
    pointer = ctypes.c_void_p
    library.slipway_sizes.argtypes = [ctypes.POINTER(ctypes.c_int64), ctypes.c_int64]
    library.slipway_sizes.restype = ctypes.c_int64
    library.slipway_tiling.argtypes = [ctypes.POINTER(ctypes.c_int64)] * 3
    library.slipway_tiling.restype = None
    library.slipway_start.argtypes = [ctypes.c_int, pointer]
    library.slipway_start.restype = pointer
    library.slipway_stop.argtypes = [pointer]
    library.slipway_stop.restype = None
    library.slipway_run.argtypes = [pointer, pointer, ctypes.c_int64, pointer]
    library.slipway_run.restype = ctypes.c_int64
    for name, arguments in SAMPLING.items():
        function = getattr(library, f"slipway_{name}")
        function.argtypes = [pointer if letter == "p" else ctypes.c_int64 for letter in arguments]
        function.restype = None
    kinds = {"p": pointer, "n": ctypes.c_int64, "": None}
    for name, form in (SHM_COLLECTIVE | PACKING).items():
        arguments, _, given = form.partition(":")
        function = getattr(library, f"slipway_{name}")
        function.argtypes, function.restype = [kinds[letter] for letter in arguments], kinds[given]
    return library
