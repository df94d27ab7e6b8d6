"""Scales of an 8-bit KV cache in a checkpoint. Pages store k / scale and v / scale.

The scales are in the file kv_cache_scales.json, as written by AMD Quark and vLLM, with one scale per layer for both k
and v (by rank, then by layer):
    {"kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": 0.0230, "1": …}}}}

or in one-element tensors next to the attention's own (`_names`). The file has precedence. Sources: vLLM 0.11
(maybe_remap_kv_scale_name), ModelOpt 0.39, llm-compressor 0.8, AutoFP8.
"""

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.api.errors import CheckpointError
from engine.api.files import open_file, read_json_object
from engine.models.headers import TensorInfo
from engine.models.parts import Attention, Model, bodies
from engine.models.sources import branch_path, join

FILE = "kv_cache_scales.json"
KNOWN = ("fp8", "int8", "int4")  # formats of `stated_format` that executors have
_UNUSED = ("q_scale", "prob_scale", "attn.q_scale", "attn.prob_scale")  # for attention computed in 8 bits


@dataclass(frozen=True)
class KVScales:
    """Factors by which 8-bit pages are multiplied, one for each attention layer."""

    k: tuple[float, ...]
    v: tuple[float, ...]


def read_kv_scales(folder: Path, model: Model, tensors: Mapping[str, TensorInfo]) -> KVScales:
    """Return the scales from the file, else from the tensors, else 1 for each layer. Raises CheckpointError."""
    paths = tuple(_attentions(model))
    if (folder / FILE).exists():
        both = _from_file(folder / FILE, len(paths))
        return KVScales(both, both)
    found = [_pair(path, part, tensors) for path, part in paths]
    missing = [path for (path, _), names in zip(paths, found, strict=True) if None in names]
    if len(missing) == len(paths) and not any(any(names) for names in found):
        return KVScales((1.0,) * len(paths), (1.0,) * len(paths))
    if missing:
        raise CheckpointError(
            f"{folder}: has scales of an 8-bit KV cache for some layers, but lacks k_scale or v_scale of {missing[0]}"
        )
    k, v = (tuple(_number(tensors[str(names[at])], str(names[at])) for names in found) for at in (0, 1))
    return KVScales(k, v)


def stated_format(folder: Path, config: Mapping[str, Any], model: Model, tensors: Mapping[str, TensorInfo]) -> str:
    """Return the number format of the KV cache for which a checkpoint was made, or "".

    It is `kv_cache_scheme` (compressed-tensors) or `kv_cache_quant_algo` (ModelOpt) of quantization_config, or fp8 if
    there are scales of a KV cache. It may be a format that no executor has, such as nvfp4, or fp8 with other scales
    than one for each layer."""
    settings = config.get("quantization_config")
    settings = settings if isinstance(settings, dict) else {}
    scheme, algorithm = settings.get("kv_cache_scheme"), settings.get("kv_cache_quant_algo")
    if isinstance(scheme, dict):
        kind = {"float": "fp", "int": "int"}.get(str(scheme.get("type")), str(scheme.get("type")))
        shared = "dynamic" if scheme.get("dynamic") else scheme.get("strategy") or "tensor"
        scales = f" ({shared} scales)" if kind == "fp" and shared != "tensor" else ""
        return f"{kind}{scheme.get('num_bits')}{scales}"
    if isinstance(algorithm, str):
        return algorithm.lower()
    if (folder / FILE).exists():
        return "fp8"
    path, part = next(iter(_attentions(model)), ("", None))
    return "fp8" if part is not None and any(_pair(path, part, tensors)) else ""


def is_kv_scale(model: Model, name: str) -> bool:
    """Return whether a tensor belongs to a quantized KV cache, or to attention computed in 8 bits."""
    if not name.endswith("_scale"):
        return False
    return any(
        name in (*_names(path, part, 0), *_names(path, part, 1), *_unused(path, part))
        for path, part in _attentions(model)
    )


def _attentions(model: Model) -> Iterator[tuple[str, Attention]]:
    """Yield (path, attention) for the attention parts with keys and values of their own, in order."""
    for index, block in enumerate(model.blocks):
        for branch in block:
            for body in bodies(branch):
                if isinstance(body, Attention) and not body.source and not body.shared_kv:
                    path = branch_path(branch, join(model.root, model.layers, str(index)), model.root)
                    yield join(path, body.name), body


def _names(path: str, part: Attention, which: int) -> tuple[str, ...]:
    """Return the possible names of the scale of the keys (0) or values (1): those of ModelOpt, llm-compressor, vLLM and
    AutoFP8."""
    letter, projection = "kv"[which], part.sources[1 + which]
    own = (f"{path}.{projection}.{letter}_scale", f"{path}.{letter}_scale", f"{path}.attn.{letter}_scale")
    fused = part.sources[1] == part.sources[2]
    return (*own, *(() if fused else (f"{path}.{projection}.output_scale",)), f"{path}.kv_scale")


def _unused(path: str, part: Attention) -> tuple[str, ...]:
    return (*(f"{path}.{name}" for name in _UNUSED), f"{path}.{part.sources[0]}.q_scale")


def _pair(path: str, part: Attention, tensors: Mapping[str, TensorInfo]) -> tuple[str | None, str | None]:
    k, v = (next((name for name in _names(path, part, which) if name in tensors), None) for which in (0, 1))
    return k, v


def _number(info: TensorInfo, name: str) -> float:
    """Return the value of a one-element tensor. Raises CheckpointError."""
    sizes = {"F32": 4, "BF16": 2, "F16": 2}
    if math.prod(info.shape) != 1 or info.dtype not in sizes:
        wanted = "a KV cache needs one scale per layer, of type F32, BF16 or F16"
        raise CheckpointError(f"{info.file}: {name} is {info.dtype} of shape {list(info.shape)}; {wanted}")
    try:
        with open_file(info.file) as file:
            file.seek(info.offset)
            raw = file.read(sizes[info.dtype])
    except OSError as error:
        raise CheckpointError(f"{info.file}: cannot be read: {error.strerror}") from error
    form, raw = ("<e", raw) if info.dtype == "F16" else ("<f", raw.rjust(4, b"\0"))  # BF16: the upper half of F32
    value = float(struct.unpack(form, raw)[0])
    if not 0 < value < math.inf:
        raise CheckpointError(f"{info.file}: {name} is {value}; a scale must be above 0 and finite")
    return value


def _from_file(path: Path, layers: int) -> tuple[float, ...]:
    """Return one scale for each attention layer. Raises CheckpointError."""
    try:
        ranks = read_json_object(path)["kv_cache"]["scaling_factor"]
        found = {int(layer): float(scale) for layer, scale in ranks["0"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise CheckpointError(
            f"{path}: kv_cache.scaling_factor.0 must have a number for each layer: {error}"
        ) from error
    if len(ranks) > 1:
        raise CheckpointError(f"{path}: has scales for {len(ranks)} ranks; only files for one rank are supported")
    if sorted(found) != list(range(layers)):
        raise CheckpointError(
            f"{path}: has scales for layers {sorted(found)[:3]}…, but the model has 0 to {layers - 1}"
        )
    wrong = next((layer for layer, scale in found.items() if not 0 < scale < float("inf")), None)
    if wrong is not None:
        raise CheckpointError(f"{path}: the scale of layer {wrong} is {found[wrong]}; it must be above 0 and finite")
    return tuple(found[layer] for layer in range(layers))
