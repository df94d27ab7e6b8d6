"""Read a checkpoint from one GGUF file, with its tensors under the names and in the layout of Hugging Face.

The configuration is the folder's config.json, or is derived from the keys in the file (gguf_families). The package
gguf knows the names of the tensors of every kind of file. Source: ggml's description of GGUF; the converter of
llama.cpp (conversion/*.py).
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from engine.api.errors import CheckpointError
from engine.formats.format import PLAIN, Format
from engine.formats.ggml import UNREAD, LatentHalves, format_of
from engine.gguf.file import GgufFile, GgufTensor, read_gguf
from engine.models.gguf_families import FAMILIES, KINDS, POSITIONS
from engine.models.headers import TensorInfo
from engine.models.modules import Modules
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
_MEMBER = re.compile(r"(.+)\.(\d+)")  # one of several matrices that the converter stores in one tensor
_XIELU = re.compile(r".+?\.(\d+)\..*\bact_fn\.(\w+)")  # numbers of an activation, which are keys
_SHARED = re.compile(r".+?\.(\d+)\..*shared\w*\.(gate|up|down)_proj")
_BLOCK = re.compile(r"blk\.([0-9]{1,9})\.")
_LAYER = re.compile(r".+?\.(\d+)\.")
_DT_BIAS = re.compile(r"\.dt_bias$")
_EXPERT_TENSORS = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}
_HALVES = {"gate_proj": 0, "up_proj": 1}  # of the rows of each matrix of ffn_gate_up_exps
_SCALES = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}  # Gemma 4


def as_stored(model: Model, architecture: str) -> Model:
    """Return the declaration with the layout that llama.cpp's converter writes: weights of norms with their offset, no
    transposed matrices, one tensor for each projection of the experts of a layer, the decays of recurrences themselves
    instead of their logarithms, and value heads of a DeltaNet by number within their groups."""
    family = FAMILIES.get(KINDS.get(architecture, ""))
    stored: Model = _stored(model, family.separate if family is not None else None)
    return stored


def _stored(part: Any, separate: tuple[str, str, str, str] | None) -> Any:
    """separate: names of the projections into which a fused one is divided."""
    if isinstance(part, tuple):
        return tuple(_stored(one, separate) for one in part)
    if not is_dataclass(part) or isinstance(part, type):
        return part
    inner: dict[str, Any] = {one.name: _stored(getattr(part, one.name), separate) for one in fields(part)}
    part = replace(part, **inner)
    names: dict[str, Any] = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj", "interleaved": False}
    match part:
        case RMSNorm() | LayerNorm():
            return replace(part, offset=0.0)
        case Attention() if part.sources[0] == part.sources[1]:
            return replace(part, groups=1, sources=separate or part.sources)
        case Experts():
            gate = names["gate"] if part.gate is not None else None
            return replace(part, **{**names, "gate": gate}, stacked=None, experts="experts")
        case MLP() if part.gate == part.up and "shared" in part.name:
            return replace(part, **names)
        case DeltaNet() if part.projections == "grouped":
            return replace(part, projections="half", log_decay=False)
        case DeltaNet() if part.projections == "joined" and part.key_heads != part.value_heads:
            return replace(part, key_heads=part.value_heads, stored_key_heads=part.key_heads, log_decay=False)
        case DeltaNet() | KimiDelta() | Mamba() | Mamba2():
            return replace(part, log_decay=False)
        case Model():
            return replace(part, transposed=False)
    return part


def read_weights(
    file: Path, architecture: str, model: Model, modules: Modules | None
) -> tuple[dict[str, TensorInfo], Quantization | None]:
    """Return the tensors of a file by their names in the declaration (of `as_stored`), and the formats of those that
    are not plain. modules: of the file, whose tensors are left out. Raises CheckpointError."""
    found = read_gguf(file)
    kind = str(found.require("general.architecture"))
    if kind not in FAMILIES or architecture not in FAMILIES[kind].architectures:
        raise CheckpointError(
            f"{file}: the architecture is {kind!r}, but config.json declares {architecture}; supported from GGUF are "
            f"{', '.join(KINDS)}"
        )
    stored = () if modules is None else modules.stored
    tensors = _tensors(found, kind, model, {name for name, _ in stored})
    heads = _heads(model) if FAMILIES[kind].permuted else {}
    paths = [*linear_paths(model), join(model.root, model.embed.name)]
    projections = {} if modules is None else modules.tensors()
    paths += [name.removesuffix(".weight") for name in projections if name.endswith(".weight")]
    formats: dict[str, Format] = {}
    latent = next((one for one in attentions(model) if isinstance(one, LatentAttention)), None)
    for path in paths:
        if latent is not None and f"{path}.k_b" in tensors:
            formats[path] = LatentHalves(heads=latent.heads, keys=latent.qk_nope_head_dim, values=latent.v_head_dim)
            continue
        info = tensors.get(f"{path}.weight") or projections.get(f"{path}.weight")
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


@dataclass(frozen=True)
class _Place:
    """Place of a declared tensor in a file."""

    name: str
    number: int | None = None  # of the matrix, in a tensor of several
    half: int | None = None  # of the rows of this matrix


def _tensors(found: GgufFile, kind: str, model: Model, others: set[str]) -> dict[str, TensorInfo]:
    """Return the declared tensors that the file has. others: further tensors that are read. Raises CheckpointError for
    a tensor that is not declared."""
    own, layers = {tensor.name: tensor for tensor in found.tensors}, len(model.blocks)
    depth = layers if model.encoder is None else max(layers, len(model.encoder.blocks))
    get_name = _names(found.path, kind, depth)
    tensors, used = dict[str, TensorInfo](), others | _unread(model, get_name)
    for name, shape in sources(model).items():
        number = _XIELU.fullmatch(name)
        if number is not None:
            tensors |= _activation_number(found, name, int(number[1]), number[2], layers)
            continue
        place = next((one for one in _places(name, get_name) if one.name in own), None)
        if place is None and name.endswith(".kv_b_proj.weight"):
            halves = _latent_halves(own, name)
            used |= {one for one, _ in halves.values()}
            tensors |= {name: info for name, (_, info) in halves.items()}
        if place is None:
            continue
        used.add(place.name)
        one = _info(own[place.name])
        if place.number is not None:
            one = _member(one, place, place.number)
        elif one.dtype in PLAIN and _has_shape(one.shape, shape):
            one = replace(one, shape=shape)
        tensors[name] = one
    left = (one for one in own if one not in used and one not in POSITIONS and not _is_prediction(one, layers))
    unknown = next((one for one in left if one != "output.weight" or model.head is None), None)
    if unknown is not None:
        raise CheckpointError(f"{found.path}: has the tensor {unknown}, which the declared model does not use")
    return tensors


def _member(whole: TensorInfo, place: _Place, number: int) -> TensorInfo:
    """Return one of several matrices, or half of its rows."""
    if number >= whole.shape[0]:
        raise CheckpointError(
            f"{whole.file}: {place.name} has shape {list(whole.shape)}, without expert {number}; convert the model "
            "again"
        )
    size, shape = whole.bytes // whole.shape[0], whole.shape[1:]
    offset = whole.offset + number * size
    if place.half is not None:
        size, shape = size // 2, (shape[0] // 2, *shape[1:])
        offset += place.half * size
    return replace(whole, shape=shape, offset=offset, bytes=size)


def _activation_number(found: GgufFile, name: str, layer: int, last: str, layers: int) -> dict[str, TensorInfo]:
    """Return a number of xIELU, which is in a list with one for each layer, by its name; empty without a list."""
    key = f"xielu.{last}"
    if key not in found.arrays:
        return {}
    values = found.keys[key]
    if len(values) < layers:
        raise CheckpointError(f"{found.path}: {key} has {len(values)} numbers for {layers} layers; convert it again")
    return {name: TensorInfo(found.path, "F32", (), found.arrays[key] + 4 * layer, 4)}


def _unread(model: Model, get_name: Callable[[str], str | None]) -> set[str]:
    """Return the tensors that the model leaves unread."""
    paths = (one.rstrip(".") for entry in model.unread for one in (entry, join(model.root, entry)))
    names = filter(None, map(get_name, paths))
    return {f"{name}.{last}" for name in names for last in ("weight", "bias")}


def _has_shape(stored: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Return whether a stored tensor is one of this shape: the converter removes dimensions of 1, and divides vectors
    into the groups of a norm."""
    return _without_ones(stored) == _without_ones(shape) or (len(shape) == 1 and math.prod(stored) == shape[0])


