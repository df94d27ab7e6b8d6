"""Blocks of ggml, and of INT6, that compiled kernels multiply by in their own format; and blocks that only kernels of a
GPU do (kernels/plane_layout.py). Imports no torch, because plans count their bytes. A block has `inputs` numbers of one
output in `bytes` bytes. Source: ggml-common.h of llama.cpp.

INT6 is Slipway's own format for matrices that are quantized at load: 64 numbers, scale · (code - 32). Bytes of a block:
32 with the low 4 bits of codes i (low half) and 32 + i (high half), 16 with the high 2 bits of codes i, 16 + i, 32 + i
and 48 + i, and a float16 scale.

Bytes of a block that only a GPU multiplies by; the first of two codes in a byte is in the low half:

NVFP4     a scale in e4m3, 8 with codes of e2m1. Beside the blocks, each output has a factor
MXFP8     a scale e: 2^(e - 127), 32 in e4m3
NF4, FP4  a scale in float32, 32 with codes of bitsandbytes
"""

from typing import NamedTuple


class BlockLayout(NamedTuple):
    """Size of a block."""

    inputs: int
    bytes: int
    bits: int  # of a code

    @property
    def activation_block(self) -> int:
        """Number of inputs that share a scale of the activations."""
        return 64 if self.inputs > 32 else 32

    @property
    def outlier_ratio(self) -> float:
        """How many times larger than the next activation of its block an outlier is (`ratio_of` in
        kernels/cpu/linear_blocks.cpp)."""
        return 1.5 if self.bits > 4 else 2.5


# In the order of Form in kernels/cpu/program.h.
LAYOUTS = {
    "Q2_K": BlockLayout(256, 84, 2),
    "Q3_K": BlockLayout(256, 110, 3),
    "Q4_K": BlockLayout(256, 144, 4),
    "Q5_K": BlockLayout(256, 176, 5),
    "Q6_K": BlockLayout(256, 210, 6),
    "IQ4_XS": BlockLayout(256, 136, 4),
    "IQ4_NL": BlockLayout(32, 18, 4),
    "MXFP4": BlockLayout(32, 17, 4),
    "Q4_1": BlockLayout(32, 20, 4),
    "Q5_0": BlockLayout(32, 22, 5),
    "Q5_1": BlockLayout(32, 24, 5),
    "INT6": BlockLayout(64, 50, 6),
}


GPU_LAYOUTS = {
    "NVFP4": BlockLayout(16, 9, 4),
    "MXFP8": BlockLayout(32, 33, 8),
    "NF4": BlockLayout(64, 36, 4),
    "FP4": BlockLayout(64, 36, 4),
}


def layout_of(kind: str) -> BlockLayout:
    return LAYOUTS[kind] if kind in LAYOUTS else GPU_LAYOUTS[kind]


def row_bytes(kind: str, inputs: int) -> int:
    """Return the bytes of the blocks of one output. The last block may be incomplete."""
    layout = layout_of(kind)
    return -(-inputs // layout.inputs) * layout.bytes
