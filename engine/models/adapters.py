"""Read a LoRA adapter in the format of PEFT, without torch and without reading weights: adapter_config.json and the
header of adapter_model.safetensors.

A module W of the model becomes W + s · B A, with A of [rank, inputs], B of [outputs, rank], and s = alpha / rank, or
alpha / √rank with use_rslora. A parameter with the matrices of all experts (target_parameters) has A of all experts
one after another, [experts · rank, inputs], and B of [outputs, rank · experts], in which the columns of an expert are
`experts` apart. The wrappers of several parameters of a module are nested: the last parameter is the outermost one, and
the names of the others have base_layer.

Source: peft/tuners/lora (config.py, layer.py), peft/utils/save_and_load.py.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.api.config import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from engine.api.errors import CheckpointError
from engine.api.files import read_json_object
from engine.models.headers import TensorInfo, read_headers

CONFIG, WEIGHTS = ADAPTER_CONFIG, ADAPTER_WEIGHTS
FILES = (CONFIG, WEIGHTS)
PREFIX = "base_model.model."
TYPES = ("F32", "BF16", "F16")
_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])\.(?:default\.)?weight")
# Initialisations that change the weights of the base model, which an adapter therefore needs.
_OWN_BASE = ("pissa", "olora", "corda", "loftq")
_EMPTY: tuple[tuple[str, str], ...] = (
    ("modules_to_save", "whole modules besides LoRA; merge the adapter into the checkpoint"),
    ("trainable_token_indices", "trained rows of the embedding; merge the adapter into the checkpoint"),
    ("layer_replication", "a model with repeated layers; merge the adapter into the checkpoint"),
    ("alora_invocation_tokens", "an activated LoRA; train a plain one"),
    ("corda_config", "a changed base model; convert the adapter to plain LoRA with PEFT"),
    ("arrow_config", "a router of adapters; serve the adapters one by one"),
)


# Parameters with the matrices of all experts, in the order in which modules have them.
EXPERT_PARAMETERS = ("gate_up_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class ExpertSlice:
    """The place of one projection of one expert in the matrices of all experts."""

    expert: int
    first: int  # output of the parameter that is the first one of the projection
    outputs: int
    swapped: bool  # A and B have changed places, as PEFT before 0.19 saves them


@dataclass(frozen=True)
class LowRank:
    """The two matrices of one module of an adapter, or of all experts of a layer."""

    a: TensorInfo  # [rank, inputs]
    b: TensorInfo  # [outputs, rank]
    scale: float  # of B A
    experts: int | None = None  # number of experts whose matrices are in the tensors; None: it is one module
    own: ExpertSlice | None = None  # of one expert

    @property
    def rank(self) -> int:
        return self.a.shape[0] // (self.experts or 1)

    @property
    def inputs(self) -> int:
        return self.b.shape[0] if self.own is not None and self.own.swapped else self.a.shape[1]

    @property
    def outputs(self) -> int:
        return self.own.outputs if self.own is not None else self.b.shape[0]

    @property
    def bytes(self) -> int:
        """Size of the two matrices in the file, all experts' if they are together."""
        return self.a.bytes + self.b.bytes


@dataclass(frozen=True)
class Adapter:
    """An adapter without its weights."""

    name: str  # by which requests select it
    path: Path
    base: str  # base_model_name_or_path, "" if it is not set
    modules: Mapping[str, LowRank]  # by the name in the base model of the module, or of the parameter of all experts
    targets: tuple[str, ...]  # target_modules, if it is a list of names
    layers: tuple[int, ...] | None  # layers_to_transform; None: all

    @property
    def rank(self) -> int:
        """The largest rank of a module."""
        return max(one.rank for one in self.modules.values())

    def targets_module(self, path: str) -> bool:
        """Return whether target_modules and layers_to_transform select this module."""
        if not any(path == target or path.endswith(f".{target}") for target in self.targets):
            return False
        return self.layers is None or _layer(path) in self.layers


