"""Tiny fp8 checkpoints, written from the definitions of their formats, and their dequantized values.

The writer and the model come from quantized_writers. This file adds fp8: it quantizes a matrix with one kind of scales,
stores it under the names of one format, and dequantizes it to float32. It uses no engine code.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.engine.quantized_writers import Kind, Written, write

BLOCK = 128
EXPERTS = {"head_dim": 32, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
# Layers that a checkpoint with experts does not quantize, as its format lists them: the writer quantizes no routers.
PLAIN = {
    "channel-dynamic": {"ignore": ["lm_head", "re:.*mlp.gate$", "model.layers.1.mlp.down_proj"]},
    "autofp8-static": {"ignored_layers": ["lm_head", "mlp.gate"]},
    "blocks": {"modules_to_not_convert": ["lm_head", "mlp.gate", "model.layers.1.self_attn.o_proj"]},
}
LARGEST = 448.0
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Eight:
    """A quantized matrix: w = q · wide."""

    q: Tensor  # [outputs, inputs] e4m3
    scales: Tensor  # as stored
    wide: Tensor  # [outputs, inputs], the scales expanded to one per value

    def restored(self) -> Tensor:
        return self.q.float() * self.wide


def eight(weight: Tensor, scales: str, dtype: torch.dtype = torch.float32) -> Eight:
    rows, inputs = weight.shape
    size = {"tensor": weight.shape, "channel": (1, inputs), "block": (BLOCK, BLOCK)}[scales]
    most = torch.zeros(-(-rows // size[0]), -(-inputs // size[1]))
    for row in range(most.shape[0]):
        for column in range(most.shape[1]):
            own = weight[row * size[0] : (row + 1) * size[0], column * size[1] : (column + 1) * size[1]]
            most[row, column] = own.abs().max()
    stored = (most / LARGEST).to(dtype)
    wide = stored.float()[torch.arange(rows) // size[0]][:, torch.arange(inputs) // size[1]]
    return Eight((weight / wide).clamp(-LARGEST, LARGEST).to(E4M3), stored, wide)


@dataclass(frozen=True)
class Fp8Kind(Kind):
    """`inputs`: how activations are rounded where fp8 is multiplied: by `given`, by their own numbers; None: not."""

    scales: str = "channel"
    inputs: str | None = "dynamic"
    given: float = 0.0

    @property
    def left_out(self) -> tuple[str, ...]:
        if self.settings["quant_method"] == "modelopt":
            return tuple(f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "gate_up", "down"))
        return (*self.settings.get("ignore", ()), *self.settings.get("modules_to_not_convert", ()))

    def rounded(self, x: Tensor) -> Tensor:
        """Activations as the checkpoint's makers round them: each row by its largest number, or each 128 of a row."""
        if self.inputs is None:
            return x
        group = BLOCK if self.scales == "block" else x.shape[-1]
        pieces = []
        for piece in x.float().split(group, -1):
            scale = torch.tensor(self.given) if self.given else piece.abs().amax(-1, keepdim=True) / LARGEST
            pieces.append((piece / scale).clamp(-LARGEST, LARGEST).to(E4M3).float() * scale)
        return torch.cat(pieces, -1)


def _kind(
    settings: dict[str, Any],
    scales: str,
    inputs: str | None,
    names: tuple[str, str],
    shape: tuple[int, ...] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Fp8Kind:
    """names: of the two scales. shape: of a scale of the whole matrix."""
    given = 0.02 if inputs == "static" else 0.0

    def write(one: Eight) -> dict[str, Tensor]:
        found = {"weight": one.q, names[0]: one.scales if shape is None else one.scales.reshape(shape)}
        return found | ({names[1]: torch.tensor(given).reshape(shape or (1,))} if given else {})

    quantize: Callable[[Tensor], Any] = lambda weight: eight(weight, scales, dtype)  # noqa: E731
    return Fp8Kind(settings, quantize, write, 8, None, scales, inputs, given)  # type: ignore[arg-type]


def _compressed(scales: str, inputs: dict[str, Any] | None, dtype: torch.dtype = torch.float32) -> Fp8Kind:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": scales, "dynamic": False}
    if scales == "block":
        weights["block_structure"] = [BLOCK, BLOCK]
    settings = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
        "ignore": ["lm_head", "model.layers.1.mlp.down_proj"],
        "quantization_status": "compressed",
    }
    way = None if inputs is None else "dynamic" if inputs["dynamic"] else "static"
    shape = (1,) if scales == "tensor" else None
    return _kind(settings, scales, way, ("weight_scale", "input_scale"), shape, dtype)


TOKEN = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
GROUPS = {**TOKEN, "strategy": "group", "group_size": BLOCK}
STATIC = {**TOKEN, "strategy": "tensor", "dynamic": False}
FP8 = {"quant_method": "fp8", "modules_to_not_convert": ["lm_head", "model.layers.1.self_attn.o_proj"]}
AUTO = {"quant_method": "fp8", "ignored_layers": ["lm_head"]}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head", "model.layers.0.mlp*"]}
NAMES, INVERSES = ("weight_scale", "input_scale"), ("weight_scale_inv", "activation_scale")

FP8_KINDS = {
    "tensor-dynamic": _compressed("tensor", TOKEN),
    "tensor-static": _compressed("tensor", STATIC, torch.bfloat16),
    "channel-dynamic": _compressed("channel", TOKEN, torch.bfloat16),
    "channel-weights-only": _compressed("channel", None),
    "compressed-blocks": _compressed("block", GROUPS, torch.bfloat16),
    "blocks": _kind({**FP8, "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}, "block", "dynamic",
                    INVERSES),
    "transformers-tensor": _kind({**FP8, "activation_scheme": "static", "weight_block_size": None}, "tensor", "static",
                                 INVERSES, ()),
    "autofp8-static": _kind({**AUTO, "activation_scheme": "static"}, "tensor", "static", NAMES, ()),
    "autofp8-dynamic": _kind({**AUTO, "activation_scheme": "dynamic"}, "tensor", "dynamic", NAMES, (1,)),
    "modelopt": _kind(MODELOPT, "tensor", "static", NAMES, ()),
}  # fmt: skip


def write_experts(folder: Path, kind: str) -> Written:
    """A mixture of experts of this kind, all of it in fp8 but routers and the head."""
    made = write(folder, FP8_KINDS[kind], "Qwen3Moe", **EXPERTS)
    made.configure(**PLAIN[kind])
    return made
