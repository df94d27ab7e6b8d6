"""Read a checkpoint directory in Hugging Face layout, without torch and without reading weights.

config.json declares the model; the safetensors headers list the tensors. Every error of a checkpoint that can be
detected without reading weights is raised here, so that it can be checked before anything starts.
"""

import difflib
import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from engine.api.config import TaskConfig
from engine.api.errors import CheckpointError, TaskError
from engine.api.files import INDEX_BYTES, read_json_object
from engine.formats.registry import settings_files
from engine.gguf.file import find_gguf, list_gguf, parts_of
from engine.models import dual_encoders
from engine.models.activations import check_parts
from engine.models.adapters import Adapter
from engine.models.assumed import UNSAID, assumed_tensors, assumptions
from engine.models.config import normalised, shown
from engine.models.families import ARCHITECTURES, Declare, declaration
from engine.models.foreign import declare_foreign, is_foreign
from engine.models.gguf import as_stored, read_weights
from engine.models.gguf_families import made_config, stated_modules
from engine.models.headers import TensorInfo, read_headers
from engine.models.kv_scales import is_kv_scale
from engine.models.media import media_sources
from engine.models.modules import Modules, read_modules
from engine.models.multimodal import (
    AUDIO,
    media_architecture,
    placed,
    reads_audio,
    towers_alone,
    with_embeddings,
    with_media,
    with_towers,
)
from engine.models.parts import Media, Model
from engine.models.plugins import plugin_declaration
from engine.models.quantized import Quantization, read_quantization
from engine.models.remote import REMOTE_FILE, remote_declaration
from engine.models.retrieval import inner_config, retrieval_architecture, retrieval_modules
from engine.models.sources import expert_stacks, harmless, has_stacks, join, projections
from engine.models.stored import stored_tensors
from engine.models.task import check_encoder_only, fitted, reroot
from engine.models.text_only import has_prefix_attention, text_architecture, text_config, text_decoder
from engine.models.thinker import thinker_config
from engine.models.values import check_values
from engine.models.whisper import with_alignment

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DESCRIPTIONS = ("config.json", "tokenizer.json", "tokenizer.model", "tekken.json")
"""Files next to a GGUF file that make its folder the checkpoint."""
AS_IT_IS = TaskConfig()
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float32"}


