"""Quantization of rows to fp8 in the kernel that produces them, if all consumers multiply by fp8."""

from collections.abc import Sequence

from engine.layers.linear import LinearLayer
from kernels.e4m3 import Rounding


def rounding_of(readers: Sequence[LinearLayer]) -> Rounding | None:
    """Return how the input rows of these matrices can be quantized, or None if some matrix needs them unquantized or
    quantized differently."""
    wanted = [reader.rounding for reader in readers]
    first = wanted[0]
    if first is None or any(one is None or one.group != first.group for one in wanted):
        return None
    # A static scale belongs to one matrix.
    return first if len(wanted) == 1 or all(one is not None and one.static_scale is None for one in wanted) else None
