"""Read a checkpoint from one GGUF file, with its tensors under the names and in the layout of Hugging Face.

The configuration is the folder's config.json, or is derived from the keys in the file (gguf_families.py). The package
gguf knows the names of the tensors of every kind of file. Source: ggml's description of GGUF; the converter of
llama.cpp (conversion/*.py).
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from engine.api.errors import CheckpointError
from engine.formats.format import PLAIN, Format
from engine.formats.ggml import UNREAD, LatentHalves, format_of
from engine.gguf.file import GgufFile, GgufTensor, read_gguf
from engine.models.gguf_families import FAMILIES, KINDS, POSITIONS
from engine.models.headers import TensorInfo
from engine.models.parts import (
    MLP,
    Attention,
    DeltaNet,
    Experts,
    KimiDelta,
    LatentAttention,
    LayerNorm,
    Mamba,
    Mamba2,
    Model,
    RMSNorm,
    attentions,
)
from engine.models.quantized import Quantization
from engine.models.sources import join, linear_paths, sources

_EXPERT = re.compile(r"(.+)\.(\d+)\.(gate_proj|up_proj|down_proj)")
_SHARED = re.compile(r".+?\.(\d+)\..*shared\w*\.(gate|up|down)_proj")
_BLOCK = re.compile(r"blk\.([0-9]{1,9})\.")
_LAYER = re.compile(r".+?\.(\d+)\.")
_SEPARATE = {"wqkv": ("wq", "wk", "wv", "wo")}  # fused projections that the converter divides (InternLM2)
_DT_BIAS = re.compile(r"\.dt_bias$")
_EXPERT_TENSORS = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}


def as_stored(model: Model) -> Model:
    """Return the declaration with the layout that llama.cpp's converter writes: weights of norms with their offset, no
    transposed matrices, one tensor for each projection of the experts of a layer, and the decays of recurrences
    themselves instead of their logarithms."""
    stored: Model = _stored(model)
    return stored


def _stored(part: Any) -> Any:
    if isinstance(part, tuple):
        return tuple(map(_stored, part))
    if not is_dataclass(part) or isinstance(part, type):
        return part
    inner: dict[str, Any] = {one.name: _stored(getattr(part, one.name)) for one in fields(part)}
    part = replace(part, **inner)
    names: dict[str, Any] = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj", "interleaved": False}
    match part:
        case RMSNorm() | LayerNorm():
            return replace(part, offset=0.0)
        case Attention() if part.sources[0] == part.sources[1]:
            return replace(part, groups=1, sources=_SEPARATE.get(part.sources[0], part.sources))
        case Experts():
            gate = names["gate"] if part.gate is not None else None
            return replace(part, **{**names, "gate": gate}, stacked=None, experts="experts")
        case MLP() if part.gate == part.up and "shared" in part.name:
            return replace(part, **names)
        case DeltaNet() if part.projections == "grouped":
            return replace(part, projections="half", log_decay=False)
        case DeltaNet() | KimiDelta() | Mamba() | Mamba2():
            return replace(part, log_decay=False)
        case Model():
            return replace(part, transposed=False)
    return part


def read_weights(file: Path, architecture: str, model: Model) -> tuple[dict[str, TensorInfo], Quantization | None]:
    """Return the tensors of a file by their names in the declaration (of `as_stored`), and the formats of those that
    are not plain. Raises CheckpointError."""
    found = read_gguf(file)
    kind = str(found.require("general.architecture"))
    if kind not in FAMILIES or architecture not in FAMILIES[kind].architectures:
        raise CheckpointError(
            f"{file}: the architecture is {kind!r}, but config.json declares {architecture}; supported from GGUF are "
            f"{', '.join(KINDS)}"
        )
    tensors = _tensors(found, kind, model)
    heads = _heads(model) if FAMILIES[kind].permuted else {}
    paths = [*linear_paths(model), join(model.root, model.embed.name)]
    formats: dict[str, Format] = {}
    latent = next((one for one in attentions(model) if isinstance(one, LatentAttention)), None)
    for path in paths:
        if latent is not None and f"{path}.k_b" in tensors:
            formats[path] = LatentHalves(heads=latent.heads, keys=latent.qk_nope_head_dim, values=latent.v_head_dim)
            continue
        info = tensors.get(f"{path}.weight")
        format = None if info is None else format_of(info.dtype, heads.get(path.rsplit(".", 1)[-1], 0))
        if info is None or format is None:
            continue
        if info.dtype in UNREAD:
            raise CheckpointError(
                f"{file}: {path}.weight is of type {info.dtype}, which is not supported; quantize the model again, to "
                "Q4_K_M, Q8_0 or another type of llama-quantize"
            )
        formats[path] = format
    return tensors, Quantization("gguf", formats) if formats else None


def _tensors(found: GgufFile, kind: str, model: Model) -> dict[str, TensorInfo]:
    """Return the declared tensors that the file has. Raises CheckpointError for a tensor that is not declared."""
    own, layers = {tensor.name: tensor for tensor in found.tensors}, len(model.blocks)
    name_of, declared = _names(found.path, kind, layers), sources(model)
    tensors, used = dict[str, TensorInfo](), set[str]()
    for name, shape in declared.items():
        expert = _EXPERT.fullmatch(name.rpartition(".")[0])
        stored = _expert_tensor(name, expert) if expert is not None else name_of(name)
        tensor = own.get(stored)
        if tensor is None and name.endswith(".kv_b_proj.weight"):
            halves = _latent_halves(own, name)
            used |= {one for one, _ in halves.values()}
            tensors |= {name: info for name, (_, info) in halves.items()}
        if tensor is None:
            continue
        used.add(stored)
        one = _info(tensor)
        if expert is not None:
            if int(expert[2]) >= tensor.shape[0]:
                raise CheckpointError(
                    f"{tensor.file}: {tensor.name} has shape {list(tensor.shape)}, without expert {expert[2]}; convert "
                    "the model again"
                )
            size = tensor.bytes // tensor.shape[0]
            one = replace(one, shape=tensor.shape[1:], offset=tensor.offset + int(expert[2]) * size, bytes=size)
        elif tensor.type in PLAIN and _has_shape(tensor.shape, shape):
            one = replace(one, shape=shape)
        tensors[name] = one
    others = (one for one in own if one not in used and one not in POSITIONS and not _is_prediction(one, layers))
    unknown = next((one for one in others if one != "output.weight" or model.head is None), None)
    if unknown is not None:
        raise CheckpointError(f"{found.path}: has the tensor {unknown}, which the declared model does not use")
    return tensors


def _has_shape(stored: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Return whether a stored tensor is one of this shape: the converter removes dimensions of 1, and divides vectors
    into the groups of a norm."""
    return _without_ones(stored) == _without_ones(shape) or (len(shape) == 1 and math.prod(stored) == shape[0])


