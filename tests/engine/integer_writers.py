"""Tiny checkpoints in integers of 2 to 8 bits, and in the codes of bitsandbytes, written from the definitions of their
formats. This file uses no engine code."""

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.engine.float_writers import Made, kind
from tests.engine.quantized_writers import Kind, Whole, whole


def stream(values: Tensor, bits: int) -> Tensor:
    """[rows, numbers] → [rows, words] int32: one long number for each row, cut into words from its lowest bits."""
    values = values.long()
    assert (values >= 0).all() and (values < 1 << bits).all()
    of_each = (values[..., None] >> torch.arange(bits)) & 1  # lowest bit first
    row = of_each.flatten(1).to(torch.uint8)
    row = torch.nn.functional.pad(row, (0, -row.shape[1] % 32))
    return torch.from_numpy(np.packbits(row.numpy(), axis=1, bitorder="little").view("<i4"))


def gptq(one: Whole, less: int = 1) -> Made:
    tensors = {
        "qweight": stream(one.q, one.bits).T.contiguous(),
        "qzeros": stream(one.zeros.T - less, one.bits),
        "scales": one.scales.T.contiguous(),
        "g_idx": one.index.int(),
    }
    return Made(tensors, one.restored())


def gemv(one: Whole, group: int) -> Made:
    """AutoAWQ's WQLinear_GEMV: eight neighbouring inputs to a word; zero points and scales padded to whole words."""
    groups, multiple = one.scales.shape[1], {32: 4, 64: 2}.get(group, 1)
    width = math.ceil(math.ceil(groups / 8) / multiple) * multiple
    scales, zeros = (torch.zeros(len(one.q), 8 * width, dtype=of.dtype) for of in (one.scales, one.zeros))
    scales[:, :groups], zeros[:, :groups] = one.scales, one.zeros
    return Made({"qweight": stream(one.q, 4), "qzeros": stream(zeros, 4), "scales": scales}, one.restored())


