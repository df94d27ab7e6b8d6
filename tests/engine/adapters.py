"""Adapter folders as PEFT saves them, and the same adapter merged into a model of transformers."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

Pairs = dict[str, tuple[Tensor, Tensor]]  # module -> A [rank, inputs], B [outputs, rank]


def modules(
    model: nn.Module, targets: Sequence[str], chosen: Callable[[str], bool] = lambda name: True
) -> dict[str, nn.Module]:
    """Return the modules of a model whose last name is one of the targets."""
    named = ((name, module) for name, module in model.named_modules() if name.rpartition(".")[2] in targets)
    return {name: module for name, module in named if chosen(name)}


def sizes(module: nn.Module) -> tuple[int, int]:
    """Return inputs and outputs; GPT-2 stores the transpose."""
    outputs, inputs = module.weight.shape
    return (outputs, inputs) if isinstance(module, transformers.pytorch_utils.Conv1D) else (inputs, outputs)


def random_pairs(
    model: nn.Module,
    targets: Sequence[str],
    rank: int | Callable[[str], int] = 4,
    *,
    seed: int = 0,
    size: float = 0.15,
    chosen: Callable[[str], bool] = lambda name: True,
) -> Pairs:
    made = torch.Generator().manual_seed(seed)
    pairs = {}
    for name, module in modules(model, targets, chosen).items():
        inputs, outputs = sizes(module)
        own = rank(name) if callable(rank) else rank
        pairs[name] = tuple(torch.randn(shape, generator=made) * size for shape in ((own, inputs), (outputs, own)))
    return pairs


def write_adapter(
    folder: Path,
    pairs: Pairs,
    *,
    rank: int = 4,
    dtype: torch.dtype = torch.float32,
    extra: Mapping[str, Tensor] | None = None,
    **config: Any,
) -> Path:
    """Write adapter_config.json and adapter_model.safetensors. config: values that differ from PEFT's defaults."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny/base",
        "r": rank,
        "lora_alpha": 8,
        "bias": "none",
        "use_dora": False,
        "use_rslora": False,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "layers_to_transform": None,
        "target_modules": sorted({name.rpartition(".")[2] for name in pairs}),
        "init_lora_weights": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps({**values, **config}))
    tensors = {}
    for name, (a, b) in pairs.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = a.to(dtype).contiguous().clone()
        tensors[f"base_model.model.{name}.lora_B.weight"] = b.to(dtype).contiguous().clone()
    save_file({**tensors, **(extra or {})}, folder / "adapter_model.safetensors")
    return folder


@torch.no_grad()
def merge(model: nn.Module, pairs: Pairs, scale: float | Callable[[str], float] = 2.0) -> None:
    """Add s · B A to the weights. The default is lora_alpha 8 with rank 4."""
    for name, (a, b) in pairs.items():
        module = model.get_submodule(name)
        own = scale(name) if callable(scale) else scale
        delta = own * (b.double() @ a.double())
        module.weight += (delta.T if isinstance(module, transformers.pytorch_utils.Conv1D) else delta).to(
            module.weight.dtype
        )


def rslora_scale(alpha: float, rank: int) -> float:
    return alpha / math.sqrt(rank)


# Routed experts. transformers has the matrices of all experts of a layer in one parameter.

EXPERT_PARAMETERS = ("gate_up_proj", "down_proj")


def expert_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that have the experts' parameters, by name."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "gate_up_proj")}


def stacked_pairs(
    model: nn.Module, rank: int, *, seed: int = 0, size: float = 0.15, parameters: Sequence[str] = EXPERT_PARAMETERS
) -> Pairs:
    """Return A, [experts · rank, inputs], and B, [outputs, rank · experts], of parameters, as PEFT has them."""
    made = torch.Generator().manual_seed(seed)
    pairs = {}
    for name, module in expert_modules(model).items():
        for parameter in parameters:
            experts, outputs, inputs = getattr(module, parameter).shape
            if getattr(module, "is_transposed", False):
                outputs, inputs = inputs, outputs
            shapes = (experts * rank, inputs), (outputs, rank * experts)
            pairs[f"{name}.{parameter}"] = tuple(torch.randn(shape, generator=made) * size for shape in shapes)
    return pairs


@torch.no_grad
def merge_experts(model: nn.Module, pairs: Pairs, scale: float = 2.0) -> None:
    """Add the change to the parameters, by the sums that PEFT's ParamWrapper computes."""
    for name, (a, b) in pairs.items():
        module, parameter = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        weight = getattr(module, parameter)
        transposed = getattr(module, "is_transposed", False)
        a, b = a.double().reshape(len(weight), -1, a.shape[1]), b.double().reshape(len(b), -1, len(weight))
        equation = "o r e, e r i -> e i o" if transposed else "o r e, e r i -> e o i"
        weight += (scale * torch.einsum(equation, b, a)).to(weight.dtype)


@torch.no_grad
def merge_single_experts(model: nn.Module, pairs: Pairs, names: Mapping[str, Sequence[str]], scale: float) -> None:
    """Add the change of modules of single experts. names: as in `of_each_expert`."""
    for name, (a, b) in pairs.items():
        path, expert, own = name.rsplit(".", 2)
        ((parameter, halves),) = ((key, each) for key, each in names.items() if own in each)
        weight = getattr(model.get_submodule(path), parameter)[int(expert)]
        half = weight.chunk(len(halves))[halves.index(own)]
        half += (scale * (b.double() @ a.double())).to(weight.dtype)


def nested(pairs: Pairs) -> Pairs:
    """Return the pairs with the names of PEFT's nested wrappers: the last parameter of a module is the outermost."""
    modules: dict[str, list[str]] = {}
    for name in pairs:
        module, _, parameter = name.rpartition(".")
        modules.setdefault(module, []).append(parameter)
    return {
        module + ".base_layer" * (len(own) - 1 - depth): pairs[f"{module}.{parameter}"]
        for module, own in modules.items()
        for depth, parameter in enumerate(own)
    }


def write_stacked(folder: Path, pairs: Pairs, *, rank: int, **config: Any) -> Path:
    parameters = sorted({".".join(name.split(".")[-2:]) for name in pairs})
    return write_adapter(folder, nested(pairs), rank=rank, target_parameters=parameters, target_modules=[], **config)


def of_each_expert(pairs: Pairs, experts: int, names: Mapping[str, Sequence[str]]) -> Pairs:
    """Return the same change by modules of single experts. names: modules of each parameter, such as gate and up."""
    found = {}
    for name, (a, b) in pairs.items():
        module, parameter = name.rpartition(".")[0], name.rpartition(".")[2]
        each_a, each_b = a.reshape(experts, -1, a.shape[1]), b.reshape(len(b), -1, experts)
        for expert in range(experts):
            for own, half in zip(names[parameter], each_b[..., expert].chunk(len(names[parameter])), strict=True):
                found[f"{module}.{expert}.{own}"] = each_a[expert], half
    return found
