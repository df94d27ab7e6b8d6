"""Build a Worker from an EngineConfig: load the model, allocate memory and warm up."""

import errno
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch

from engine.api.config import EngineConfig, with_values
from engine.api.errors import ConfigError, OutOfMemory
from engine.api.golden import ROOM_TOKENS, Arithmetic
from engine.api.messages import PhaseMemory
from engine.distributed.group import open_group
from engine.distributed.shared import open_shared
from engine.distributed.world import SINGLE, World, least
from engine.formats.load_time import LOAD_FORMATS
from engine.formats.native import EXECUTORS, Executor
from engine.imports import load_meta_operations
from engine.kv.layout import CODED, Layout, layout, page_sizes, with_drafts
from engine.kv.states import num_snapshots
from engine.layers.foreign import ForeignModel
from engine.layers.model import TextModel, make_pages
from engine.layers.torch_compile import ModuleCompiler
from engine.layers.torch_compile import set_up as set_up_torch_compile
from engine.layers.vocabulary import Vocabulary
from engine.lowering.adapters import adapters_problem
from engine.lowering.executors import load_functions
from engine.lowering.lower import lower
from engine.lowering.measures import widest_sum
from engine.models.adapters import read_adapter
from engine.models.checkpoint import Checkpoint, read_checkpoint
from engine.models.draft import tokens_beside
from engine.models.parts import Model, has_experts
from engine.weights.packed import PackedFile
from engine.weights.quantized import random_weights
from engine.worker.adapters import AdapterStore
from engine.worker.compile_ahead import CompileAhead
from engine.worker.device import DeviceRunner
from engine.worker.device_parts import device_parts, measured_pool
from engine.worker.draft_parts import DraftParts, read_draft_parts
from engine.worker.drafting import Drafter
from engine.worker.host import HostRunner
from engine.worker.media import MediaStore
from engine.worker.memory import Meter, memory_in_use, release_at_once, trim_heap
from engine.worker.pooled import PooledRunner
from engine.worker.pooled_device import PooledDeviceRunner
from engine.worker.rank_messages import Rendezvous
from engine.worker.ranked import RankedWorker
from engine.worker.ranks import Ranks
from engine.worker.states import allocate_states
from engine.worker.table import RequestTable
from engine.worker.warm import warm
from engine.worker.worker import Worker
from kernels.cpu.library import BF16_VARIANTS, MissingKernels, cpu_name
from kernels.cpu.program import Team
from kernels.fp8 import Fp8Products, products_of
from kernels.jit import installed, interpreted

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
    "int4": torch.uint8,  # two numbers
}


# Ranks wait for one another while they load, and one may read from a slower disk. engine.worker.watchdog detects a rank
# that hangs and ends it, which also ends the wait of the others.
RENDEZVOUS_S = 3600.0
LOGIT_ROWS = 64  # rows of logits that ranks gather at once; memory for them is reserved, but touched only if needed

Progress = Callable[[str, float], None]
OnPhaseMemory = Callable[[str, PhaseMemory], None]


def nothing(phase: str, taken: PhaseMemory) -> None:
    """Ignore the memory of a phase."""


def build_worker(
    config: EngineConfig, progress: Progress, on_memory: OnPhaseMemory = nothing, ranks: Ranks | None = None
) -> Worker | RankedWorker:
    """Build the worker of rank 0.

    progress(phase, 0…1) is called during the start, and on_memory(phase, memory) at the end of each phase. ranks: the
    other ranks of a model that several processes share; they are ended if this one fails. Raises ConfigError,
    CheckpointError or OutOfMemory, or the error that ended another rank."""
    if ranks is None:
        return _Build(config, 0, progress, on_memory).worker(lambda checkpoint, device, team: SINGLE)
    try:
        progress = ranks.track_progress(progress)
        progress("reading", 0.0)
        ranks.wait_imported()
        own = _Build(config, 0, progress, on_memory).worker(
            partial(_join, config, 0, ranks.rendezvous, ranks.set_abort)
        )
        progress("", 1.0)
        ranks.wait_built(own.blocks)
        return RankedWorker(own, ranks)
    except Exception as error:
        # The error of a collective says only that its peer is gone; `explained` finds the cause.
        found = ranks.find_cause(error) if isinstance(error, RuntimeError) else error
        ranks.close()
        raise found from None if found is error else error


