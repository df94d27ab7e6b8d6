"""Tensors of a checkpoint without weight files, derived from config.json. They are sufficient for a plan.

Names and shapes follow from the declaration. The element type is that of config.json, or bfloat16 if it has none.
Quantized projections have the first type that their format stores.
"""

import math
from pathlib import Path

from engine.models.headers import ELEMENT_BYTES, TensorInfo
from engine.models.parts import Model
from engine.models.quantized import Quantization
from engine.models.stored import stored_tensors

STORED_AS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
UNSAID = "bfloat16"  # the element type of most checkpoints


def assumed_tensors(model: Model, quantization: Quantization | None, file: Path, dtype: str) -> dict[str, TensorInfo]:
    """Return the tensors that the declaration requires. `file`: their assumed file. `dtype`: "" if unknown."""
    plain = STORED_AS[dtype or UNSAID]
    tensors: dict[str, TensorInfo] = {}
    for name, one in stored_tensors(model, quantization).items():
        if not one.optional:
            kind = plain if plain in one.types or not one.types else one.types[0]
            tensors[name] = TensorInfo(file, kind, one.shape, 0, math.prod(one.shape) * ELEMENT_BYTES[kind])
    return tensors


def assumptions(dtype: str, quantization: Quantization | None, count: int) -> tuple[str, ...]:
    """Return the assumptions of a plan with these tensors, as one statement each."""
    packed = f"{quantization} (config.json)" if quantization else "none (config.json names none)"
    return (
        f"the {count} tensors that config.json declares; names, shapes and file sizes are not compared with files",
        f"weights of type {dtype or UNSAID} ({'config.json' if dtype else 'config.json names none'})",
        f"quantization: {packed}",
    )
