"""Compare products whose tiles are loaded by pointers with tiles that are loaded by TMA descriptors, without a GPU.

    python -m benchmarks.kernels.descriptors --target sm_90 sm_100

Each variant is compiled ahead of time for a projection from 4,096 to 28,672 and a prompt of 4,096 tokens. A line has
its registers, spilled bytes and shared memory, and counts of instructions of its PTX: products of a warp group (wgmma)
or in tensor memory (tcgen05), asynchronous copies (cp.async), TMA copies (cp.async.bulk) and register exchanges between
specialised warps (setmaxnreg).
"""

import argparse
import re
import sys
from collections.abc import Sequence

import torch

from kernels.jit import Launch, installed, interpreted, recorded
from kernels.linear import matmul
from kernels.report import table
from kernels.tools.aot import TARGETS, Compiled, compile_for
from kernels.tuning import assumed, forced

INSTRUCTIONS = {
    "wgmma": r"wgmma\.mma_async",
    "tcgen05": r"tcgen05\.mma",
    "cp.async": r"cp\.async\.c[ag]",
    "TMA": r"cp\.async\.bulk\.tensor",
    "setmaxnreg": r"setmaxnreg",
}


VARIANTS: tuple[dict[str, object], ...] = (
    {"loads": "pointers", "columns": 256, "warps": 8, "stages": 3},
    {"loads": "pointers", "columns": 256, "warps": 8, "stages": 4},
    {"loads": "descriptors", "columns": 256, "warps": 8, "stages": 3},
    {"loads": "descriptors", "columns": 256, "warps": 8, "stages": 4},
    {"loads": "descriptors", "columns": 128, "warps": 8, "stages": 4},
    {"loads": "specialized", "columns": 128, "warps": 4, "stages": 3},
    {"loads": "specialized", "columns": 256, "warps": 8, "stages": 3},
)
"""Settings of kernels/linear.py, with tiles of 128 rows."""


def launches(device: str, shared: int) -> list[tuple[str, Launch]]:
    """Return the launch of each variant."""
    x = torch.empty((4096, 4096), dtype=torch.bfloat16, device="meta")
    weight = torch.empty((28672, 4096), dtype=torch.bfloat16, device="meta")
    found = []
    with assumed(device, shared):
        for variant in VARIANTS:
            with recorded() as made, forced("matmul", {"rows": 128, **variant}):
                matmul(x, weight)
            found.append((f"{variant['loads']}, 128 × {variant['columns']}, {variant['stages']} stages", made[0]))
    return found


def counted(ptx: str) -> tuple[str, ...]:
    """Return the number of each of the instructions in PTX, "" for none."""
    return tuple(str(len(re.findall(pattern, ptx)) or "") for pattern in INSTRUCTIONS.values())


def compiled(target: str, one: Launch) -> tuple[str, ...]:
    """Return the resources and instructions of a launch, or the compiler's error."""
    texts: list[str] = []
    try:
        [made] = compile_for(TARGETS[target], [one], lambda kernel: texts.append(kernel.asm["ptx"]))
    except Exception as error:  # exceptions of a compiler are results of this variant
        return (f"{type(error).__name__}", *[""] * (2 + len(INSTRUCTIONS)))
    return (*_resources(made), *counted(texts[0]))


def _resources(made: Compiled) -> tuple[str, ...]:
    return f"{made.registers}", f"{made.spilled or ''}", f"{made.shared:,}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels.descriptors", description=__doc__)
    parser.add_argument("--target", nargs="+", choices=("sm_90", "sm_100"), default=["sm_90"], help="architectures")
    options = parser.parse_args(arguments)
    if not installed() or interpreted():
        print("nothing can be compiled: Triton is missing, or TRITON_INTERPRET is set", file=sys.stderr)
        return 2
    rows = [("variant", "target", "registers", "spilled", "shared", *INSTRUCTIONS)]
    for target in options.target:
        for name, one in launches(TARGETS[target].devices[0], TARGETS[target].shared):
            rows.append((name, target, *compiled(target, one)))
    print(table(rows, left=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
