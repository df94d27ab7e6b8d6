"""Compile every kernel that an engine with a certain model launches, without an engine and without a GPU.

    python -m engine.worker.precompile CHECKPOINT… --dtype bfloat16 --kv-dtype bfloat16 fp8 --target sm_90 --cache DIR

Only config.json of a checkpoint is read. The worker is built on torch's `meta` device, with weights without data, and
runs its warm-up steps. kernels.jit records the launches, and kernels.report compiles them. A warm worker launches no
other kernels.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path

import torch

from engine.api.config import (
    MAX_RUNNING,
    AdapterLoadingConfig,
    EngineConfig,
    HardwareConfig,
    MemoryConfig,
    ModelConfig,
    QuantizationConfig,
    SchedulingConfig,
    TaskConfig,
    WeightBits,
    graph_ladder,
    mixed_graph_ladder,
    read_config,
)
from engine.api.messages import Sampling
from engine.core.plan import NewRow, Row, StepPlan
from engine.distributed.world import SINGLE
from engine.kv.layout import CODED, NULL_BLOCK, Layout, layout, page_sizes
from engine.layers.model import TextModel, make_pages
from engine.models.checkpoint import read_checkpoint
from engine.models.parts import Model
from engine.weights.quantized import random_weights
from engine.worker.build import DTYPES
from engine.worker.device_parts import DeviceParts, device_parts
from engine.worker.table import RequestTable
from engine.worker.warm import warm
from engine.worker.worker import Runner
from kernels.fp8 import Fp8Products, products_of
from kernels.jit import recorded
from kernels.report import OpLaunch, Source, add_options, report
from kernels.tools.aot import Target

NO_SLOTS = AdapterLoadingConfig()


def config_for(
    path: Path,
    dtype: str,
    kv_dtype: str,
    *,
    invariant: bool,
    weights: WeightBits = "stored",
    task: str = "auto",
    adapters: AdapterLoadingConfig = NO_SLOTS,
) -> EngineConfig:
    """Return the configuration that the appliance would resolve, with sizes that do not affect kernels."""
    return EngineConfig(
        model=ModelConfig(
            path=str(path),
            dtype=dtype,  # type: ignore[arg-type]  # checked as it is decoded
            max_context=16384,
            load="random",
            task=TaskConfig(task=task),  # type: ignore[arg-type]
        ),
        quantization=QuantizationConfig(weights=weights, kv_cache=kv_dtype),  # type: ignore[arg-type]
        hardware=HardwareConfig(
            device="cuda",
            kernels="triton",
            batch_invariant=invariant,
            graph_sizes=graph_ladder(MAX_RUNNING),
            mixed_graph_sizes=mixed_graph_ladder(16384),
        ),
        adapter_loading=adapters,
        memory=MemoryConfig(kv_cache=1),
        # expert tiles are largest with 64 tokens per expert: here up to 1 of 256 experts per token
        scheduling=SchedulingConfig(max_running=MAX_RUNNING, max_step_tokens=16384),
    )


def serving_launches(target: Target, *, config: EngineConfig) -> list[OpLaunch]:
    """Return the launches of a worker's first steps and of captured decode steps of every size. Empty if the target
    does not support the type of the pages."""
    if config.quantization.kv_cache == "fp8" and not target.fp8:
        return []
    device = torch.device("meta")
    parts, model = parts_on(device, config, _products(target, config))
    runner, form = runner_on(device, parts, config), parts.layout
    with recorded() as launches, torch.inference_mode():
        if parts.model.towers is not None:
            parts.model.towers.warm()
        checkpoint = read_checkpoint(config.model.path, weights=False, task=config.model.task)
        for plan in warm(checkpoint, form, config, compiling=True):
            runner.start(plan, {})
        for size in config.hardware.graph_sizes if model.pooler is None else ():
            runner.start(_decode_step(size, form), {})
    name = f"{_architecture(config)} {config.model.dtype}" + (
        f" {config.quantization.kv_cache}" if config.quantization.kv_cache in ("fp8", *CODED) else ""
    )
    name += "" if config.quantization.weights == "stored" else f" {config.quantization.weights} weights"
    return [OpLaunch(launch.kernel.fn.__name__.removesuffix("_kernel"), name, launch) for launch in launches]


@torch.inference_mode()
def runner_on(device: torch.device, parts: DeviceParts, config: EngineConfig) -> Runner:
    """Return the runner of a worker with these components, which has two blocks of pages."""
    return parts.runner(make_pages(parts.layout, 2, DTYPES[config.quantization.kv_cache], device))


@torch.inference_mode()
def parts_on(device: torch.device, config: EngineConfig, fp8: Fp8Products) -> tuple[DeviceParts, Model]:
    """Return the components and the model of a worker with random weights on this device."""
    checkpoint = read_checkpoint(config.model.path, weights=False, task=config.model.task)
    model, dtype = checkpoint.model, DTYPES[config.model.dtype]
    form = layout(model, block_tokens=config.cache.block_tokens, **page_sizes(config.quantization.kv_cache))
    options = {
        "bits": config.quantization.weights,
        "invariant": config.hardware.batch_invariant,
        "stacked": True,
        "fp8": fp8,
        "routes": config.return_routed_experts,
    }
    text_model = TextModel(model, form, SINGLE, dtype, device, **options)
    if config.adapter_loading.max_active is not None:
        text_model.reserve_adapters((), config.adapter_loading.max_active, config.adapter_loading.max_rank)
    text_model.fill(random_weights(model, checkpoint.quantization, dtype, device))
    table = RequestTable(
        slots=config.scheduling.slots, max_context=config.model.max_context, layout=form, vocab=model.embed.vocab
    )
    return device_parts(config, checkpoint, text_model, form, table), model


def _products(target: Target, config: EngineConfig) -> Fp8Products:
    """Return how a process on this target would multiply by fp8 weights."""
    capability = divmod(int(target.arch), 10) if target.backend == "cuda" else None
    return products_of(capability, invariant=config.hardware.batch_invariant)


def _architecture(config: EngineConfig) -> str:
    return read_checkpoint(config.model.path, weights=False, task=config.model.task).architecture


def _decode_step(rows: int, form: Layout) -> StepPlan:
    """Return a step of new requests with one token each."""
    null = tuple((NULL_BLOCK,) for _ in form.groups)
    new = tuple(NewRow(slot, (0,), 1, Sampling(), (0,), 1) for slot in range(rows))
    return StepPlan(0, new, (), tuple(Row(slot, 0, 1, True, null) for slot in range(rows)))


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    wanted: list[Source] = [partial(serving_launches, config=config) for config in configs(options)]
    return report(wanted, options)


def configs(options: argparse.Namespace) -> list[EngineConfig]:
    """Return the configurations to compile for."""
    if options.config is not None:
        return [read_config(options.config)]
    return [
        config_for(
            path,
            dtype,
            dtype if kv == "auto" else kv,
            invariant=invariant == "yes",
            weights="stored" if weights == "auto" else weights,
            task=options.task,
            adapters=AdapterLoadingConfig(max_active=options.adapters, max_rank=options.max_rank),
        )
        for path, dtype, kv, weights, invariant in product(
            options.checkpoint, options.dtype, options.kv_dtype, options.weights, options.invariant
        )
    ]


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m engine.worker.precompile",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", nargs="*", type=Path, help="folder with a config.json")
    parser.add_argument("--config", type=Path, help="JSON file with the configuration of an engine, instead")
    parser.add_argument("--dtype", nargs="+", choices=("bfloat16", "float16", "float32"), default=["bfloat16"])
    parser.add_argument(
        "--kv-dtype", nargs="+", choices=("auto", "fp8", *CODED), default=["auto"], help="auto: as --dtype"
    )
    parser.add_argument("--weights", nargs="+", choices=("auto", "fp8"), default=["auto"], help="auto: as stored")
    parser.add_argument("--invariant", nargs="+", choices=("no", "yes"), default=["no"])
    parser.add_argument("--task", choices=("auto", "generate", "embed", "classify", "score"), default="auto")
    parser.add_argument("--adapters", type=int, help="slots for LoRA adapters (adapter_loading.max_active)")
    parser.add_argument("--max-rank", type=int, default=16, help="largest rank of an adapter")
    add_options(parser)
    options = parser.parse_args(arguments)
    if bool(options.checkpoint) == bool(options.config):
        parser.error("name checkpoints, or --config with one file")
    return options


if __name__ == "__main__":
    sys.exit(main())