def _without_ones(shape: tuple[int, ...]) -> list[int]:
    return [size for size in shape if size != 1]


def _names(file: Path, kind: str, layers: int) -> Callable[[str], str]:
    """Return a function that maps the name of a declared tensor to its name in the file, or to "". Raises
    CheckpointError without the package gguf."""
    try:
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
    except ImportError as error:
        raise CheckpointError(
            f"{file}: the package gguf, which knows the names of the tensors, is not installed; pip install gguf"
        ) from error
    known = get_tensor_name_map(next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == kind), layers)

    def name_of(name: str) -> str:
        if (bare := known.get_name(name)) is not None:  # without .weight: A and D of a recurrence
            return f"{bare}.bias" if bare.endswith("exp_probs_b") else bare
        name = _DT_BIAS.sub(".dt_proj.bias", name)
        path, _, last = name.rpartition(".")
        if last not in ("weight", "bias"):  # a number for each head or expert
            path, last = (name.removesuffix("_bias"), "bias") if name.endswith("_bias") else (name, "weight")
        found = known.get_name(path) or known.get_name(path.removeprefix("transformer."))  # BLOOM
        shared = _SHARED.fullmatch(path)
        if shared is not None:
            found = f"blk.{shared[1]}.ffn_{shared[2]}_shexp"
        return f"{found}.{last}" if found else ""

    return name_of


def _expert_tensor(name: str, expert: re.Match[str]) -> str:
    """Return the tensor of the file that has a projection of all experts of a layer."""
    layer = _LAYER.match(name)
    return f"blk.{layer[1]}.{_EXPERT_TENSORS[expert[3]]}.{name.rpartition('.')[2]}" if layer else ""


def _latent_halves(own: Mapping[str, GgufTensor], name: str) -> dict[str, tuple[str, TensorInfo]]:
    """Return the tensors that `LatentHalves` reads, by name, with their names in the file."""
    layer, path = _LAYER.match(name), name.removesuffix(".weight")
    found = {}
    for half in ("k_b", "v_b"):
        tensor = own.get(f"blk.{layer[1]}.attn_{half}.weight") if layer else None
        if tensor is not None:
            found[f"{path}.{half}"] = tensor.name, _info(tensor)
    return found


def _info(tensor: GgufTensor) -> TensorInfo:
    return TensorInfo(tensor.file, tensor.type, tensor.shape, tensor.offset, tensor.bytes)


def _is_prediction(name: str, layers: int) -> bool:
    """Return whether a tensor belongs to a layer that predicts further tokens, which are not read."""
    found = _BLOCK.match(name)
    return found is not None and int(found[1]) >= layers


def _heads(model: Model) -> Mapping[str, int]:
    """Return the heads of q and k, by the last component of the paths of their projections."""
    found = (one for one in attentions(model) if isinstance(one, Attention))
    return next(({one.sources[0]: one.heads, one.sources[1]: one.kv_heads} for one in found), {})
