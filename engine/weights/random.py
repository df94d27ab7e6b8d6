"""Random weights by tensor name, to measure the speed of a model shape without its checkpoint."""

import math
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor

from engine.formats.native import CHANNEL_GROUP, Groups
from kernels.ggml_blocks import BlockWeight
from kernels.ggml_layout import layout_of, row_bytes
from kernels.quantisation import Int4Weight, Int8Weight

MIDDLE, SPREAD = 8, 4.6  # zero point of 4 bits, and the standard deviation of 0 to 15
SPREAD_8 = 73.6  # standard deviation of -127 to 127
# Blocks of ggml: places of their float16 scales, and the root mean square of random codes times scales of 1.
HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "MXFP4": (), "INT6": (48,)}
HALVES |= dict.fromkeys(("NVFP4", "MXFP8", "NF4", "FP4"), ())
HALVES |= dict.fromkeys(("Q4_K", "Q5_K", "Q4_1", "Q5_1"), (0, 2))
SIZES = {
    **{"Q2_K": 13.4, "Q3_K": 43.4, "Q4_K": 300.0, "Q5_K": 637.0, "Q6_K": 1364.0, "IQ4_XS": 1245.0, "IQ4_NL": 67.5},
    **{"MXFP4": 2.92, "Q4_1": 9.66, "Q5_0": 9.25, "Q5_1": 18.9, "INT6": 18.5},
    **{"NVFP4": 5.84, "MXFP8": 0.45, "NF4": 0.52, "FP4": 0.47},
}


class RandomWeights:
    """Same interface as `Weights`. A tensor has the same values whenever it is read. Norms and fp8 scales are 1;
    matrices keep activations of order one. On device `meta`, tensors have no data. fp8: names of tensors in e4m3."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
        fp8: Collection[str] = (),
    ) -> None:
        self.read_names: set[str] = set()
        self._shapes, self._dtype, self._device, self._fp8 = shapes, dtype, device, fp8
        self._orders: dict[int, Tensor] = {}

    def read(self, name: str) -> Tensor:
        self.read_names.add(name)
        shape = self._shapes[name]
        if name in self._fp8:
            return self._matrix(name, shape).to(torch.float8_e4m3fn)
        if name.endswith(("_scale", "_scale_inv")):
            return torch.ones(shape, device=self._device)
        if len(shape) == 1:
            fill = 1.0 if name.endswith("weight") else 0.0
            return torch.full(shape, fill, dtype=self._dtype, device=self._device)
        return self._matrix(name, shape)

    def integers(self, path: str, rows: int, inputs: int, native: Groups) -> Int4Weight | Int8Weight:
        """Return a matrix of integers, [rows, inputs]."""
        group = native.group or CHANNEL_GROUP
        shape, scaled = (rows, inputs), (rows, -(-inputs // group))
        order = None
        if native.ordered:
            order = self._orders.setdefault(inputs, torch.arange(inputs, dtype=torch.int32, device=self._device))
        four = native.bits == 4
        scale = 1 / ((SPREAD if four else SPREAD_8) * math.sqrt(inputs))
        scales = torch.full(scaled, scale, dtype=torch.float16 if four else torch.bfloat16, device=self._device)
        low, high, dtype = (0, 16, torch.uint8) if four else (-127, 128, torch.int8)
        if self._device.type == "meta":
            values = torch.empty(shape, dtype=dtype, device=self._device)
        else:
            draw = torch.Generator(self._device).manual_seed(zlib.crc32(path.encode()))
            values = torch.randint(low, high, shape, generator=draw, device=self._device).to(dtype)
        if not four:
            static = torch.full((1,), 0.05, device=self._device) if native.inputs == "static" else None
            return Int8Weight(values, scales, group, order, native.inputs is not None, static)
        zeros = torch.full(scaled, MIDDLE, dtype=torch.uint8, device=self._device) if native.zeros else None
        return Int4Weight(values, scales, zeros, group, order)

    def blocks(self, path: str, rows: int, inputs: int, kind: str) -> BlockWeight:
        """Return a matrix in blocks, [rows, inputs]."""
        size, scale = layout_of(kind).bytes, 1 / (SIZES[kind] * math.sqrt(inputs))
        shape = rows, row_bytes(kind, inputs) // size, size
        factors = torch.full((rows,), scale, device=self._device) if kind == "NVFP4" else None
        if self._device.type == "meta":
            empty = torch.empty(shape, dtype=torch.uint8, device=self._device)
            return BlockWeight(empty.flatten(1), kind, inputs, factors)
        draw = torch.Generator(self._device).manual_seed(zlib.crc32(path.encode()))
        made = torch.randint(0, 256, shape, generator=draw, dtype=torch.uint8, device=self._device)
        if kind == "MXFP8":
            made = (made & 0x80) | (made & 0x7F) % 60  # numbers from -1.375 to 1.375
        if kind in ("MXFP4", "MXFP8"):
            made[:, :, 0] = 127 + round(math.log2(scale))
        if kind == "NVFP4":
            made[:, :, 0] = 0x38  # 1 in e4m3
        if kind in ("NF4", "FP4"):
            made[:, :, :4] = torch.tensor([scale], device=self._device).view(torch.uint8)
        for at in HALVES.get(kind, (0,)):
            made[:, :, at : at + 2] = torch.tensor([scale], dtype=torch.float16, device=self._device).view(torch.uint8)
        return BlockWeight(made.flatten(1), kind, inputs, factors)

    def has(self, name: str) -> bool:
        return name in self._shapes

    def type(self, name: str) -> str:
        return "F8_E4M3" if name in self._fp8 else "F32"

    def file(self, path: str) -> Path:
        return Path("random weights")

    def release(self) -> None:
        """Do nothing: the caller owns the tensors."""

    def _matrix(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if self._device.type == "meta":
            return torch.empty(shape, dtype=self._dtype, device=self._device)
        draw = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        values = torch.empty(shape, dtype=self._dtype, device=self._device)
        return values.normal_(0.0, 1 / math.sqrt(shape[-1]), generator=draw)