@dataclass(frozen=True)
class _Described:
    """Parts of the configuration that a task needs."""

    outer: dict[str, Any]  # the whole configuration
    written: dict[str, Any]  # the part of it with the decoder and its towers
    place: str  # its file, for messages
    retrieval: str  # architecture of a model whose vectors are compared token by token; "" for other models
    is_dual: bool  # it has separate encoders of texts and images
    media: str  # architecture that reads media; "" if the task uses none
    text_only: bool  # the towers are left out


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint without its weights."""

    path: Path
    architecture: str
    config: dict[str, Any]  # normalised (see `engine.models.config`)
    generation: dict[str, Any]  # generation_config.json
    model: Model
    dtype: str  # declared type of the weights
    eos_token_ids: tuple[int, ...]  # from config.json, then from generation_config.json
    tensors: dict[str, TensorInfo]
    quantization: Quantization | None = None
    modules: Modules | None = None  # sentence-transformers modules of a pooling model
    begin_ids: tuple[int, ...] = ()  # tokens that a reply of an encoder-decoder begins with by default
    adapters: tuple[Adapter, ...] = ()  # LoRA adapters that are served with it
    adapter_slots: tuple[int, int] | None = None  # (number, largest rank) of slots for LoRA adapters, if they move
    draft: "Checkpoint | None" = None  # model that drafts tokens for speculative decoding; of a head, the next head
    assumed: tuple[str, ...] = ()  # assumptions of a plan for a folder without weights, one statement each

    @property
    def drafts(self) -> "tuple[Checkpoint, ...]":
        """The models that draft: one, or several prediction heads."""
        return () if self.draft is None else (self.draft, *self.draft.drafts)

    @property
    def limited_by_draft(self) -> bool:
        """Return whether the draft model has the shorter context."""
        return self.draft is not None and self.draft.model.max_context < self.model.max_context

    @property
    def max_context(self) -> int:
        """Return the longest context of the model and its draft model."""
        longest = self.model.max_context
        return longest if self.draft is None else min(longest, self.draft.model.max_context)


def read_checkpoint(
    path: str | Path, trust_remote_code: bool = False, *, weights: bool = True, task: TaskConfig = AS_IT_IS
) -> Checkpoint:
    """Read config.json, generation_config.json and, if `weights` is true, the tensor headers.

    task: requested task. The folder's slipway_model.py is run only with `trust_remote_code` and only for an unknown
    architecture. Raises CheckpointError with the file's name, or TaskError if the checkpoint does not support the
    task."""
    folder = checkpoint_root(Path(path))
    blocks = find_gguf(folder)
    if not os.path.isdir(folder) and blocks is None:
        raise CheckpointError(
            f"{folder}: no such directory; model.source.path must name a checkpoint directory or a .gguf file"
        )
    said = _described(folder, blocks, task)
    is_partial = said.text_only or bool(said.media)
    config = normalised(_text_config(said.written, folder) if is_partial else said.written)
    if said.is_dual:
        config |= dual_encoders.outer_settings(said.written)
    generation = _read_generation(folder / "generation_config.json")
    architecture, declare = _architecture(folder, config, said.written, trust_remote_code)
    model = _declared(declare, config, said.place)
    left_out: tuple[Media, ...] = ()
    if said.media:
        architecture, decoder = said.media, model
        model = _declared(lambda written: with_media(decoder, written), said.written, said.place)
        choose = with_embeddings if task.accepts_embeddings or task.encoder_only else with_towers
        model, left_out = choose(model, images=task.images, audio=task.audio)
    if said.is_dual and model.media is not None and (task.text_only or not task.images):
        model = replace(model, media=None, unread=(*model.unread, *media_sources(model.media)))
    if model.audio is not None:
        model = with_alignment(model, config, generation, str(folder / "generation_config.json"))
    check_parts(model, said.place)
    check_values(model, said.place)
    if model.foreign is not None and (blocks is not None or not weights):
        raise CheckpointError(
            f"{folder}: {architecture} is computed by transformers' code, which needs its safetensors files"
        )
    headers = cache(partial(read_tensors, folder))
    if said.text_only and weights and blocks is None:
        model = text_decoder(model, headers())
    if said.media and weights:
        model = placed(model, headers(), left_out)
    if task.encoder_only:
        model = towers_alone(model, headers() if weights else ())
    # Towers are never quantized.
    quantization = None if task.encoder_only else read_quantization(config, model, said.place)
    tensors: dict[str, TensorInfo] = {}
    stated = None if blocks is None else stated_modules(blocks)
    if weights and blocks is not None:
        model = as_stored(model, architecture)
        tensors, quantization = read_weights(blocks, architecture, model, stated)
    elif weights:
        tensors = headers()
        quantization = None if quantization is None else quantization.named(tensors)
    modules = None if task.encoder_only else read_modules(folder)
    modules = stated if modules is None else modules
    if said.retrieval:
        architecture = said.retrieval
        modules = retrieval_modules(said.outer, model.embed.hidden, model.max_context, folder)
    if model.foreign is not None:
        count = sum(math.prod(info.shape) for info in tensors.values())
        model = replace(model, foreign=replace(model.foreign, parameters=count))
    if not task.encoder_only:
        model = fitted(reroot(model, tensors), config, task, modules, folder)
    model, tensors = _matched(model, tensors, quantization, modules)
    return Checkpoint(
        path=folder,
        architecture=architecture,
        config=config,
        generation=generation,
        model=model,
        dtype=_dtype(config, tensors),
        eos_token_ids=_eos_token_ids(config, generation),
        tensors=tensors,
        quantization=quantization,
        modules=modules if model.pooler is not None else None,
        begin_ids=() if model.encoder is None else _begin_ids(config, generation, folder / "config.json"),
    )


def _described(folder: Path, blocks: Path | None, task: TaskConfig) -> _Described:
    outer = _read_config(folder, blocks)
    retrieval, is_dual = retrieval_architecture(outer), _is_dual(outer)
    written = inner_config(outer) if retrieval else thinker_config(outer)
    media = "" if task.text_only or blocks is not None else media_architecture(written)
    place = str(folder / "config.json" if blocks is None or (folder / "config.json").exists() else blocks)
    has_tower = (task.audio and reads_audio(media, written)) or (task.images and media not in AUDIO and bool(media))
    if task.encoder_only:
        check_encoder_only(task, place, has_tower=has_tower and not retrieval)
    if task.accepts_embeddings and (not media or task.encoder_only):
        raise TaskError(f"model.media.accept_embeddings: true: {place}: prompts of the model have no media; remove it")
    wanted = has_tower or task.accepts_embeddings
    without_tower = bool(media) and not wanted and not has_prefix_attention(written)
    text_only = (task.text_only and not is_dual) or without_tower
    if text_only and has_prefix_attention(written):
        raise TaskError(
            f"model.text_only: true: {folder / 'config.json'}: the prompts of this model attend in both directions, "
            "which is supported only together with images; leave the key out"
        )
    return _Described(outer, written, place, retrieval, is_dual, "" if without_tower else media, text_only)


def _matched(
    model: Model, tensors: dict[str, TensorInfo], quantization: Quantization | None, modules: Modules | None
) -> tuple[Model, dict[str, TensorInfo]]:
    """Return the model and its tensors. The head keeps only parts that are stored, and the tensors have the names and
    shapes of the declaration."""
    tensors = unstacked(model, tensors, quantization)
    if model.transposed:
        tensors = _transposed(model, tensors)
    if modules is not None and model.pooler is not None and tensors:
        tensors |= modules.tensors()
    if model.head is not None and model.head.added and tensors and model.head.added not in tensors:
        model = replace(model, head=replace(model.head, added=""))
    if model.head is not None and model.head.tied_unless_stored and tensors:
        model = replace(model, head=replace(model.head, tied=f"{model.head.name}.weight" not in tensors))
    return model, tensors


def assume_checkpoint(path: str | Path, trust_remote_code: bool = False, *, task: TaskConfig = AS_IT_IS) -> Checkpoint:
    """Read a folder without weights, for a plan. Its tensors are those that config.json declares. Raises the errors of
    `read_checkpoint`."""
    found = read_checkpoint(path, trust_remote_code, weights=False, task=task)
    dtype = found.config["dtype"] if found.config.get("dtype") in DTYPES.values() else ""
    tensors = assumed_tensors(found.model, found.quantization, found.path / SINGLE, dtype)
    assumed = assumptions(dtype, found.quantization, len(tensors))
    return replace(found, tensors=tensors, dtype=dtype or UNSAID, assumed=assumed)


def has_weights(folder: Path) -> bool:
    """Return whether a folder has any weight file, including unsupported kinds."""
    return any(path.suffix == ".gguf" or _holds_weights(path) for path in folder.iterdir())


def _holds_weights(path: Path) -> bool:
    return path.suffix in (".bin", ".pt", ".pth", ".safetensors") or path.name == INDEX


def checkpoint_root(path: Path) -> Path:
    """Return the checkpoint that a path refers to: a folder, or a single GGUF file.

    A GGUF file in a folder with a configuration or a tokenizer, and with no other weights, refers to the folder.
    """
    folder = path.parent
    if (
        path.suffix != ".gguf"
        or not os.path.isfile(path)
        or not any((folder / name).is_file() for name in DESCRIPTIONS)
    ):
        return path
    alone = not any(folder.glob("*.safetensors*")) and list_gguf(folder) == [parts_of(path)[0]]
    return folder if alone else path


def read_tensors(folder: Path) -> dict[str, TensorInfo]:
    """Return the tensors of all safetensors files in the index, or of the only file."""
    index = folder / INDEX
    if not index.exists():
        single = folder / SINGLE
        if not single.exists():
            raise CheckpointError(_no_weights(folder))
        return read_headers(single)
    wanted = read_json_object(index, INDEX_BYTES).get("weight_map")
    if not isinstance(wanted, dict) or not wanted:
        raise CheckpointError(f"{index}: weight_map is missing or empty")
    known: set[object] = set()
    for name in wanted.values():
        if not isinstance(name, str) or (name not in known and Path(name).name != name):
            raise CheckpointError(f"{index}: weight_map names {name!r}, which is not a file of this folder")
        known.add(name)
    tensors: dict[str, TensorInfo] = {}
    names = sorted(set(wanted.values()))
    for number, name in enumerate(names, 1):
        shard = folder / name
        if not shard.exists():
            raise CheckpointError(f"{shard}: missing; {INDEX} names {len(names)} shards, and this is number {number}")
        tensors |= read_headers(shard)
    for tensor, name in wanted.items():
        if tensor not in tensors or tensors[tensor].file.name != name:
            raise CheckpointError(f"{folder / name}: lacks the tensor {tensor}, which {INDEX} says it has")
    return tensors


def unstacked(
    model: Model, tensors: Mapping[str, TensorInfo], quantization: Quantization | None
) -> dict[str, TensorInfo]:
    """Replace each stacked tensor by a tensor for each expert. Raises CheckpointError."""
    found = dict(tensors)
    if not tensors or not has_stacks(model):
        return found
    for stack in expert_stacks(model, stored_tensors(model, quantization)):
        info, count = tensors.get(stack.name), len(stack.experts)
        if info is None and stack.experts[0] in tensors:
            continue
        if info is None:
            raise CheckpointError(f"{_folder(tensors)}: lacks {stack.name}")
        if len(info.shape) < 2 or info.shape[0] != count:
            raise CheckpointError(
                f"{info.file}: {stack.name} has shape {list(info.shape)}, but config.json implies {count} experts"
            )
        del found[stack.name]
        shape, size = info.shape[1:], info.bytes // count
        one = replace(info, shape=shape[::-1] if stack.transposed else shape, bytes=size, transposed=stack.transposed)
        found |= {name: replace(one, offset=info.offset + at * size) for at, name in enumerate(stack.experts)}
    return found


def _transposed(model: Model, tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return the tensors with the matrices of the projections as [outputs, inputs]."""
    names = {join(path, piece.source, "weight") for path, linear in projections(model) for piece in linear.rows}
    matrices = {name: info for name, info in tensors.items() if name in names and len(info.shape) == 2}
    turned = {name: replace(info, shape=info.shape[::-1], transposed=True) for name, info in matrices.items()}
    return {**tensors, **turned}