def marlin(one: Whole, *, channel: bool) -> Made:
    """Layer.pack of IST-DASLab/marlin, number by number."""
    outputs, inputs = one.q.shape
    order = []
    for i in range(32):
        own = []
        for block in (0, 1):
            for row in (2 * (i % 4), 2 * (i % 4) + 1, 2 * (i % 4 + 4), 2 * (i % 4 + 4) + 1):
                own.append(16 * row + i // 4 + 8 * block)
        for j in range(4):
            order.extend(place + 256 * j for place in own)
    order = torch.tensor(order).reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].ravel()
    tiles = one.q.T.reshape(inputs // 16, 16, outputs // 16, 16).permute(0, 2, 1, 3).reshape(inputs // 16, -1)
    permuted = tiles.reshape(-1, 1024)[:, order].reshape(tiles.shape)
    if channel:
        chunk = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
    else:
        chunk = [i + 8 * j for i in range(8) for j in range(8)]
    scales = one.scales.T.reshape(-1, len(chunk))[:, chunk].reshape(-1, outputs)
    tensors = {"B": stream(permuted, 4), "s": scales, "workspace": torch.zeros(outputs // 128 * 16, dtype=torch.int32)}
    return Made(tensors, one.restored())


def packed(one: Whole, *, symmetric: bool) -> Made:
    tensors = {"weight_packed": stream(one.q, one.bits), "weight_scale": one.scales}
    tensors["weight_shape"] = torch.tensor(one.q.shape)
    if not symmetric:
        tensors["weight_zero_point"] = stream(one.zeros.T, one.bits).T.contiguous()
    return Made(tensors, one.restored())


def int8(one: Whole) -> Made:
    tensors = {"weight": (one.q - 128).to(torch.int8), "weight_scale": one.scales}
    tensors["weight_zero_point"] = (one.zeros - 128).to(torch.int8)
    return Made(tensors, one.restored())


# QLoRA, appendix E; bitsandbytes' table of FP4 (csrc/kernels.cu, dFP4_LUT) by code.
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
FP4 = tuple(sign * one for sign in (1, -1) for one in (0.0, 0.0052083333, 0.66666667, 1.0, 1 / 3, 0.5, 1 / 6, 0.25))


def four_bits(weight: Tensor, name: str, *, nested: bool = False) -> Made:
    table = torch.tensor(NF4 if name == "nf4" else FP4)
    blocks = weight.flatten().reshape(-1, 64)
    scales = blocks.abs().amax(1)
    state: dict[str, Any] = {"quant_type": name, "blocksize": 64, "dtype": "float16", "shape": list(weight.shape)}
    tensors: dict[str, Tensor] = {"weight.quant_map": table}
    if nested:
        offset = float(scales.mean())
        wide = torch.stack([part.abs().max() for part in (scales - offset).split(256)])
        codes = torch.linspace(-1, 1, 256)
        spread = wide.repeat_interleave(256)[: len(scales)]
        bytes_ = (((scales - offset) / spread)[:, None] - codes).abs().argmin(1)
        scales = codes[bytes_] * spread + offset
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        tensors |= {"weight.absmax": bytes_.to(torch.uint8), "weight.nested_absmax": wide}
        tensors["weight.nested_quant_map"] = codes
    else:
        tensors["weight.absmax"] = scales
    numbers = ((blocks / scales[:, None])[:, :, None] - table).abs().argmin(2)
    flat = numbers.flatten().to(torch.uint8)
    tensors["weight"] = (flat[::2] << 4 | flat[1::2]).reshape(-1, 1)
    text = json.dumps(state).encode()
    tensors[f"weight.quant_state.bitsandbytes__{name}"] = torch.tensor(list(text), dtype=torch.uint8)
    return Made(tensors, (table[numbers] * scales[:, None]).reshape(weight.shape))


def llm_int8(weight: Tensor) -> Made:
    largest = weight.abs().amax(1)
    q = (weight / largest[:, None] * 127).round().to(torch.int8)
    tensors = {"weight": q, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return Made(tensors, q.float() * (largest / 127)[:, None])


def _gptq(bits: int, group: int, *, symmetric: bool = True, ordered: bool = False, **more: Any) -> Kind:
    settings = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "desc_act": ordered}
    less = 0 if more.get("checkpoint_format") == "gptq_v2" else 1
    make: Callable[[Tensor], Made] = lambda w: gptq(  # noqa: E731
        whole(w, bits, group, symmetric=symmetric, ordered=ordered), less
    )
    return kind(settings | more, make, bits, group)


def _marlin(group: int) -> Kind:
    settings = {"quant_method": "gptq", "bits": 4, "group_size": group, "sym": True, "checkpoint_format": "marlin"}
    channel = group == -1
    make: Callable[[Tensor], Made] = lambda w: marlin(  # noqa: E731
        whole(w, 4, w.shape[1] if channel else group), channel=channel
    )
    return kind(settings, make, 4, None if channel else group)


def _gemv(group: int) -> Kind:
    settings = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemv"}
    return kind(settings, lambda w: gemv(whole(w, 4, group, symmetric=False), group), 4, group)


def _compressed(form: str, bits: int, group: int | None, *, symmetric: bool, inputs: Any = None) -> Kind:
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "group_size": group}
    weights["strategy"] = "channel" if group is None else "group"
    settings = {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
        "ignore": ["lm_head"],
    }

    def make(w: Tensor) -> Made:
        one = whole(w, bits, group or w.shape[1], symmetric=symmetric, dtype=torch.bfloat16)
        return int8(one) if form == "int-quantized" else packed(one, symmetric=symmetric)

    return kind(settings, make, bits, group)


def _auto_round(packing: str, *, symmetric: bool) -> Kind:
    settings = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": symmetric, "data_type": "int"}
    settings |= {"packing_format": packing, "block_name_to_quantize": "model.layers"}

    def make(w: Tensor) -> Made:
        from tests.engine.quantized_writers import awq

        one = whole(w, 4, 32, symmetric=symmetric)
        return Made(awq(one), one.restored()) if "awq" in packing else gptq(one, 1 if "gptq" in packing else 0)

    return kind(settings, make, 4, 32)


BNB = {"quant_method": "bitsandbytes", "llm_int8_skip_modules": None, "bnb_4bit_quant_storage": "uint8"}
FOUR = {**BNB, "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_use_double_quant": False}
STATIC = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor", "dynamic": False}
INTEGER_KINDS = {
    "gptq-2": _gptq(2, 32),
    "gptq-2-zeros": _gptq(2, 64, symmetric=False, checkpoint_format="gptq_v2"),
    "gptq-3": _gptq(3, 128),
    "gptq-3-zeros": _gptq(3, 32, symmetric=False),
    "gptq-3-ordered": _gptq(3, 64, symmetric=False, ordered=True),
    "gptq-5-zeros": _gptq(5, 32, symmetric=False),
    "gptq-8-zeros": _gptq(8, 32, symmetric=False, checkpoint_format="gptq_v2"),
    "gptq-8-ordered-zeros": _gptq(8, 64, symmetric=False, ordered=True),
    "gptq-groups-of-16": _gptq(4, 16, symmetric=False),
    "marlin": _marlin(128),
    "marlin-channel": _marlin(-1),
    "awq-gemv-32": _gemv(32),
    "awq-gemv-128": _gemv(128),
    "packed-2": _compressed("pack-quantized", 2, 32, symmetric=True),
    "packed-3-zeros": _compressed("pack-quantized", 3, 64, symmetric=False),
    "packed-8-zeros": _compressed("pack-quantized", 8, None, symmetric=False),
    "int8-zeros": _compressed("int-quantized", 8, None, symmetric=False, inputs=STATIC),
    "auto-round": _auto_round("auto_round:auto_gptq", symmetric=True),
    "auto-round-zeros": _auto_round("auto_round", symmetric=False),
    "auto-round-awq": _auto_round("auto_round:auto_awq", symmetric=False),
    "bnb-nf4": kind({**FOUR, "bnb_4bit_quant_type": "nf4"}, lambda w: four_bits(w, "nf4"), 4, 64),
    "bnb-nf4-double": kind(
        {**FOUR, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
        lambda w: four_bits(w, "nf4", nested=True),
        4,
        64,
    ),
    "bnb-fp4": kind({**FOUR, "bnb_4bit_quant_type": "fp4"}, lambda w: four_bits(w, "fp4"), 4, 64),
    "bnb-int8": kind({**BNB, "load_in_4bit": False, "load_in_8bit": True}, llm_int8, 8, None),
}
