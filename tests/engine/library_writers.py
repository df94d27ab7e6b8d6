"""Tiny checkpoints of hqq, torchao, Quark and FBGEMM, written from the definitions of their formats. No engine code."""

from typing import Any

import torch
from torch import Tensor

from tests.engine.float_writers import Made, blocks, kind, mx
from tests.engine.quantized_writers import Kind, whole

PARTS = {8: (0,), 4: (4, 0), 2: (6, 4, 2, 0), 1: tuple(range(7, -1, -1)), 3: tuple(range(27, -1, -3))}


def hqq(weight: Tensor, bits: int, group: int, axis: int) -> Made:
    """Groups of consecutive numbers, with zero points between whole numbers."""
    table = weight.reshape(-1, group) if axis == 1 else weight.reshape(group, -1)
    low, high = table.amin(axis, keepdim=True), table.amax(axis, keepdim=True)
    scale = ((high - low) / (2**bits - 1)).half()
    zero = (-low / scale.float()).half()
    q = (table / scale.float() + zero.float()).round().clamp(0, 2**bits - 1)
    places = PARTS[bits]
    numbers = torch.cat((q, torch.zeros(-len(q) % len(places), q.shape[1]))).long()
    packed = sum(part << place for part, place in zip(numbers.chunk(len(places)), places, strict=True))
    tensors = {"W_q": packed.to(torch.int32 if bits == 3 else torch.uint8), "scale": scale, "zero": zero}  # type: ignore[union-attr]
    tensors |= {"nbits": torch.tensor(bits, dtype=torch.int32), "shape": torch.tensor(weight.shape)}
    tensors["packing"] = torch.tensor(list(b"4bit_u8"), dtype=torch.uint8)
    return Made(tensors, ((q - zero.float()) * scale.float()).reshape(weight.shape))


def _hqq(bits: int, group: int, axis: int) -> Kind:
    params = {"nbits": bits, "group_size": group, "axis": axis, "channel_wise": True, "optimize": True}
    config = {"weight_quant_params": params, "scale_quant_params": None, "zero_quant_params": None}
    settings = {"quant_method": "hqq", "quant_config": config, "skip_modules": ["lm_head"]}
    return kind(settings, lambda w: hqq(w, bits, group, axis), bits, group)


def ao_integers(weight: Tensor, bits: int, group: int | None, *, symmetric: bool) -> Made:
    one = whole(weight, bits, group or weight.shape[1], symmetric=symmetric, dtype=torch.float32)
    middle = 2 ** (bits - 1)
    q, zeros = ((part - middle).to(torch.int8) for part in (one.q, one.zeros))
    return Made({"_weight_qdata": q, "_weight_scale": one.scales, "_weight_zero_point": zeros}, one.restored())


def ao_floats(weight: Tensor, block: tuple[int, int]) -> Made:
    made = blocks(weight, "e4m3", block, "scale")
    return Made({"_weight_qdata": made.tensors["weight"], "_weight_scale": made.tensors["scale"]}, made.values)


def _ao(kind_: str, make: Any, bits: int, group: int | None, **data: Any) -> Kind:
    config = {"_type": kind_, "_version": 2, "_data": data}
    settings = {"quant_method": "torchao", "quant_type": {"default": config}, "modules_to_not_convert": ["lm_head"]}
    return kind(settings, make, bits, group)


def _type(name: str, **data: Any) -> dict[str, Any]:
    return {"_type": name, "_data": data}


ROWS, WHOLE, GROUP = _type("PerRow", dim=-1), _type("PerTensor"), _type("PerGroup", group_size=32)
INT4 = {"_type": "torch.dtype", "_data": "int4"}


def _quark(weight: dict[str, Any], make: Any, bits: int, group: int | None) -> Kind:
    settings = {
        "quant_method": "quark",
        "global_quant_config": {"weight": {"is_dynamic": False, "symmetric": True, **weight}, "input_tensors": None},
        "layer_quant_config": {},
        "exclude": ["lm_head"],
        "export": {"weight_format": "real_quantized", "pack_method": "reorder"},
    }
    return kind(settings, make, bits, group)


