"""Read bandwidth of the machine's memory, as a limit for decoding one row: every step reads all weights once.

    python -m benchmarks.bandwidth [--threads 2] [--mebibytes 1024]

Each thread sums its own part of one buffer in large pages (kernels/cpu/memory.py). Three loops take turns: one compiled
with `cc -O3 -march=native` that has sums in eight registers, the same prefetching 4 KiB ahead, and torch.sum, which is
alone where there is no compiler. The largest rate of all rounds is the limit, because anything else on the machine only
lowers it.
"""

import argparse
import ctypes
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kernels.cpu.memory import region

SOURCE = """
#include <stdint.h>
#ifdef __AVX512F__
enum { WIDTH = 64 };
#else
enum { WIDTH = 32 };  // wider vectors than registers go through the stack, at 68 % of the speed on Zen 3
#endif
enum { STEP = 8 };
typedef int64_t lanes __attribute__((vector_size(WIDTH), aligned(WIDTH)));
#define READ(NAME, AHEAD)                                                         \\
    int64_t NAME(const lanes* from, int64_t bytes) {                              \\
        lanes sums[STEP] = {}, all = {};                                          \\
        for (int64_t i = 0; i < bytes / WIDTH; i += STEP)                         \\
            for (int s = 0; s < STEP; s++) {                                      \\
                if (AHEAD && s % (64 / WIDTH) == 0)                               \\
                    __builtin_prefetch((const char*)(from + i + s) + AHEAD);      \\
                sums[s] += from[i + s];                                           \\
            }                                                                     \\
        for (int s = 0; s < STEP; s++) all += sums[s];                            \\
        int64_t total = 0;                                                        \\
        for (int i = 0; i < WIDTH / 8; i++) total += all[i];                      \\
        return total;                                                             \\
    }
READ(plain, 0)
READ(ahead, 4096)
"""
TURN = 8 * 64  # bytes of one turn of the loop with the widest vectors
MIB = 1 << 20
LOOPS = ("compiled", "compiled, prefetching", "torch.sum")
Reader = Callable[[int, int], object]  # address and bytes


@dataclass(frozen=True)
class Bandwidth:
    """Measured read bandwidth."""

    bytes_per_s: float
    """The largest rate of all rounds."""
    rounds: tuple[float, ...]
    """Bytes per second of each round."""
    how: str
    """The loop that read, one of LOOPS."""
    threads: int
    bytes: int
    """Size of the buffer."""


def measure(threads: int, size: int = 1024 * MIB, rounds: int = 6) -> Bandwidth:
    """Read `size` bytes with so many threads; rounds alternate between the loops."""
    each = size // threads // TURN * TURN
    buffer = region(each * threads)
    buffer.fill_(1)  # pages that were never written are one page of zeros
    parts = [buffer.data_ptr() + each * number for number in range(threads)]
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(threads) as pool:
        readers = compiled_loops(Path(folder)) | {LOOPS[2]: _torch_reader(buffer)}
        for _ in range(rounds):
            for how, read in readers.items():
                start = time.perf_counter()
                list(pool.map(read, parts, [each] * threads))
                found.setdefault(how, []).append(each * threads / (time.perf_counter() - start))
    how = max(found, key=lambda name: max(found[name]))
    return Bandwidth(max(found[how]), tuple(found[how]), how, threads, each * threads)


def faster(one: Bandwidth, other: Bandwidth) -> Bandwidth:
    """Return the one with the larger rate."""
    return max(one, other, key=lambda found: found.bytes_per_s)


def compiled_loops(folder: Path) -> dict[str, Reader]:
    """The compiled loops by name; none without a compiler. ctypes releases the GIL while they run."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        return {}
    (folder / "read.c").write_text(SOURCE)
    command = [compiler, "-O3", "-march=native", "-w", "-shared", "-fPIC", "read.c", "-o", "read.so"]
    subprocess.run(command, cwd=folder, check=True)
    library = ctypes.CDLL(str(folder / "read.so"))
    return {LOOPS[0]: _reader(library.plain), LOOPS[1]: _reader(library.ahead)}


def _reader(function: Any) -> Reader:
    function.restype = ctypes.c_int64
    return lambda address, size: function(ctypes.c_void_p(address), ctypes.c_int64(size))


def _torch_reader(buffer: torch.Tensor) -> Reader:
    first, words = buffer.data_ptr(), buffer.view(torch.int64)

    def read(address: int, size: int) -> object:
        torch.set_num_threads(1)  # of the thread that calls it: the parts are read side by side already
        return words[(address - first) // 8 :][: size // 8].sum()

    return read


def line(found: Bandwidth) -> str:
    low, high = min(found.rounds) / 1e9, max(found.rounds) / 1e9
    return (
        f"memory: {found.bytes_per_s / 1e9:.1f} GB/s read by {found.threads} threads [{low:.1f} – {high:.1f}], "
        f"{found.bytes / MIB:.0f} MiB in large pages, {found.how}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--mebibytes", type=int, default=1024, help="size of the buffer; use several times the last-level cache"
    )
    options = parser.parse_args()
    print(line(measure(options.threads, options.mebibytes * MIB)))


if __name__ == "__main__":
    main()