def _without_ones(shape: tuple[int, ...]) -> list[int]:
    return [size for size in shape if size != 1]


def _names(file: Path, kind: str, layers: int) -> Callable[[str], str | None]:
    """Return a function that maps the path of a module to its name in the file, or to None. Raises CheckpointError
    without the package gguf."""
    try:
        from gguf import MODEL_ARCH_NAMES, TensorNameMap
    except ImportError as error:
        raise CheckpointError(
            f"{file}: the package gguf, which knows the names of the tensors, is not installed; pip install gguf"
        ) from error

    class Names(TensorNameMap):
        # A table of its own: the package adds the names of some architectures to that of all.
        block_mappings_cfg = dict(TensorNameMap.block_mappings_cfg)

    known = Names(next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == kind), layers)
    return lambda path: known.get_name(path)


def _places(name: str, get_name: Callable[[str], str | None]) -> Iterator[_Place]:
    """Yield the places in which files have a declared tensor, the usual one first."""
    path, _, last = name.rpartition(".")
    layer, expert = _LAYER.match(name), _EXPERT.fullmatch(path)
    if expert is not None and layer is not None:
        yield _Place(f"blk.{layer[1]}.{_EXPERT_TENSORS[expert[3]]}.{last}", int(expert[2]))
        if expert[3] in _HALVES:
            yield _Place(f"blk.{layer[1]}.ffn_gate_up_exps.{last}", int(expert[2]), _HALVES[expert[3]])
        return
    if (bare := get_name(name)) is not None:  # A and D of a recurrence, sinks, corrections of scores
        yield from (_Place(f"{bare}{end}") for end in ("", ".bias", ".weight"))
    scale = next((own for end, own in _SCALES.items() if name.endswith(f".{end}")), "")
    if scale and layer is not None:
        yield _Place(f"blk.{layer[1]}.{scale}")
    shared = _SHARED.fullmatch(path)
    if shared is not None:
        yield _Place(f"blk.{shared[1]}.ffn_{shared[2]}_shexp.{last}")
    path, _, last = _DT_BIAS.sub(".dt_proj.bias", name).rpartition(".")
    if last not in ("weight", "bias"):  # a number for each head or expert
        path, last = (name.removesuffix("_bias"), "bias") if name.endswith("_bias") else (name, "weight")
    found = get_name(path) or get_name(path.removeprefix("transformer."))  # BLOOM
    if found is not None:
        yield _Place(f"{found}.{last}")
    member = _MEMBER.fullmatch(path)
    if member is not None and (whole := get_name(member[1])) is not None:
        yield _Place(f"{whole}.{last}", int(member[2]))


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
