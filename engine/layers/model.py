"""A runnable model: token ids and pages in, hidden states and logits out."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor

from engine.api.config import EmbeddingBits, HeadBits, WeightBits
from engine.api.errors import ConfigError
from engine.distributed.shared import Shared
from engine.distributed.world import World
from engine.formats.load_time import LOAD_FORMATS
from engine.kv.layout import Layout
from engine.kv.states import state_layout
from engine.layers.batch import Batch
from engine.layers.compiled.model import CompiledModel
from engine.layers.draft_head import DraftHead
from engine.layers.linear import Target
from engine.layers.loaded import unloaded
from engine.layers.lora import NO_ADAPTERS, AdapterSlots, empty_adapters, load_adapters
from engine.layers.memory_usage import MemoryUsage, memory_usage
from engine.layers.pooler import PoolerLayer
from engine.layers.reference.executor import ReferenceExecutor
from engine.layers.states import LayerStates
from engine.layers.towers import Towers
from engine.layers.vocabulary import Vocabulary
from engine.lowering.adapters import (
    adapter_stacks,
    adapters_problem,
    check_groups,
    check_ranks,
    fitted_adapters,
    slot_stacks,
)
from engine.lowering.executors import Functions
from engine.lowering.footprint import head_bits, quantization_group
from engine.lowering.lower import lower, state_projection
from engine.lowering.rewrites import keep_routes
from engine.models.adapters import Adapter
from engine.models.checkpoint import Checkpoint, check_tensors
from engine.models.parts import Model
from engine.models.sources import shared_tensors, sources
from engine.models.stored import stored_tensors
from engine.weights.files import Weights
from engine.weights.packed import PackedFile
from engine.weights.quantized import QuantizedWeights
from engine.weights.random import RandomWeights
from kernels.cpu.memory import region
from kernels.cpu.program import Team
from kernels.fp8 import Fp8Products


def make_pages(layout: Layout, blocks: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate the KV pool, zeroed: pages that were never written are read with weight 0, so they must be finite.
    Scales count as additional elements of each key and value."""
    size = layout.vector_bytes // dtype.itemsize
    shape = (blocks, layout.layers_per_block, layout.planes, layout.block_tokens, layout.kv_heads, size)
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    if not layout.groups:
        return torch.zeros(shape, dtype=dtype)
    # Anonymous memory is zero and not allocated until it is written. Filling 2 GiB would add 1.5 s to every start.
    size = math.prod(shape) * dtype.itemsize
    return region(size)[:size].view(dtype).view(shape)


def page_dtype(layout: Layout, activations: torch.dtype) -> torch.dtype:
    """Return the type of pages of this layout on a GPU."""
    if layout.element_bytes > 1:
        return activations
    return torch.uint8 if layout.numbers > 1 else torch.int8 if layout.scale_bytes else torch.float8_e4m3fn


