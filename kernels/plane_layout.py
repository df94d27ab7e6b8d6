"""Layout of blocks of ggml, and of floats, on a GPU (kernels/block_matmul.py). Plans count its bytes: without torch.

A file has the codes and scales of a block side by side; a GPU needs them apart, in rows whose addresses are aligned:

    low     bits of codes, [outputs, bytes]. 4 bits: byte i of 32 has inputs i and i + 32 of 64. 2 bits: byte i of 32
            has inputs i, i + 32, i + 64 and i + 96 of 128. The first one is in the low bits. 8 bits: a byte of e4m3
    high    further bits of codes, [outputs, bytes]: 2 bits as above; 1 bit: byte i of 16 has inputs i, i + 16, … of 128
    scales  [groups, terms, outputs]: of each group of inputs, then its minimum if there are two terms
    units   [units, terms, outputs] float16: factors of the scales and minimums of 256 inputs; of NVFP4, the factor of
            the output in float32, for every 256 inputs

Nothing is rounded. A block of Q3_K, Q4_K, Q5_K or IQ4_XS has scales of 6 bits, which take a byte here.
"""

import struct
from typing import NamedTuple

UNIT = 256  # inputs that share a factor of their scales
STEP = 128  # inputs of a row of the planes
# Values of the codes plus 128, a byte for each, that of code 0 in the lowest one.
NONLINEAR = 0xF1D9C5B5_A6998D81_766A5D4F_3F2D1801  # IQ4_NL and IQ4_XS: kvalues_iq4nl of ggml
DOUBLED = 0x74787A7C_7D7E7F80_8C888684_83828180  # MXFP4: twice the number of e2m1


# QLoRA (arXiv:2305.14314), appendix E; bitsandbytes' table of FP4 (csrc/kernels.cu, dFP4_LUT).
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_FP4 = (0.0, 0.005208333333, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25)
FP4 = (*_FP4, *(-one for one in _FP4))
FLOAT_TABLE = 1 << 128  # a table of at least this number has float32 numbers, not bytes


def _bits(numbers: tuple[float, ...]) -> int:
    """Return the bits of float32 numbers, those of code 0 in the lowest ones."""
    return int.from_bytes(struct.pack(f"<{len(numbers)}f", *numbers), "little")


class PlaneLayout(NamedTuple):
    """Planes of a type."""

    low: int  # bits in the first plane
    high: int = 0  # bits in the second plane
    middle: int = 0  # code of 0, if there is no table
    table: int = 0  # values of 16 codes, plus 128 in a byte, or from FLOAT_TABLE on in float32; 0: none
    group: int = 32  # inputs that share a scale
    scale_bytes: int = 2
    terms: int = 1  # 2: scale and minimum
    nibbles: bool = False  # a byte has a scale and, in its high bits, a minimum
    power: bool = False  # a scale is a byte e, and its value 2^(e - 128)
    e4m3: bool = False  # a scale is a byte in e4m3
    units: int = 0  # factors for 256 inputs: of the scale, and of the minimum if there are two
    unit_bytes: int = 2

    @property
    def minima(self) -> bool:
        return self.terms == 2 or self.nibbles


GGML_PLANES = {
    "Q2_K": PlaneLayout(2, group=16, scale_bytes=1, nibbles=True, units=2),
    "Q3_K": PlaneLayout(2, 1, 4, group=16, scale_bytes=1, units=1),
    "Q4_K": PlaneLayout(4, scale_bytes=1, terms=2, units=2),
    "Q5_K": PlaneLayout(4, 1, scale_bytes=1, terms=2, units=2),
    "Q6_K": PlaneLayout(4, 2, 32, group=16, scale_bytes=1, units=1),
    "IQ4_XS": PlaneLayout(4, table=NONLINEAR, scale_bytes=1, units=1),
    "IQ4_NL": PlaneLayout(4, table=NONLINEAR),
    "MXFP4": PlaneLayout(4, table=DOUBLED, scale_bytes=1, power=True),
    "Q4_1": PlaneLayout(4, terms=2),
    "Q5_0": PlaneLayout(4, 1, 16),
    "Q5_1": PlaneLayout(4, 1, terms=2),
}
FLOAT_PLANES = {
    "NVFP4": PlaneLayout(4, table=DOUBLED, group=16, scale_bytes=1, e4m3=True, units=1, unit_bytes=4),
    "MXFP8": PlaneLayout(8, scale_bytes=1, power=True),
    "NF4": PlaneLayout(4, table=_bits(NF4), group=64, scale_bytes=4),
    "FP4": PlaneLayout(4, table=_bits(FP4), group=64, scale_bytes=4),
}
PLANES = GGML_PLANES | FLOAT_PLANES


def low_bytes(kind: str, inputs: int) -> int:
    """Return the bytes of an output in the first plane."""
    return -(-inputs // (256 // PLANES[kind].low)) * 32


def high_bytes(kind: str, inputs: int) -> int:
    """Return the bytes of an output in the second plane, 0 if there is none."""
    return -(-inputs // STEP) * 16 * PLANES[kind].high


def num_groups(kind: str, inputs: int) -> int:
    return -(-inputs // PLANES[kind].group)


def num_units(kind: str, inputs: int) -> int:
    """Return the number of factors of an output for each term, 0 if the scales have none."""
    return -(-inputs // UNIT) if PLANES[kind].units else 0