def build_rank(
    config: EngineConfig, rank: int, rendezvous: Rendezvous, progress: Progress, on_memory: OnPhaseMemory = nothing
) -> Worker:
    """Build the worker of another rank than rank 0. Raises the errors of `build_worker`."""
    progress("reading", 0.0)
    return _Build(config, rank, progress, on_memory).worker(
        partial(_join, config, rank, rendezvous, lambda abort: None)
    )


def _join(
    config: EngineConfig,
    rank: int,
    rendezvous: Rendezvous,
    set_abort: Callable[[Callable[[], None]], None],
    checkpoint: Checkpoint,
    device: torch.device,
    team: Team | None,
) -> World:
    """Connect all ranks. `set_abort` gets a callback that ends the wait for a rank that is gone."""
    if team is None:
        store = Path(rendezvous.file)
        join = partial(
            open_group,
            device,
            store,
            rank,
            config.parallelism.tensor,
            ordered=config.hardware.batch_invariant,
            timeout_s=RENDEZVOUS_S,
        )
        return _run_abortable(join, set_abort) if device.type == "cpu" else join()
    world = open_shared(
        team.variant, rendezvous.memory, rank, config.parallelism.tensor, _floats(config, checkpoint.model)
    )
    set_abort(world.collective.abort)
    return world


def _run_abortable(join: Callable[[], World], set_abort: Callable[[Callable[[], None]], None]) -> World:
    """Run `join` in a thread, so that it can be aborted: gloo would wait for a rank that has exited."""
    joined: Future[World] = Future()

    def wait() -> None:
        try:
            world = join()
        except Exception as error:  # re-raised by joined.result()
            with suppress(InvalidStateError):
                joined.set_exception(error)
        else:
            with suppress(InvalidStateError):
                joined.set_result(world)

    def abort() -> None:
        with suppress(InvalidStateError):
            joined.set_exception(RuntimeError("another rank has exited"))

    threading.Thread(target=wait, name="rendezvous", daemon=True).start()
    set_abort(abort)
    return joined.result()