class TextModel:
    """A model on one rank. Immutable after `load`; its only state is the pages, which the caller owns."""

    memory_usage = MemoryUsage({}, 0)

    def __init__(
        self,
        model: Model,
        layout: Layout,
        world: World,
        dtype: torch.dtype,
        device: torch.device | str,
        team: Team | None = None,
        bits: WeightBits = "stored",
        invariant: bool = False,
        stacked: bool = False,
        fp8: Fp8Products | None = None,
        group: int = 0,
        head: HeadBits = "auto",
        embedding: EmbeddingBits = "stored",
        shared: Vocabulary | None = None,
        routes: bool = False,
        torch_compile: bool = False,
        functions: Functions = MappingProxyType({}),
    ) -> None:
        """team: threads of the compiled kernels, which run float32 steps on a CPU; several ranks must share memory.
        shared: loaded tables of the model that this one drafts for.
        bits, group, head, embedding: format to which matrices, the head and the embedding are quantized.
        invariant, stacked, fp8: see Target.
        routes: keep the selected experts of each step (`routes_of_step`). torch_compile: compile the operations of
        torch with torch.compile (engine/lowering/segments.py). functions: of an executor of another package."""
        self.model, self.layout = model, layout
        self.dtype, self.device = dtype, torch.device(device)
        of_head = head_bits(bits, head)
        executor = "compiled" if team is not None else "torch" if fp8 is None else "triton"
        for one in (bits, of_head):
            format = LOAD_FORMATS.get(one)
            if format is not None and not format.roles(executor):
                raise ValueError(f"torch cannot multiply by {one} weights; use weights as stored, or other kernels")
        self.target = Target(
            dtype,
            self.device,
            team,
            bits,
            group=group or quantization_group(bits, model),
            head=of_head,
            head_group=group or quantization_group(of_head, model),
            embedding=embedding,
            invariant=invariant,
            stacked=stacked,
            fp8=fp8,
        )
        self._collective = world.collective if isinstance(world, Shared) else None
        if team is not None and (dtype != torch.float32 or self.device.type != "cpu"):
            raise ValueError(f"compiled kernels support float32 on a CPU, not {dtype} on {device}")
        if team is not None and world.size > 1 and self._collective is None:
            raise ValueError(f"compiled kernels of {world.size} ranks need a world with shared memory")
        self.compiled: CompiledModel | None = None
        self.program = keep_routes(lower(model, world.size)) if routes else lower(model, world.size)
        self.states = state_layout(model, world.size)
        self.vocabulary = Vocabulary(model, world, shared)
        self.weights = unloaded(self.program, self.vocabulary, world)
        self.pooler = PoolerLayer(model.pooler) if model.pooler is not None else None
        # Every rank has the whole tower, with weights as stored.
        whole = replace(self.target, bits="stored", fp8=None)
        self.towers = None if model.media is None else Towers(model.media, world, whole, triton=executor == "triton")
        projection = state_projection(model)
        self.draft_head = (
            None if projection is None or model.head is None else DraftHead(projection, model.head.ids, self.target)
        )
        self.world = world
        self.adapters = NO_ADAPTERS
        self.torch_compile = torch_compile
        of_torch = torch_compile and executor == "torch"
        self._reference = ReferenceExecutor(
            *(self.program, self.weights, world, layout, dtype), torch_compile=of_torch, functions=functions
        )

    @property
    def weight_bytes(self) -> int:
        """Size of all allocated weights."""
        return self.memory_usage.total

    @torch.inference_mode()
    def load_adapters(self, adapters: Sequence[Adapter]) -> None:
        """Load LoRA adapters, before the weights. Rows select them by number. Raises CheckpointError for an adapter of
        another model, ConfigError for a model without adapters."""
        fitted = fitted_adapters(self.model, adapters)
        stacks = adapter_stacks(self.program, fitted, self.world.size)
        fused = self.target.executor == "triton"
        if fused:
            check_groups(stacks)
        self.adapters = load_adapters(fitted, stacks, self.world, self.dtype, self.device, fused=fused)
        self._reference.adapters = self.adapters

    @torch.inference_mode()
    def reserve_adapters(self, adapters: Sequence[Adapter], num_slots: int, max_rank: int) -> AdapterSlots:
        """Allocate slots for LoRA adapters that are loaded later, before the weights. Check the first adapters. Raises
        CheckpointError for an adapter of another model, ConfigError for a model without adapters."""
        problem = adapters_problem(self.model)
        if problem is not None:
            raise ConfigError(f"adapter_loading: {problem}")
        for adapter in adapters:
            check_ranks(adapter, max_rank)
        fitted = fitted_adapters(self.model, adapters)
        stacks = slot_stacks(self.program, num_slots, max_rank, self.world.size)
        fused = self.target.executor == "triton"
        if fused:
            check_groups(stacks)
        empty = empty_adapters(stacks, self.world, self.dtype, self.device, fused=fused)
        self.adapters = self._reference.adapters = empty
        return AdapterSlots(self.model, stacks, self.adapters, self.world, self.dtype, fitted)

    @torch.inference_mode()
    def load(
        self,
        checkpoint: Checkpoint,
        progress: Callable[[float], None] = lambda fraction: None,
        known: PackedFile | None = None,
    ) -> None:
        """Load every weight from the checkpoint, one matrix at a time, so that at most one matrix is in memory twice.
        Raises CheckpointError if tensors are missing, unknown or have wrong shapes."""
        shared = self._shared_tensors()
        check_tensors(self.model, checkpoint.tensors, checkpoint.quantization, shared)
        names = [name for name in stored_tensors(self.model, checkpoint.quantization) if name not in shared]
        weights = Weights({n: checkpoint.tensors[n] for n in names if n in checkpoint.tensors}, progress)
        own = checkpoint.quantization
        most = weights if known is None or not known.has_matrices else known.weights
        with most.reading_ahead():
            self.fill(weights if own is None else QuantizedWeights(weights, own, sources(self.model)), known)
        weights.close()

    @torch.inference_mode()
    def fill(self, weights: Weights | QuantizedWeights | RandomWeights, known: PackedFile | None = None) -> None:
        """Let every layer read its weights."""
        wanted = sources(self.model).keys() - self._shared_tensors()
        loadables = [*self.weights.by_name.values(), *([] if self.pooler is None else [self.pooler])]
        quantized = weights if isinstance(weights, QuantizedWeights) else None
        target = replace(self.target, known=known, quantized=quantized)
        for layer in loadables:
            layer.load(weights.read, target)
            weights.release()
            if known is not None:
                known.release()
        if self.towers is not None:
            self.towers.load(weights.read)
            weights.release()
        if self.draft_head is not None:
            self.draft_head.load(weights.read, target)
            weights.release()
        self.memory_usage = memory_usage(
            self.program, self.weights, self.pooler, self.adapters, self.towers, self.draft_head
        )
        forgotten = wanted - weights.read_names
        assert not forgotten, f"no layer loads the declared tensors {sorted(forgotten)[:3]}"
        if self.target.team is not None and not self.model.encoder_only:
            self.compiled = CompiledModel(
                *(self.program, self.weights, self.vocabulary, self.layout, self.target.team, self._collective),
                self.adapters,
            )

    def reserve(self, tokens: int, rows: int) -> None:
        """Allocate the buffers for steps of up to this many tokens and this many rows of logits."""
        if self.compiled is not None:
            self.compiled.reserve(tokens, rows)
        if self.draft_head is not None:
            self.draft_head.reserve(tokens)

    @property
    def buffer_bytes(self) -> int:
        """Size of the buffers that are kept between steps."""
        own = 0 if self.compiled is None else self.compiled.buffer_bytes
        return own + (0 if self.draft_head is None else self.draft_head.buffer_bytes)

    @property
    def kept_states(self) -> Tensor | None:
        """Inputs of the layers `Model.kept_layers` in the last step, [tokens, layers · hidden], valid until the next
        call. None if there are no such layers."""
        return self._reference.kept_states if self.compiled is None else self.compiled.kept_states

    @property
    def queries(self) -> Tensor | None:
        """Queries of cross-attention of this rank's heads in the last step, [tokens, layers · heads · head_dim], in the
        layers with alignment heads. Valid until the next call. None for other models."""
        return self._reference.queries if self.compiled is None else self.compiled.queries

    def _shared_tensors(self) -> frozenset[str]:
        """Return the tensors of this model's tables that another model has loaded."""
        has_shared = self.vocabulary.shared_table is not None or self.vocabulary.shared_head is not None
        return shared_tensors(self.model) if has_shared else frozenset()

    @torch.inference_mode()
    def forward(self, batch: Batch, pages: Tensor, states: LayerStates = ()) -> Tensor:
        """Return the hidden states after the final norm, [tokens, hidden], valid until the next call. Writes the
        tokens' keys and values to `pages`, and updates `states` of a recurrent model."""
        if self.compiled is not None:
            return self.compiled.forward(batch, pages, states)
        return self._reference.forward(batch, pages, states)

    def routes_of_step(self, tokens: int) -> Tensor | None:
        """Return the selected experts of all layers in the last step, [tokens, experts], if they are kept."""
        if not self.program.routes:
            return None
        return self._reference.routes if self.compiled is None else self.compiled.routes(tokens)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits: [rows, hidden] → [rows, vocab] fp32, scaled and capped, valid until the next call."""
        if hidden.shape[0] == 0:
            return torch.empty((0, self.model.embed.vocab), device=self.device)
        if self.compiled is not None:
            return self.compiled.logits(hidden)
        return self.vocabulary.logits(hidden)