def quark_int8(weight: Tensor) -> Made:
    one = whole(weight, 8, weight.shape[1], dtype=torch.float32)
    tensors = {"weight": (one.q - 128).to(torch.int8), "weight_scale": one.scales[:, 0]}
    return Made(tensors | {"input_scale": torch.tensor(0.02)}, one.restored())


def fbgemm(weight: Tensor) -> Made:
    made = blocks(weight, "e4m3", (1, weight.shape[1]), "weight_scale")
    return Made(made.tensors | {"input_scale_ub": torch.tensor([1200.0])}, made.values)


MX = {"qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
LIBRARY_KINDS = {
    "hqq-8": _hqq(8, 128, 1),
    "hqq-4": _hqq(4, 64, 1),
    "hqq-4-axis-0": _hqq(4, 64, 0),
    "hqq-3": _hqq(3, 64, 1),
    "hqq-2-axis-0": _hqq(2, 16, 0),
    "hqq-1": _hqq(1, 32, 1),
    "torchao-int8": _ao(
        "Int8DynamicActivationInt8WeightConfig", lambda w: ao_integers(w, 8, None, symmetric=True), 8, None,
        granularity=ROWS,
    ),
    "torchao-int8-groups": _ao(
        "Int8WeightOnlyConfig", lambda w: ao_integers(w, 8, 32, symmetric=True), 8, 32, group_size=32
    ),
    "torchao-int8-zeros": _ao(
        "IntxWeightOnlyConfig", lambda w: ao_integers(w, 8, None, symmetric=False), 8, None,
        weight_dtype={**INT4, "_data": "int8"}, mapping_type=_type("MappingType") | {"_data": "ASYMMETRIC"},
    ),
    "torchao-int4": _ao(
        "IntxWeightOnlyConfig", lambda w: ao_integers(w, 4, 32, symmetric=True), 4, 32,
        weight_dtype=INT4, granularity=GROUP, mapping_type=_type("MappingType") | {"_data": "SYMMETRIC"},
    ),
    "torchao-int4-zeros": _ao(
        "Int8DynamicActivationIntxWeightConfig", lambda w: ao_integers(w, 4, 32, symmetric=False), 4, 32,
        weight_dtype=INT4, weight_granularity=GROUP, weight_mapping_type=_type("MappingType") | {"_data": "ASYMMETRIC"},
    ),
    "torchao-fp8": _ao("Float8WeightOnlyConfig", lambda w: ao_floats(w, (1, w.shape[1])), 8, None, granularity=ROWS),
    "torchao-fp8-tensor": _ao(
        "Float8DynamicActivationFloat8WeightConfig", lambda w: ao_floats(w, tuple(w.shape)), 8, None,  # type: ignore[arg-type]
        granularity=[WHOLE, WHOLE],
    ),
    "quark-fp8": _quark(
        {"dtype": "fp8_e4m3", "qscheme": "per_tensor"},
        lambda w: blocks(w, "e4m3", tuple(w.shape), "weight_scale", flat=True), 8, None,  # type: ignore[arg-type]
    ),
    "quark-e5m2": _quark(
        {"dtype": "fp8_e5m2", "qscheme": "per_channel"},
        lambda w: blocks(w, "e5m2", (1, w.shape[1]), "weight_scale", flat=True), 8, None,
    ),
    "quark-mxfp4": _quark({"dtype": "fp4", **MX}, lambda w: mx(w, "e2m1", "weight"), 8, 32),
    "quark-mxfp8": _quark({"dtype": "fp8_e4m3", **MX}, lambda w: mx(w, "e4m3", "weight"), 8, 32),
    "quark-int8": _quark({"dtype": "int8", "qscheme": "per_channel"}, quark_int8, 8, None),
    "fbgemm": kind(
        {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"], "activation_scale_ub": 1200.0},
        fbgemm, 8, None,
    ),
}  # fmt: skip
