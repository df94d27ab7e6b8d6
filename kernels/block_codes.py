"""Codes and scales of blocks (kernels/ggml_layout.py), read by torch on any device. Source: ggml-common.h of llama.cpp,
gguf.quants.

    value = scale · code' + minimum,   code' = code - middle, the table's value of the code, or a number in e4m3

with scale = unit · integer where a block of 256 has integers, and minimum = -unit' · integer'.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from kernels.ggml_layout import layout_of
from kernels.plane_layout import FLOAT_TABLE, PLANES, UNIT


@dataclass(frozen=True)
class BlockCodes:
    """Numbers of a matrix whose blocks are complete."""

    codes: Tensor  # [outputs, inputs] uint8
    scales: Tensor  # [outputs, groups, terms] uint8, int8, float16 or float32; terms: scale, and minimum if apart
    units: Tensor | None  # [outputs, units, terms] float16 or float32


def block_codes(blocks: Tensor, kind: str, factors: Tensor | None = None) -> BlockCodes:
    """blocks: [outputs, bytes] uint8. factors: of NVFP4, [outputs] float32."""
    raw = blocks.unflatten(1, (-1, layout_of(kind).bytes))
    codes, scales, units = _READERS[kind](raw)
    if factors is not None:
        count = -(-codes.shape[1] * codes.shape[2] // UNIT)
        units = factors.view(-1, 1, 1).expand(-1, count, 1)
    return BlockCodes(codes.flatten(1), scales.flatten(1, 2), units)


def values_of(found: BlockCodes, kind: str) -> Tensor:
    """Return the values, [outputs, inputs] float32."""
    layout = PLANES[kind]
    scales, minima = _terms(found, kind)
    if layout.table:
        numbers = _table(layout.table, found.codes.device)[found.codes.int()]
    elif layout.low == 8:
        numbers = found.codes.contiguous().view(torch.float8_e4m3fn).float()
    else:
        numbers = found.codes.float() - layout.middle
    wide = numbers.unflatten(1, (-1, layout.group)) * scales.unsqueeze(2)
    return (wide if minima is None else wide + minima.unsqueeze(2)).flatten(1)


@cache
def _table(table: int, device: torch.device) -> Tensor:
    """Return the values of 16 codes. Kept, because a captured step cannot copy them to the device."""
    if table >= FLOAT_TABLE:
        return torch.tensor(struct.unpack("<16f", table.to_bytes(64, "little")), device=device)
    return torch.tensor([float(value) - 128 for value in table.to_bytes(16, "little")], device=device)


def _terms(found: BlockCodes, kind: str) -> tuple[Tensor, Tensor | None]:
    """Return scales and minimums, [outputs, groups] float32."""
    layout, stored = PLANES[kind], found.scales
    if layout.power:
        return power_of_two(stored[:, :, 0]), None
    if layout.nibbles:
        stored = torch.cat((stored & 15, stored >> 4), 2)
    terms = stored.contiguous().view(torch.float8_e4m3fn).float() if layout.e4m3 else stored.float()
    if found.units is not None:
        terms = terms * found.units.float().repeat_interleave(UNIT // layout.group, 1)[:, : terms.shape[1]]
    if not layout.minima:
        return terms[:, :, 0], None
    return terms[:, :, 0], -terms[:, :, 1] if found.units is not None else terms[:, :, 1]


def power_of_two(stored: Tensor) -> Tensor:
    """Return 2^(e - 128) of bytes e as float32; the two smallest are subnormal."""
    e = stored.int()
    bits = torch.where(e < 2, (e + 1) << 21, (e - 1) << 23)
    return bits.to(torch.int32).view(torch.float32)


def _half_float(raw: Tensor, at: int) -> Tensor:
    """[outputs, blocks, bytes] → [outputs, blocks] float16."""
    return raw[:, :, at : at + 2].contiguous().view(torch.float16)[:, :, 0]


def _half_floats(raw: Tensor, *places: int) -> Tensor:
    """[outputs, blocks, bytes] → [outputs, blocks, places] float16."""
    return torch.stack([_half_float(raw, at) for at in places], 2)


def _fields(part: Tensor, bits: int, side: int) -> Tensor:
    """Return the fields of bytes, [outputs, blocks, numbers]. All bytes of `side` give their lowest bits first."""
    rows = part.unflatten(2, (-1, side))
    mask = (1 << bits) - 1
    return torch.stack([rows >> at & mask for at in range(0, 8, bits)], 3).flatten(2)


def _scales_and_minima(raw: Tensor) -> Tensor:
    """Return scales and minimums of Q4_K and Q5_K: 6 bits each, in 12 bytes, [outputs, blocks, 8, 2] uint8."""
    first, second, third = raw.unflatten(2, (3, 4)).unbind(2)
    scales = torch.cat((first & 63, third & 15 | first >> 2 & 48), 2)
    minima = torch.cat((second & 63, third >> 4 | second >> 2 & 48), 2)
    return torch.stack((scales, minima), 3)


Read = tuple[Tensor, Tensor, Tensor | None]  # codes and scales with an axis of blocks, units


def _q2_k(raw: Tensor) -> Read:
    return _fields(raw[:, :, 16:80], 2, 32), raw[:, :, :16].unsqueeze(3), _half_floats(raw, 80, 82)


def _q3_k(raw: Tensor) -> Read:
    codes = _fields(raw[:, :, 32:96], 2, 32) | _fields(raw[:, :, :32], 1, 32) << 2
    scales = _fields(raw[:, :, 96:104], 4, 8) | _fields(raw[:, :, 104:108], 2, 4) << 4
    return codes, (scales.to(torch.int8) - 32).unsqueeze(3), _half_floats(raw, 108)


def _q4_k(raw: Tensor) -> Read:
    return _fields(raw[:, :, 16:], 4, 32), _scales_and_minima(raw[:, :, 4:16]), _half_floats(raw, 0, 2)


def _q5_k(raw: Tensor) -> Read:
    codes = _fields(raw[:, :, 48:], 4, 32) | _fields(raw[:, :, 16:48], 1, 32) << 4
    return codes, _scales_and_minima(raw[:, :, 4:16]), _half_floats(raw, 0, 2)


def _q6_k(raw: Tensor) -> Read:
    codes = _fields(raw[:, :, :128], 4, 64) | _fields(raw[:, :, 128:192], 2, 32) << 4
    return codes, raw[:, :, 192:208].contiguous().view(torch.int8).unsqueeze(3), _half_floats(raw, 208)


def _iq4_xs(raw: Tensor) -> Read:
    high = torch.stack([raw[:, :, 2:4] >> at & 3 for at in range(0, 8, 2)], 3).flatten(2)
    low = torch.stack((raw[:, :, 4:8] & 15, raw[:, :, 4:8] >> 4), 3).flatten(2)
    scales = (low | high << 4).to(torch.int8) - 32
    return _fields(raw[:, :, 8:], 4, 16), scales.unsqueeze(3), _half_floats(raw, 0)


def _iq4_nl(raw: Tensor) -> Read:
    return _fields(raw[:, :, 2:], 4, 16), _half_floats(raw, 0).unsqueeze(2), None


def _mxfp4(raw: Tensor) -> Read:
    return _fields(raw[:, :, 1:], 4, 16), raw[:, :, :1].unsqueeze(3), None


def _q4_1(raw: Tensor) -> Read:
    return _fields(raw[:, :, 4:], 4, 16), _half_floats(raw, 0, 2).unsqueeze(2), None


def _fifth(raw: Tensor) -> Tensor:
    """Return the fifth bits of 32 numbers, which are the bits of a word."""
    return torch.stack([raw >> at & 1 for at in range(8)], 3).flatten(2) << 4


def _q5_0(raw: Tensor) -> Read:
    return _fields(raw[:, :, 6:], 4, 16) | _fifth(raw[:, :, 2:6]), _half_floats(raw, 0).unsqueeze(2), None


def _q5_1(raw: Tensor) -> Read:
    return _fields(raw[:, :, 8:], 4, 16) | _fifth(raw[:, :, 4:8]), _half_floats(raw, 0, 2).unsqueeze(2), None


def _nvfp4(raw: Tensor) -> Read:
    return _fields(raw[:, :, 1:], 4, 1), raw[:, :, :1].unsqueeze(3), None


def _mxfp8(raw: Tensor) -> Read:
    return raw[:, :, 1:], raw[:, :, :1].unsqueeze(3) + 1, None


def _four_bits(raw: Tensor) -> Read:
    return _fields(raw[:, :, 4:], 4, 1), raw[:, :, :4].contiguous().view(torch.float32).unsqueeze(3), None


_READERS: dict[str, Callable[[Tensor], Read]] = {
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_XS": _iq4_xs,
    "IQ4_NL": _iq4_nl,
    "MXFP4": _mxfp4,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "NVFP4": _nvfp4,
    "MXFP8": _mxfp8,
    "NF4": _four_bits,
    "FP4": _four_bits,
}
