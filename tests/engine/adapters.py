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
        tensors[f"base_model.model.{name}.lora_A.weight"] = a.to(dtype).contiguous()
        tensors[f"base_model.model.{name}.lora_B.weight"] = b.to(dtype).contiguous()
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
