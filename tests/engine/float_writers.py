"""Tiny checkpoints in floats of 4 and 8 bits with shared scales, written from the definitions of their formats.

Codes are found by search in a table of all numbers of the type. This file uses no engine code.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.engine.quantized_writers import Kind

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _float8(exponents: int, bias: int, largest: float) -> list[float]:
    """All numbers of a float of 8 bits by code; NaN above `largest`."""
    mantissas, found = 7 - exponents, []
    for code in range(256):
        exponent, mantissa = (code >> mantissas) & (2**exponents - 1), code & (2**mantissas - 1)
        size = 2.0 ** (max(exponent, 1) - bias) * ((exponent > 0) + mantissa / 2**mantissas)
        found.append((-size if code >> 7 else size) if size <= largest else math.nan)
    return found


TABLES = {
    "e2m1": torch.tensor([*E2M1, *(-one for one in E2M1)]),
    "e4m3": torch.tensor(_float8(4, 7, 448.0)),
    "e5m2": torch.tensor(_float8(5, 15, 57344.0)),
}
DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
LARGEST = {"e2m1": 6.0, "e4m3": 448.0, "e5m2": 57344.0}


@dataclass(frozen=True)
class Made:
    """The tensors of a matrix, and its values in float32."""

    tensors: dict[str, Tensor]
    values: Tensor

    def restored(self) -> Tensor:
        return self.values


def nearest(values: Tensor, table: Tensor) -> Tensor:
    """The codes of the nearest numbers, uint8."""
    order = table.argsort(stable=True)
    order = order[table[order].isfinite()]
    order = order[table[order].diff(prepend=torch.tensor([-torch.inf])) != 0]  # the first of equal numbers
    above = torch.searchsorted(table[order], values.contiguous()).clamp(max=len(order) - 1)
    codes = torch.stack([order[(above - 1).clamp(min=0)], order[above]]).sort(0).values
    far = (values - table[codes]).abs()
    return torch.where(far[0] <= far[1], codes[0], codes[1]).to(torch.uint8)


def halves(codes: Tensor) -> Tensor:
    """Two codes of 4 bits to a byte, the first in the low half."""
    return codes[:, ::2] | (codes[:, 1::2] << 4)


def spread(scales: Tensor, block: tuple[int, int], shape: tuple[int, ...]) -> Tensor:
    rows, inputs = shape
    return scales[torch.arange(rows) // block[0]][:, torch.arange(inputs) // block[1]]


def largest(weight: Tensor, block: tuple[int, int]) -> Tensor:
    """The largest |w| of each block."""
    rows, inputs = weight.shape
    whole = torch.nn.functional.pad(weight.abs(), (0, -inputs % block[1], 0, -rows % block[0]))
    return whole.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0])).amax((1, 3))


def stored(codes: Tensor, number: str) -> Tensor:
    return halves(codes) if number == "e2m1" else codes.view(DTYPES[number])


def mx(weight: Tensor, number: str, name: str, *, typed: bool = False) -> Made:
    """Powers of two for 32 inputs, as bytes of exponents."""
    exponents = (largest(weight, (1, 32)) / LARGEST[number]).log2().ceil()
    wide = spread(exponents.exp2(), (1, 32), weight.shape)
    codes = nearest(weight / wide, TABLES[number])
    bytes_ = (exponents + 127).to(torch.uint8)
    scales = bytes_.view(torch.float8_e8m0fnu) if typed else bytes_
    return Made({name: stored(codes, number), "weight_scale": scales}, TABLES[number][codes.int()] * wide)


def nv(weight: Tensor, name: str, second: str, *, divides: bool, factor: bool = False) -> Made:
    """Scales in e4m3 for 16 inputs, and one number for the matrix."""
    smooth = torch.linspace(0.5, 2.0, weight.shape[1]) if factor else None
    w = weight if smooth is None else weight / smooth
    whole = w.abs().max() / (6 * 448)
    if divides:
        whole = 1 / whole
    apart = 1 / whole if divides else whole
    scale_codes = nearest(largest(w, (1, 16)) / 6 / apart, TABLES["e4m3"])
    scales = TABLES["e4m3"][scale_codes.int()]
    factors = spread(scales, (1, 16), w.shape)
    factors = factors / whole if divides else factors * whole
    codes = nearest(w / factors, TABLES["e2m1"])
    tensors = {
        name: halves(codes),
        "weight_scale": scale_codes.view(torch.float8_e4m3fn),
        second: whole.reshape(1) if divides else whole,
        "input_global_scale" if divides else "input_scale": torch.tensor([0.01]),
    }
    values = TABLES["e2m1"][codes.int()] * factors
    if smooth is not None:
        tensors["pre_quant_scale"], values = smooth, values * smooth
    return Made(tensors, values)


def blocks(
    weight: Tensor, number: str, block: tuple[int, int], name: str, *, flat: bool = False, powers: bool = False
) -> Made:
    """Float32 scales of blocks, or e8m0."""
    scales = largest(weight, block) / LARGEST[number]
    if powers:
        scales = scales.log2().ceil().exp2()
    wide = spread(scales, block, weight.shape)
    codes = nearest(weight / wide, TABLES[number])
    kept = scales.to(torch.float8_e8m0fnu) if powers else scales
    tensors = {"weight": stored(codes, number), name: kept.flatten() if flat else kept}
    return Made(tensors, TABLES[number][codes.int()] * wide)


def kind(settings: dict[str, Any], make: Callable[[Tensor], Made], bits: int, group: int | None) -> Kind:
    write: Callable[[Any], dict[str, Tensor]] = lambda made: made.tensors  # noqa: E731
    return Kind(settings, make, write, bits, group)  # type: ignore[arg-type]


def compressed(form: str, weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    own = {"type": "float", "symmetric": True, "dynamic": False} | weights
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": own, "input_activations": None}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
    } | more


def modelopt(algorithm: str, **more: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"]} | more


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head"]}
GROUP16 = {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}
GROUP32 = {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
FLOAT_KINDS = {
    "nvfp4": kind(
        compressed("nvfp4-pack-quantized", GROUP16),
        lambda w: nv(w, "weight_packed", "weight_global_scale", divides=True),
        4,
        16,
    ),
    "mxfp4": kind(
        compressed("mxfp4-pack-quantized", {"num_bits": 4, **GROUP32}), lambda w: mx(w, "e2m1", "weight_packed"), 8, 32
    ),
    "mxfp8": kind(
        compressed("mxfp8-quantized", {"num_bits": 8, **GROUP32}), lambda w: mx(w, "e4m3", "weight", typed=True), 8, 32
    ),
    "fp8-groups": kind(
        compressed("float-quantized", {"num_bits": 8, "strategy": "group", "group_size": 64}),
        lambda w: blocks(w, "e4m3", (1, 64), "weight_scale"),
        8,
        64,
    ),
    "modelopt-nvfp4": kind(
        modelopt("NVFP4", group_size=16), lambda w: nv(w, "weight", "weight_scale_2", divides=False), 4, 16
    ),
    "modelopt-nvfp4-awq": kind(
        modelopt("NVFP4_AWQ"), lambda w: nv(w, "weight", "weight_scale_2", divides=False, factor=True), 4, 16
    ),
    "modelopt-mxfp4": kind(modelopt("MXFP4"), lambda w: mx(w, "e2m1", "weight"), 8, 32),
    "modelopt-mxfp8": kind(modelopt("MXFP8"), lambda w: mx(w, "e4m3", "weight"), 8, 32),
    "modelopt-channels": kind(
        modelopt("FP8_PER_CHANNEL_PER_TOKEN"),
        lambda w: blocks(w, "e4m3", (1, w.shape[1]), "weight_scale", flat=True),
        8,
        None,
    ),
    "e5m2": kind(
        {**FP8, "fmt": "e5m2", "weight_block_size": [128, 128]},
        lambda w: blocks(w, "e5m2", (128, 128), "weight_scale_inv"),
        8,
        None,
    ),
    "blocks-64": kind(
        {**FP8, "weight_block_size": [64, 32]}, lambda w: blocks(w, "e4m3", (64, 32), "weight_scale_inv"), 8, None
    ),
    "e8m0-blocks": kind(
        {**FP8, "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
        lambda w: blocks(w, "e4m3", (128, 128), "weight_scale_inv", powers=True),
        8,
        None,
    ),
}