def check_tensors(
    model: Model,
    tensors: Mapping[str, TensorInfo],
    quantization: Quantization | None = None,
    shared: Collection[str] = (),
) -> None:
    """Compare the tensors of a checkpoint with the declaration. shared: names of tensors that another model has loaded.
    Raises CheckpointError for the first difference: missing, unknown, wrong shape, or unsupported type."""
    if model.foreign is not None:
        return  # transformers compares them
    tensors = {name: one for name, one in tensors.items() if name not in shared}
    wanted = {name: one for name, one in stored_tensors(model, quantization).items() if name not in shared}
    missing = [name for name, one in wanted.items() if name not in tensors and not one.optional]
    unread = [name for name in tensors if name not in wanted and not harmless(model, name)]
    unknown = [name for name in unread if not is_kv_scale(model, name)]
    if missing:
        raise CheckpointError(f"{_folder(tensors)}: lacks {_listed(missing)}{_similar(missing[0], unknown)}")
    if unknown:
        owner = tensors[unknown[0]].file
        raise CheckpointError(f"{owner}: has {_listed(unknown)}, which the declared model does not use")
    for name, one in wanted.items():
        if name not in tensors:
            continue
        info = tensors[name]
        if not one.fits(info.shape):
            raise CheckpointError(
                f"{info.file}: {name} has shape {list(info.shape)}, but config.json implies {list(one.shape)}"
            )
        if one.types and info.dtype not in one.types:
            raise CheckpointError(f"{info.file}: {name} is of type {info.dtype}; supported are {', '.join(one.types)}")


