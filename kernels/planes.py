"""Weights in planes: packed from blocks, and restored. kernels/plane_layout.py has the layout."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kernels.block_codes import BlockCodes, block_codes, values_of
from kernels.op import Make
from kernels.plane_layout import PLANES, STEP, high_bytes, low_bytes, num_groups, num_units


class Planes(NamedTuple):
    """Planes of a matrix; of a stack of experts, with the experts along the first axis."""

    low: Tensor  # [outputs, bytes] uint8
    high: Tensor | None  # [outputs, bytes] uint8
    scales: Tensor  # [groups, terms, outputs] uint8, int8, float16 or float32
    units: Tensor | None  # [units, terms, outputs] float16 or float32

    def changed(self, change: Callable[[Tensor], Tensor]) -> "Planes":
        """Return the results of a function for each plane."""
        low, high, scales, units = self
        return Planes(
            change(low),
            None if high is None else change(high),
            change(scales),
            None if units is None else change(units),
        )


def to_planes(blocks: Tensor, kind: str, inputs: int, factors: Tensor | None = None) -> Planes:
    """blocks: [outputs, bytes] uint8, as in a file. The last block may have more numbers than there are inputs.
    factors: of NVFP4, [outputs] float32."""
    layout, found = PLANES[kind], block_codes(blocks, kind, factors)
    codes, groups = found.codes[:, :inputs], num_groups(kind, inputs)
    return Planes(
        _pack(codes, layout.low, 32),
        _pack(codes >> layout.low, layout.high, 16 * layout.high) if layout.high else None,
        found.scales[:, :groups].permute(1, 2, 0).contiguous(),
        None if found.units is None else found.units.permute(1, 2, 0).contiguous(),
    )


def _pack(codes: Tensor, bits: int, side: int) -> Tensor:
    """Pack the low bits of codes. A row of `side` bytes has 8 / bits runs of `side` inputs."""
    fields = 8 // bits
    padded = functional.pad(codes & (1 << bits) - 1, (0, -codes.shape[1] % (fields * side)))
    rows = padded.unflatten(1, (-1, fields, side))
    packed = rows[:, :, 0]
    for at in range(1, fields):
        packed = packed | rows[:, :, at] << at * bits
    return packed.flatten(1).contiguous()


def _unpack(plane: Tensor, bits: int, side: int) -> Tensor:
    rows = plane.unflatten(1, (-1, side))
    return torch.stack([rows >> at & (1 << bits) - 1 for at in range(0, 8, bits)], 2).flatten(1)


def plane_shapes(kind: str, outputs: int, inputs: int) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the planes: low, high, scales, units. A plane that the type lacks has no elements."""
    layout = PLANES[kind]
    return (
        (outputs, low_bytes(kind, inputs)),
        (outputs, high_bytes(kind, inputs)),
        (num_groups(kind, inputs), layout.terms, outputs),
        (num_units(kind, inputs), layout.units, outputs),
    )


def check_planes(planes: Planes, kind: str, outputs: int, inputs: int) -> None:
    """Raise ValueError unless the planes have the shapes of this type. A stack has another axis before these."""
    for name, plane, shape in zip(Planes._fields, planes, plane_shapes(kind, outputs, inputs), strict=True):
        if plane is None and 0 in shape:
            continue
        if plane is None or tuple(plane.shape[-len(shape) :]) != shape:
            given = None if plane is None else list(plane.shape)
            raise ValueError(f"{name} of {given}: {kind} with {outputs} outputs of {inputs} inputs needs {list(shape)}")


def restored(planes: Planes, kind: str, inputs: int) -> Tensor:
    """Return the weight as [outputs, inputs] float32."""
    (low, high, scales, units), layout = planes, PLANES[kind]
    codes = _unpack(low, layout.low, 32)
    if high is not None:
        codes = codes[:, : -(-inputs // STEP) * STEP]
        more = _unpack(high, layout.high, 16 * layout.high)[:, : codes.shape[1]]
        codes = codes | more << layout.low
    whole = num_groups(kind, inputs) * layout.group
    found = BlockCodes(codes[:, :whole], scales.permute(2, 0, 1), None if units is None else units.permute(2, 0, 1))
    return values_of(found, kind)[:, :inputs]


def drawn_planes(make: Make, kind: str, outputs: int, inputs: int, experts: tuple[int, ...] = ()) -> Planes:
    """Draw planes whose products have a size of about 1."""
    layout = PLANES[kind]
    shapes = [(*experts, *shape) for shape in plane_shapes(kind, outputs, inputs)]
    low = make.integers(0, 120 if layout.low == 8 else 256, *shapes[0], dtype=torch.uint8)  # no NaN of e4m3
    high = make.integers(0, 256, *shapes[1], dtype=torch.uint8) if layout.high else None
    size = inputs**-0.5 / (1 << layout.low + layout.high - 1)
    if layout.power:
        least = 112 if layout.low == 8 else 119
        return Planes(low, high, make.integers(least, least + 5, *shapes[2], dtype=torch.uint8), None)
    if layout.e4m3:
        units = make.normal(*shapes[3], dtype=torch.float32).mul_(size / 8)
        return Planes(low, high, make.integers(40, 64, *shapes[2], dtype=torch.uint8), units)
    if layout.scale_bytes == 4:
        return Planes(low, high, make.normal(*shapes[2], dtype=torch.float32).mul_(inputs**-0.5), None)
    if not layout.units:
        scales = make.normal(*shapes[2], dtype=torch.float32).mul_(size / 8 if layout.table else size)
        return Planes(low, high, scales.to(torch.float16), None)
    signed = layout.middle > 0 or layout.table > 0
    least, most, dtype = (-32, 32, torch.int8) if signed else (0, 256 if layout.nibbles else 64, torch.uint8)
    units = make.normal(*shapes[3], dtype=torch.float32).mul_(size / 32 / (8 if layout.table else 1))
    return Planes(low, high, make.integers(least, most, *shapes[2], dtype=dtype), units.to(torch.float16))