def _floats(config: EngineConfig, model: Model) -> int:
    """Return the size of the shared buffer per rank: sums of the largest step, or logits of many rows."""
    scheduling, tensor = config.scheduling, config.parallelism.tensor
    share = -(-model.embed.vocab // tensor)
    sums = scheduling.max_step_tokens * widest_sum(lower(model, tensor))
    return max(sums, min(scheduling.max_running, LOGIT_ROWS) * share)


Join = Callable[[Checkpoint, torch.device, Team | None], World]


@dataclass(frozen=True)
class _Loaded:
    """Models of a rank, and the layout of their keys and values."""

    checkpoint: Checkpoint
    form: Layout
    world: World
    model: TextModel | ForeignModel
    adapters: AdapterStore | None
    draft: DraftParts | None
    draft_models: tuple[TextModel, ...]  # on rank 0
    media: MediaStore | None

    @property
    def draft_bytes(self) -> int:
        return sum(model.weight_bytes for model in self.draft_models)


@dataclass(frozen=True)
class _Allocated:
    """The runner of a rank's steps, and the sizes of the memory that it allocated."""

    runner: HostRunner | DeviceRunner | PooledRunner | PooledDeviceRunner
    blocks: int  # of the pool
    reserve: int  # blocks beyond these, for golden prompts
    snapshots: int | None
    table_bytes: int
    states_bytes: int


class _Build:
    """Builds the worker of one rank, phase by phase."""

    def __init__(self, config: EngineConfig, rank: int, progress: Progress, on_memory: OnPhaseMemory) -> None:
        _check_pages(config)
        self.config, self.rank, self.progress, self.on_memory = config, rank, progress, on_memory
        self.device, self.team = _device(config, rank), _team(config)
        self.seconds: dict[str, float] = {}
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        torch.set_num_threads(config.hardware.threads)
        if config.hardware.torch_compile:
            set_up_torch_compile(config, self.device)
        torch.set_float32_matmul_precision("highest" if _is_bf16(config) else config.hardware.matmul_precision)
        on_memory("starting", memory_in_use(self.device))

    @contextmanager
    def phase(self, name: str, what: str) -> Iterator[None]:
        """Measure seconds and memory of a phase. what: for which memory may be short."""
        start = time.perf_counter()
        self.progress(name, 0.0)
        with Meter(self.device) as meter, _memory_errors(what):
            yield
        self.seconds[name] = time.perf_counter() - start
        self.on_memory(name, meter.taken)

    def advance(self, name: str) -> Callable[[float], None]:
        """Return a function that reports which share of a phase is done."""
        return lambda fraction: self.progress(name, fraction)

    def worker(self, join: Join) -> Worker:
        """Read, load, allocate, warm up and capture."""
        checkpoint = self.read()
        world = join(checkpoint, self.device, self.team)
        with CompileAhead(self.config, self.device) as ahead:
            loaded = self.load(checkpoint, world)
            allocated = self.allocate(loaded)
            worker = self.assemble(loaded, allocated)
            self.warm_up(worker, loaded, ahead)
            self.capture(allocated.runner, world)
        return worker

    def read(self) -> Checkpoint:
        model = self.config.model
        with self.phase("reading", "the checkpoint"):
            stored = model.load == "checkpoint"
            checkpoint = read_checkpoint(model.path, model.trust_remote_code, weights=stored, task=model.task)
        _check_foreign(self.config, checkpoint)
        _check_routes(self.config, checkpoint)
        return checkpoint

    def load(self, checkpoint: Checkpoint, world: World) -> _Loaded:
        config, kv_cache = self.config, self.config.quantization.kv_cache
        form = layout(
            checkpoint.model, block_tokens=config.cache.block_tokens, **page_sizes(kv_cache), ranks=world.size
        )
        checkpoint, draft = read_draft_parts(config, checkpoint, form, DTYPES[kv_cache])
        if draft is not None:
            form = with_drafts(form, draft.forms)
        pool_blocks(config, form)  # a cache that is too small is refused before weights are read
        with self.phase("loading", "the weights"), release_at_once():
            model, adapters = _loaded(config, checkpoint, form, world, self.device, self.team, self.advance("loading"))
            draft_models: tuple[TextModel, ...] = ()
            if draft is not None and self.rank == 0:
                shared = model.vocabulary if isinstance(model, TextModel) and world.size == 1 else None
                draft_models = _loaded_drafts(config, draft, self.device, shared, self.team)
            trim_heap()
            model.reserve(config.scheduling.max_step_tokens, config.scheduling.slots + config.speculation.rows)
        media = _media_store(config, model)
        return _Loaded(checkpoint, form, world, model, adapters, draft, draft_models, media)

    def allocate(self, loaded: _Loaded) -> _Allocated:
        """Allocate tables, pages and states. Profiling may change the size of the cache in `self.config`."""
        config, form = self.config, loaded.form
        reserve = _reserve(config, form, speech=loaded.checkpoint.model.audio is not None)
        snapshots = num_snapshots(loaded.model.states, config.scheduling.slots, prefix_cache=config.cache.prefix)
        table = RequestTable(
            slots=config.scheduling.slots,
            max_context=config.model.max_context,
            layout=form,
            vocab=loaded.checkpoint.model.embed.vocab,
        )
        if config.hardware.kernels == "triton":
            return self._allocate_on_device(loaded, table, reserve, snapshots)
        blocks = pool_blocks(config, form)
        with self.phase("allocating", f"a KV cache of {config.memory.kv_cache:,} bytes"):
            pages = make_pages(form, blocks + reserve, DTYPES[config.quantization.kv_cache], self.device)
            states = allocate_states(
                loaded.model.states,
                config.scheduling.slots,
                snapshots or 0,
                self.device,
                drafts=config.speculation.enabled,
            )
            runner: HostRunner | PooledRunner
            if isinstance(loaded.model, TextModel) and loaded.model.pooler is not None:
                runner = PooledRunner(loaded.model, form, pages, table, states, loaded.media)
            else:
                drafter = _drafter(loaded, table, blocks + reserve)
                runner = HostRunner(loaded.model, form, pages, table, states, loaded.media, drafter)
        return _Allocated(runner, blocks, reserve, snapshots, table.nbytes, states.nbytes)

    def _allocate_on_device(
        self, loaded: _Loaded, table: RequestTable, reserve: int, snapshots: int | None
    ) -> _Allocated:
        config, form, model = self.config, loaded.form, loaded.model
        assert isinstance(model, TextModel), "checked with the kernels"
        parts = device_parts(config, loaded.checkpoint, model, form, table, loaded.media)
        if config.memory.kv_cache_measured and self.device.type == "cuda":
            with self.phase("profiling", "the largest step"):
                measured = measured_pool(config, model, parts, reserve, loaded.draft_bytes)
                own = least(loaded.world, measured, self.device)
                config = self.config = with_values(config, {"memory.kv_cache": own})
        blocks = pool_blocks(config, form)
        with self.phase("allocating", f"a KV cache of {config.memory.kv_cache:,} bytes"):
            pages = make_pages(form, blocks + reserve, DTYPES[config.quantization.kv_cache], self.device)
            graphs = config.hardware.graph_sizes, config.hardware.mixed_graph_sizes
            runner = parts.runner(pages, *graphs, draft=_drafter(loaded, table, blocks + reserve))
        return _Allocated(runner, blocks, reserve, snapshots, parts.table_bytes, parts.states.nbytes)

    def assemble(self, loaded: _Loaded, allocated: _Allocated) -> Worker:
        config, blocks = self.config, allocated.blocks
        return Worker(
            allocated.runner,
            model=loaded.checkpoint.model,
            layout=loaded.form,
            blocks=blocks,
            snapshots=allocated.snapshots,
            memory_usage=_memory_usage(loaded, allocated),
            mapped=sum(model.memory_usage.mapped for model in (loaded.model, *loaded.draft_models)),
            # Next to a team of compiled kernels, more torch threads would only take CPU time from it; torch has little
            # work.
            threads=1 if self.team else config.hardware.threads,
            seconds=self.seconds,
            arithmetic=_arithmetic(config, self.device),
            reserved=tuple(range(blocks, blocks + allocated.reserve)),
            cpu=config.hardware.cpus[0] if self.team and config.hardware.cpus else None,
            gpu=self.device if self.device.type == "cuda" else None,
            adapters=loaded.adapters,
        )

    def warm_up(self, worker: Worker, loaded: _Loaded, ahead: CompileAhead) -> None:
        hardware = self.config.hardware
        with self.phase("warming", "the first step"):
            ahead.wait()
            compiling = (hardware.kernels == "triton" and not interpreted()) or hardware.torch_compile
            for plan in warm(loaded.checkpoint, loaded.form, self.config, compiling=compiling):
                worker.start(plan, {}).result()
            if compiling and isinstance(loaded.model, TextModel) and loaded.model.towers is not None:
                loaded.model.towers.warm()

    def capture(self, runner: object, world: World) -> None:
        if isinstance(runner, DeviceRunner) and self.config.hardware.graph_sizes:
            with self.phase("capturing", "the graphs of steps"):
                runner.capture(self.config.memory.graphs, world, self.advance("capturing"))


def _drafter(loaded: _Loaded, table: RequestTable, blocks: int) -> Drafter | None:
    if loaded.draft is None or not loaded.draft_models:
        return None
    return loaded.draft.drafter(loaded.draft_models, table, blocks, loaded.media)


def _memory_usage(loaded: _Loaded, allocated: _Allocated) -> dict[str, int]:
    """Return bytes by part. Parts that a configuration lacks are left out."""
    model, drafts, block_bytes = loaded.model, loaded.draft_models, loaded.form.block_bytes
    found = {**model.memory_usage.parts, "kv": allocated.blocks * block_bytes, "tables": allocated.table_bytes}
    if drafts:
        found["draft"] = sum(one.memory_usage.total for one in drafts)
    if allocated.reserve:
        found["self_test"] = allocated.reserve * block_bytes
    if allocated.snapshots is not None:
        found["states"] = allocated.states_bytes
    if model.buffer_bytes:
        found["buffers"] = sum(one.buffer_bytes for one in (model, *drafts))
    return found


def _loaded_drafts(
    config: EngineConfig, draft: DraftParts, device: torch.device, shared: Vocabulary | None, team: Team | None
) -> tuple[TextModel, ...]:
    """Load the models that draft, with the number formats of the target's weights. shared: tables of the target, if
    this rank has all rows. Otherwise later heads share the tables of the first head."""
    found: list[TextModel] = []
    for number, (checkpoint, form) in enumerate(zip(draft.checkpoints, draft.forms, strict=True)):
        text_model = _text_model(config, checkpoint, form, SINGLE, device, team, shared)
        _load(config, checkpoint, text_model, SINGLE, lambda fraction: None, draft=number)
        slots = config.scheduling.slots
        tokens = config.scheduling.max_step_tokens + slots * tokens_beside(len(draft.checkpoints))
        text_model.reserve(tokens, slots)
        shared = text_model.vocabulary if shared is None else shared
        found.append(text_model)
    return tuple(found)


def _media_store(config: EngineConfig, text_model: TextModel | ForeignModel) -> MediaStore | None:
    media = text_model.model.media
    if media is None or not isinstance(text_model, TextModel) or text_model.towers is None:
        return None
    return MediaStore(media, text_model.towers, text_model.dtype, text_model.device, config.cache.media)


def _reserve(config: EngineConfig, form: Layout, *, speech: bool) -> int:
    """Return the number of blocks for golden prompts, which a speech model has none of. They are added to the pool, so
    requests have no fewer blocks."""
    if not config.lifecycle.self_test.prompts or speech:
        return 0
    return form.blocks_of(ROOM_TOKENS)


def _arithmetic(config: EngineConfig, device: torch.device) -> Arithmetic:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    kernels = config.hardware.kernels
    compiled = kernels not in ("torch", "triton")
    return Arithmetic(
        device=name,
        kernels=kernels,
        dtype=config.model.dtype,
        kv_dtype=config.quantization.kv_cache,
        weights=config.quantization.weight_format,
        ranks=config.parallelism.tensor,
        precision=config.hardware.matmul_precision,
        library=f"torch {torch.__version__}"
        + (f", triton {version('triton')}" if kernels == "triton" else "")
        + (f", executor {config.hardware.executor}" if config.hardware.executor else ""),
        release=config.lifecycle.self_test.release,
        exact=compiled or (kernels == "triton" and config.hardware.batch_invariant),
    )


def pool_blocks(config: EngineConfig, form: Layout) -> int:
    """Return the number of blocks of the KV pool, including the null block. Raises OutOfMemory if one request of
    `max_context` tokens does not fit."""
    size, context, step_tokens = config.memory.kv_cache, config.model.max_context, config.scheduling.max_step_tokens
    blocks = form.blocks(size)
    needed = form.blocks_for(context, step_tokens) + 1
    if blocks < needed:
        fits = form.tokens_in(blocks - 1, step_tokens) if blocks > 1 else 0
        raise OutOfMemory(
            f"a KV cache of {size:,} bytes holds {max(0, blocks - 1)} blocks of {form.block_bytes:,} bytes, "
            f"enough for requests of {fits:,} tokens; {context:,} tokens need {needed * form.block_bytes:,} "
            f"bytes: raise hardware.kv_cache_memory to that or lower model.max_context"
        )
    return blocks


def _device(config: EngineConfig, rank: int) -> torch.device:
    if config.hardware.device != "cuda":
        return torch.device(config.hardware.device)
    if not torch.cuda.is_available():
        raise ConfigError("device=cuda: no usable CUDA device here; set hardware.device to cpu, or run on a GPU host")
    index, count = config.hardware.gpu + rank, torch.cuda.device_count()
    if index >= count:
        raise ConfigError(
            f"tensor={config.parallelism.tensor}: rank {rank} needs GPU {index}, and there are {count} GPUs"
        )
    return torch.device("cuda", index)


def _team(config: EngineConfig) -> Team | None:
    hardware = config.hardware
    if _is_bf16(config) and hardware.kernels not in BF16_VARIANTS:
        known = " and ".join(BF16_VARIANTS)
        raise ConfigError(f"matmul_precision=bfloat16: supported only by {known} kernels, not by {hardware.kernels}")
    _check_weights(config)
    if hardware.kernels in ("torch", "triton"):
        _check_kernels(config)
        return None
    if hardware.device != "cpu" or config.model.dtype != "float32":
        raise ConfigError(
            f"kernels={hardware.kernels}: supported is float32 on a CPU, not {config.model.dtype} on {hardware.device}"
        )
    if hardware.torch_compile:
        raise ConfigError(
            f"hardware.torch_compile: {hardware.kernels} kernels execute all operations; set it to false, or "
            "hardware.kernels to torch"
        )
    try:
        return Team(hardware.kernels, hardware.threads, hardware.cpus, bf16=_is_bf16(config))
    except MissingKernels as error:
        raise ConfigError(str(error)) from error


def _check_weights(config: EngineConfig) -> None:
    kernels = config.hardware.kernels
    executor: Executor = kernels if kernels == "torch" or kernels == "triton" else "compiled"
    for key, value in (("weights", config.quantization.weights), ("head", config.quantization.head)):
        format = LOAD_FORMATS.get(value)
        if format is not None and not format.roles(executor):
            those = " and ".join(one for one in EXECUTORS if format.roles(one))
            raise ConfigError(f"{key}={value}: supported only by {those} kernels, not by {config.hardware.kernels}")


def _is_bf16(config: EngineConfig) -> bool:
    return config.hardware.matmul_precision == "bfloat16"


def _check_pages(config: EngineConfig) -> None:
    triton = config.hardware.kernels == "triton"
    known = (config.model.dtype, "fp8", *CODED) if triton else ("float32", "bfloat16", "float16", *CODED)
    if config.quantization.kv_cache not in known:
        raise ConfigError(
            f"kv_dtype={config.quantization.kv_cache}: {config.hardware.kernels} kernels support {', '.join(known)}"
        )


def _check_kernels(config: EngineConfig) -> None:
    if config.hardware.torch_compile and (config.hardware.batch_invariant or config.parallelism.tensor > 1):
        raise ConfigError(
            "hardware.torch_compile: compiled sums depend on the number of tokens, and programs of several ranks are "
            "not compiled; set it to false, or batch_invariant to false and tensor to 1"
        )
    if config.hardware.executor and config.hardware.kernels != "torch":
        raise ConfigError(
            f"hardware.executor={config.hardware.executor}: replaces functions of torch; set hardware.kernels to torch"
        )
    if config.hardware.kernels == "torch":
        if config.hardware.batch_invariant:
            raise ConfigError("invariant: the sums of torch kernels depend on the batch size; set kernels to triton")
    elif not installed():
        raise ConfigError("kernels=triton: triton is not installed; install the release that this torch requires")
    elif config.hardware.device != "cuda" and not interpreted():
        raise ConfigError("kernels=triton: a GPU is required; on a CPU, set TRITON_INTERPRET=1 (for tests only)")


def _check_routes(config: EngineConfig, checkpoint: Checkpoint) -> None:
    model = checkpoint.model
    if config.return_routed_experts and (model.foreign is not None or not has_experts(model)):
        raise ConfigError(
            "engine.return_routed_experts: the model has no layers with experts, or is computed by transformers' code; "
            "set it to false"
        )


def _check_foreign(config: EngineConfig, checkpoint: Checkpoint) -> None:
    foreign, kernels = checkpoint.model.foreign, config.hardware.kernels
    tensor, weights = config.parallelism.tensor, config.quantization.weights
    if foreign is not None and (kernels != "torch" or tensor > 1 or weights != "stored"):
        raise ConfigError(
            f"kernels={kernels}, tensor={tensor}, weights={weights}: {foreign.architecture} is computed by "
            "transformers' code, with torch kernels, one rank and weights as stored"
        )
    if foreign is not None and config.quantization.kv_cache in CODED:
        raise ConfigError(
            f"kv_dtype={config.quantization.kv_cache}: {foreign.architecture} is computed by transformers' code, which "
            "needs keys and values of at least 16 bits"
        )
    if foreign is not None and (config.adapters or config.adapter_loading.max_active is not None):
        raise ConfigError(f"adapters: {adapters_problem(checkpoint.model)}")


def _fp8_products(config: EngineConfig, device: torch.device) -> Fp8Products | None:
    """Return how Triton kernels multiply by fp8 weights on this device. The interpreter supports everything."""
    if config.hardware.kernels != "triton":
        return None
    if device.type != "cuda":
        return Fp8Products()
    capability = None if torch.version.hip else torch.cuda.get_device_capability(device)
    return products_of(capability, invariant=config.hardware.batch_invariant)


def _loaded(
    config: EngineConfig,
    checkpoint: Checkpoint,
    form: Layout,
    world: World,
    device: torch.device,
    team: Team | None,
    progress: Callable[[float], None],
) -> tuple[TextModel | ForeignModel, AdapterStore | None]:
    if checkpoint.model.foreign is not None:
        load_meta_operations()
        compiler = ModuleCompiler() if config.hardware.torch_compile else None
        foreign_model = ForeignModel(checkpoint.model, form, DTYPES[config.model.dtype], device, compiler=compiler)
        if config.model.load == "random":
            foreign_model.fill_random(checkpoint)
        else:
            foreign_model.load(checkpoint, progress)
        return foreign_model, None
    text_model = _text_model(config, checkpoint, form, world, device, team)
    adapters, loading = [read_adapter(one.name, Path(one.path)) for one in config.adapters], config.adapter_loading
    store = None
    if loading.max_active is None:
        text_model.load_adapters(adapters)
    else:
        store = AdapterStore(text_model.reserve_adapters(adapters, loading.max_active, loading.max_rank), loading)
    _load(config, checkpoint, text_model, world, progress)
    return text_model, store


def _text_model(
    config: EngineConfig,
    checkpoint: Checkpoint,
    form: Layout,
    world: World,
    device: torch.device,
    team: Team | None,
    shared: Vocabulary | None = None,
) -> TextModel:
    return TextModel(
        checkpoint.model,
        form,
        world,
        DTYPES[config.model.dtype],
        device,
        team,
        config.quantization.weights,
        invariant=config.hardware.batch_invariant and config.hardware.kernels == "triton",
        stacked=config.hardware.kernels == "triton",
        fp8=_fp8_products(config, device),
        group=config.quantization.group_size,
        head=config.quantization.head,
        embedding=config.quantization.embedding,
        shared=shared,
        routes=config.return_routed_experts,
        torch_compile=config.hardware.torch_compile,
        functions=load_functions(config.hardware.executor) if config.hardware.executor else {},
    )


def _load(
    config: EngineConfig,
    checkpoint: Checkpoint,
    text_model: TextModel,
    world: World,
    progress: Callable[[float], None],
    draft: int | None = None,
) -> None:
    """Load the weights. draft: number of the draft model or head."""
    if config.model.load == "random":
        text_model.fill(random_weights(checkpoint.model, checkpoint.quantization, text_model.dtype, text_model.device))
        return
    known = _known(config, checkpoint, text_model.target.team, world, "" if draft is None else f", draft {draft}")
    text_model.load(checkpoint, progress, known)
    if known is not None:
        known.close()


def _known(
    config: EngineConfig, checkpoint: Checkpoint, team: Team | None, world: World, part: str
) -> PackedFile | None:
    """Return the cache of quantized weights, if there is one. part: distinguishes models of the same files, whose
    matrices have the same names."""
    quantized = config.quantization.weights in LOAD_FORMATS or config.quantization.head in LOAD_FORMATS
    if team is None or not quantized or config.quantization.folder is None:
        return None
    files = {info.file for info in checkpoint.tensors.values()}
    return PackedFile(
        Path(config.quantization.folder),
        files,
        config.quantization.weight_format + part,
        team.tiling.exact,
        (world.rank, world.size),
    )


@contextmanager
def _memory_errors(what: str) -> Iterator[None]:
    """Convert out-of-memory errors of allocators to OutOfMemory."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise _no_memory(what) from error
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise _no_memory(what) from error
    except RuntimeError as error:
        # torch's CPU allocator has no exception class of its own
        if "DefaultCPUAllocator" not in str(error):
            raise
        raise _no_memory(what) from error


def _no_memory(what: str) -> OutOfMemory:
    return OutOfMemory(
        f"not enough memory for {what}: free some, lower hardware.kv_cache_memory, or set model.dtype to bfloat16"
    )