def read_adapter(name: str, folder: Path) -> Adapter:
    """Read an adapter's configuration and tensor headers. Raises CheckpointError, with the file's name, for a missing
    or damaged file and for everything that is not plain LoRA."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such directory; adapter {name} must be a directory with {CONFIG}")
    file = folder / CONFIG
    if not file.is_file():
        raise CheckpointError(f"{folder}: no {CONFIG}; adapter {name} must be a directory that PEFT has saved")
    config = read_json_object(file)
    _check_kind(config, file)
    tensors = _tensors(folder)
    targets, layers = config.get("target_modules"), _layers(config.get("layers_to_transform"), file)
    listed = isinstance(targets, list) and not config.get("exclude_modules")
    adapter = Adapter(
        name=name,
        path=folder,
        base=str(config.get("base_model_name_or_path") or ""),
        modules=dict(_low_rank(module, sides, config, folder) for module, sides in tensors.items()),
        targets=tuple(map(str, targets)) if listed and targets else (),
        layers=layers,
    )
    for module in adapter.modules:
        if layers is not None and _layer(module) not in layers:
            raise CheckpointError(
                f"{folder / WEIGHTS}: has tensors of {module}, whose layer is not in layers_to_transform of {CONFIG}"
            )
    return adapter


def _check_kind(config: Mapping[str, Any], file: Path) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(f"{file}: peft_type is {kind!r}; supported is LORA")
    if config.get("use_dora"):
        raise CheckpointError(f"{file}: use_dora is set; DoRA is not supported, merge the adapter into the checkpoint")
    if config.get("use_qalora"):
        raise CheckpointError(f"{file}: use_qalora is set; QALoRA is not supported, merge it into the checkpoint")
    if config.get("bias", "none") != "none" or config.get("lora_bias"):
        raise CheckpointError(f"{file}: trained biases are not supported; merge the adapter into the checkpoint")
    for key, what in _EMPTY:
        if config.get(key):
            raise CheckpointError(f"{file}: {key} is set, and is not supported: {what}")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_OWN_BASE):
        raise CheckpointError(
            f"{file}: init_lora_weights is {start}, which changes the base model; convert the adapter to plain LoRA "
            "with path_initial_model_for_weight_conversion of PEFT"
        )


def _tensors(folder: Path) -> dict[str, dict[str, TensorInfo]]:
    """Return the tensors A and B of each module."""
    file = folder / WEIGHTS
    if not file.is_file():
        others = sorted(path.name for path in folder.glob("adapter_model.*"))
        instead = f", only {', '.join(others)}; convert it to safetensors" if others else ""
        raise CheckpointError(f"{folder}: no {WEIGHTS}{instead}")
    found: dict[str, dict[str, TensorInfo]] = {}
    for name, info in read_headers(file).items():
        match = _TENSOR.fullmatch(name.removeprefix(PREFIX))
        if match is None:
            raise CheckpointError(f"{file}: has {name}; {_reason(name)}")
        if info.dtype not in TYPES or len(info.shape) != 2:
            raise CheckpointError(
                f"{file}: {name} is {info.dtype} of shape {list(info.shape)}; supported are matrices of "
                f"{', '.join(TYPES)}"
            )
        found.setdefault(match["module"], {})[match["side"]] = info
    if not found:
        raise CheckpointError(f"{file}: has no tensors")
    return found


def _reason(name: str) -> str:
    if "lora_magnitude_vector" in name:
        return "DoRA is not supported, merge the adapter into the checkpoint"
    if "lora_embedding" in name:
        return "adapters of embeddings are not supported, merge the adapter into the checkpoint"
    if "lora_" in name:
        return "supported are the weights of lora_A and lora_B"
    return "whole modules are not supported (modules_to_save), merge the adapter into the checkpoint"


def _low_rank(
    module: str, sides: Mapping[str, TensorInfo], config: Mapping[str, Any], folder: Path
) -> tuple[str, LowRank]:
    """Return the name of a module or parameter, and its matrices."""
    file = folder / WEIGHTS
    module, stacked = _target(module, config, folder)
    for side in "AB":
        if side not in sides:
            raise CheckpointError(f"{file}: lacks lora_{side} of {module}; save the adapter again")
    a, b = sides["A"], sides["B"]
    rank = _number(config, "r", "rank_pattern", module, folder / CONFIG)
    alpha = _number(config, "lora_alpha", "alpha_pattern", module, folder / CONFIG)
    experts = a.shape[0] // int(rank) if stacked else 1
    if a.shape[0] != experts * rank or b.shape[1] != experts * rank:
        raise CheckpointError(
            f"{file}: lora_A of {module} has shape {list(a.shape)} and lora_B {list(b.shape)}, but {CONFIG} implies "
            f"rank {rank:g}"
        )
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return module, LowRank(a, b, scale, experts if stacked else None)


def _target(module: str, config: Mapping[str, Any], folder: Path) -> tuple[str, bool]:
    """Return the name of a module, or of the parameter that its wrapper adapts, and whether the parameter has the
    matrices of all experts."""
    wanted = config.get("target_parameters") or []
    if not isinstance(wanted, list):
        raise CheckpointError(f"{folder / CONFIG}: target_parameters must be a list of names")
    own = module
    while own.endswith(".base_layer"):
        own = own.removesuffix(".base_layer")
    depth = (len(module) - len(own)) // len(".base_layer")
    found = {name.rpartition(".")[2] for name in map(str, wanted) if _ends_with(own, name.rpartition(".")[0])}
    if not found or found == {"weight"}:
        return module, False
    parameters = [name for name in EXPERT_PARAMETERS if name in found]
    if len(parameters) < len(found) or depth >= len(parameters):
        raise CheckpointError(
            f"{folder / CONFIG}: target_parameters has {', '.join(sorted(found))} of {own}; supported are "
            f"{', '.join(EXPERT_PARAMETERS)}, each with its tensors. Merge the adapter into the checkpoint"
        )
    return f"{own}.{parameters[-1 - depth]}", True


def _ends_with(module: str, name: str) -> bool:
    return not name or module == name or module.endswith(f".{name}")


def _number(config: Mapping[str, Any], key: str, pattern_key: str, module: str, file: Path) -> float:
    """Return the value of a module: of the first pattern that matches its name, or else the common value."""
    value = config.get(key, 8)
    patterns = config.get(pattern_key) or {}
    if not isinstance(patterns, dict):
        raise CheckpointError(f"{file}: {pattern_key} must be an object")
    for pattern, own in patterns.items():
        try:
            matches = re.match(rf"(.*\.)?({pattern})$", module) is not None
        except re.error as error:
            raise CheckpointError(f"{file}: {pattern_key} has the invalid pattern {pattern!r}: {error}") from error
        if matches:
            value = own
            break
    least = 1 if key == "r" else 0
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < least:
        raise CheckpointError(f"{file}: {key} is {value!r}; it must be a number of at least {least}")
    return value


def _layers(value: Any, file: Path) -> tuple[int, ...] | None:
    if value is None:
        return None
    layers = value if isinstance(value, list) else [value]
    if not all(isinstance(layer, int) and not isinstance(layer, bool) for layer in layers):
        raise CheckpointError(f"{file}: layers_to_transform is {value!r}; it must be a number or a list of numbers")
    return tuple(layers)


def _layer(module: str) -> int | None:
    """Return the number of a module's layer: the first number in its name."""
    return next((int(part) for part in module.split(".") if part.isdigit()), None)