def _read_config(folder: Path, blocks: Path | None) -> dict[str, Any]:
    file = folder / "config.json"
    if blocks is not None and not file.exists():
        return made_config(blocks)
    config = read_json_object(file)
    for method in settings_files():
        own = folder / method.file
        if "quantization_config" not in config and method.file_settings is not None and own.exists():
            config["quantization_config"] = method.file_settings(read_json_object(own), str(own))
    return config


def _read_generation(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.exists() else {}


def _text_config(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    try:
        return text_config(config)
    except TaskError as error:
        raise TaskError(str(error).replace("config.json", str(folder / "config.json"), 1)) from error


def _architecture(folder: Path, config: dict[str, Any], written: dict[str, Any], trust: bool) -> tuple[str, Declare]:
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise CheckpointError(
            f"{folder / 'config.json'}: architectures is {shown(names)}; it must name the architecture"
        )
    known = [name for name in names if name in ARCHITECTURES]
    if known:
        config["architectures"] = known[:1]
        return known[0], ARCHITECTURES[known[0]]
    if (plugin := plugin_declaration(names[0])) is not None:
        return names[0], plugin
    if (folder / REMOTE_FILE).exists():
        return names[0], remote_declaration(folder, names[0], trust)
    if not text_architecture(written) and is_foreign(names[0]):
        config["architectures"] = names[:1]
        return names[0], declare_foreign
    return names[0], declaration(names[0], written)


def _is_dual(config: Mapping[str, Any]) -> bool:
    """Return whether a model has separate encoders of texts and images."""
    names = config.get("architectures")
    return isinstance(names, list) and any(name in dual_encoders.ARCHITECTURES for name in names)


def _declared(declare: Declare, config: dict[str, Any], place: str) -> Model:
    try:
        return declare(config)
    except CheckpointError as error:
        raise type(error)(str(error).replace("config.json", place, 1)) from error


def _dtype(config: dict[str, Any], tensors: Mapping[str, TensorInfo]) -> str:
    """Return the type in config.json, else the type of the largest tensor, else (quantized) bfloat16, for its range."""
    declared = config.get("dtype")
    if declared in DTYPES.values():
        return str(declared)
    if not tensors:
        return "float32"
    largest = max(tensors.values(), key=lambda info: info.bytes)
    return DTYPES.get(largest.dtype, "bfloat16")


def _eos_token_ids(config: dict[str, Any], generation: dict[str, Any]) -> tuple[int, ...]:
    found: dict[int, None] = {}
    for values in (config, generation):
        value = values.get("eos_token_id")
        for token in value if isinstance(value, list) else [value]:
            if isinstance(token, int) and token >= 0:
                found[token] = None
    return tuple(found)


def _begin_ids(config: dict[str, Any], generation: dict[str, Any], place: Path) -> tuple[int, ...]:
    """Return the decoder's first token and the forced token after it, as in transformers' generate."""

    def token(key: str) -> int | None:
        value = generation.get(key, config.get(key))
        return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None

    start = token("decoder_start_token_id")
    start = token("bos_token_id") if start is None else start
    if start is None:
        raise CheckpointError(f"{place}: decoder_start_token_id is missing; it is the first token of replies")
    forced = token("forced_bos_token_id")
    return (start,) if forced is None else (start, forced)


def _no_weights(folder: Path) -> str:
    others = sorted(path.name for path in folder.iterdir() if _holds_weights(path))
    if any(name.endswith(".safetensors") for name in others):
        return f"{folder}: no {SINGLE} and no {INDEX}; there are {', '.join(others[:3])}"
    if others:
        return f"{folder}: no safetensors files, only {', '.join(others[:3])}; convert the checkpoint to safetensors"
    return (
        f"{folder}: no weights: neither {SINGLE} nor {INDEX}; only `slipway plan` and `slipway check` work without them"
    )


def _folder(tensors: Mapping[str, TensorInfo]) -> str:
    return str(next(iter(tensors.values())).file.parent) if tensors else "the checkpoint"


def _listed(names: list[str]) -> str:
    rest = f" and {len(names) - 3} more tensors" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{rest}"


def _similar(name: str, others: list[str]) -> str:
    close = difflib.get_close_matches(name, others, n=1, cutoff=0.8)
    return f" (it has {close[0]} instead)" if close else ""


__all__ = [
    "Checkpoint",
    "TensorInfo",
    "assume_checkpoint",
    "check_tensors",
    "has_weights",
    "read_checkpoint",
    "read_tensors",
]
