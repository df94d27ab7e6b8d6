"""Layout of packed integers on a GPU (kernels/integer_matmul.py). Imports no torch, because plans count its bytes."""

LARGE_HALF, SMALL_HALF = 64, 32


def half_of(group: int) -> int:
    """Return the bytes of a block for weights in groups of `group` inputs: no group begins within half a block."""
    return SMALL_HALF if group % LARGE_HALF else LARGE_HALF


def packed_bytes(inputs: int, bits: int, group: int) -> int:
    """Return the bytes of an output's integers, which are padded to whole blocks."""
    half = half_of(group)
    return -(-inputs // (half * 8 // bits)) * half
