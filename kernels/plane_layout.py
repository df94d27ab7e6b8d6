"""Layout of blocks of ggml on a GPU (kernels/block_matmul.py). Imports no torch, because plans count its bytes.

A file has the codes and scales of a block side by side; a GPU needs them apart, in rows whose addresses are aligned:

    low     bits of codes, [outputs, bytes]. 4 bits: byte i of 32 has inputs i and i + 32 of 64. 2 bits: byte i of 32
            has inputs i, i + 32, i + 64 and i + 96 of 128. The first one is in the low bits
    high    further bits of codes, [outputs, bytes]: 2 bits as above; 1 bit: byte i of 16 has inputs i, i + 16, … of 128
    scales  [groups, terms, outputs]: of each group of inputs, then its minimum if there are two terms
    units   [units, terms, outputs] float16: factors of the scales and minimums of 256 inputs

Nothing is rounded. A block of Q3_K, Q4_K, Q5_K or IQ4_XS has scales of 6 bits, which take a byte here.
"""

from typing import NamedTuple

UNIT = 256  # inputs that share a factor of their scales
STEP = 128  # inputs of a row of the planes
# Values of the codes plus 128, a byte for each, that of code 0 in the lowest one.
NONLINEAR = 0xF1D9C5B5_A6998D81_766A5D4F_3F2D1801  # IQ4_NL and IQ4_XS: kvalues_iq4nl of ggml
DOUBLED = 0x74787A7C_7D7E7F80_8C888684_83828180  # MXFP4: twice the number of e2m1


class PlaneLayout(NamedTuple):
    """Planes of a type."""

    low: int  # bits in the first plane
    high: int = 0  # bits in the second plane
    middle: int = 0  # code of 0, if there is no table
    table: int = 0  # values of 16 codes; 0: none
    group: int = 32  # inputs that share a scale
    scale_bytes: int = 2
    terms: int = 1  # 2: scale and minimum
    nibbles: bool = False  # a byte has a scale and, in its high bits, a minimum
    power: bool = False  # a scale is a byte e, and its value 2^(e - 128)
    units: int = 0  # factors for 256 inputs: of the scale, and of the minimum if there are two

    @property
    def minima(self) -> bool:
        return self.terms == 2 or self.nibbles


PLANES = {
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
