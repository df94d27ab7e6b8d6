"""Components of a GPU's runner, and the memory that its largest step takes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from engine.api.config import EngineConfig
from engine.api.messages import Pooling
from engine.kv.layout import Layout, blocks_of
from engine.kv.states import num_snapshots
from engine.layers.fused.model import FusedModel
from engine.layers.fused.step import CrossAttentionInputs, DeviceStep
from engine.layers.fused_pooler import FusedPooler
from engine.layers.model import TextModel, make_pages, page_dtype
from engine.lowering.media_memory import media_bytes
from engine.models.checkpoint import Checkpoint
from engine.models.kv_scales import read_kv_scales
from engine.worker.device import DeviceRunner
from engine.worker.device_table import DeviceTable
from engine.worker.drafting import Drafter
from engine.worker.graphs import Recorder, recorder_of
from engine.worker.media import MediaStore
from engine.worker.pooled_device import PooledDeviceRunner
from engine.worker.states import States, allocate_states
from engine.worker.table import RequestTable

SAMPLING_COPIES = 3  # copies of the logits that sampling may allocate
SPARE_BYTES = 256 * 2**20  # device memory left free for allocations outside of torch


@dataclass(frozen=True)
class DeviceParts:
    model: FusedModel
    layout: Layout
    table: RequestTable
    device_table: DeviceTable
    pooler: FusedPooler | None
    states: States  # empty without recurrent layers
    media: MediaStore | None = None

    @property
    def table_bytes(self) -> int:
        """Size of the request table on the device, without pages."""
        return self.device_table.nbytes + (0 if self.pooler is None else self.pooler.nbytes)

    def runner(
        self,
        pages: Tensor,
        graph_sizes: Sequence[int] = (),
        mixed_graph_sizes: Sequence[int] = (),
        recorders: Callable[[torch.device], Recorder | None] = recorder_of,
        draft: Drafter | None = None,
    ) -> DeviceRunner | PooledDeviceRunner:
        """recorders: returns a recorder of graphs with a memory pool of its own."""
        states = self.states if self.states.layout.layers else None
        if self.pooler is not None:
            parts = self.model, self.pooler, self.layout, pages, self.device_table
            return PooledDeviceRunner(*parts, states, self.media)
        recorder, mixed_recorder = recorders(pages.device), recorders(pages.device)
        tables, mixed = (self.table, self.device_table), (mixed_graph_sizes, mixed_recorder)
        runner = self.model, self.layout, pages, *tables, graph_sizes, recorder, states, self.media, *mixed
        return DeviceRunner(*runner, draft)


def device_parts(
    config: EngineConfig,
    checkpoint: Checkpoint,
    text_model: TextModel,
    form: Layout,
    table: RequestTable,
    media: MediaStore | None = None,
) -> DeviceParts:
    scales = None
    if config.quantization.kv_cache == "fp8":
        scales = read_kv_scales(checkpoint.path, checkpoint.model, checkpoint.tensors)
    slots, device, embed = config.scheduling.slots, text_model.device, checkpoint.model.embed
    device_table = DeviceTable(
        slots=slots,
        max_context=config.model.max_context,
        layout=form,
        device=device,
        segments=0 if embed.segments is None else embed.segments.count,
        encoder_decoder=checkpoint.model.encoder is not None,
        rope_deltas=bool(text_model.program.rope_axes),
        adapters=text_model.adapters.num_adapters > 0,
    )
    pooler = None
    if text_model.pooler is not None:
        pooler = FusedPooler(text_model.pooler, slots=slots, hidden=embed.hidden, device=device)
    snapshots = num_snapshots(text_model.states, slots, prefix_cache=config.cache.prefix)
    states = allocate_states(text_model.states, slots, snapshots or 0, device, drafts=config.speculation.enabled)
    return DeviceParts(FusedModel(text_model, scales), form, table, device_table, pooler, states, media)


def measured_pool(
    config: EngineConfig, text_model: TextModel, parts: DeviceParts, reserve: int = 0, draft_bytes: int = 0
) -> int:
    """Return the bytes for the KV pool: the planned memory of the engine minus the measured memory of weights and the
    largest step and the limit of graphs. At most the planned pool and the free memory.

    reserve: blocks in addition to the pool. draft_bytes: weights of a draft model."""
    device = text_model.device
    step = step_bytes(
        parts, config.scheduling.max_step_tokens, config.model.max_context, text_model.dtype, config.speculation.rows
    )
    media = 0
    if text_model.model.media is not None:
        settings = config.scheduling.max_media_tokens, config.cache.media, text_model.dtype.itemsize
        media = media_bytes(text_model.model.media, *settings, ranks=text_model.world.size)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    planned = config.memory.weights + config.memory.workspace + config.memory.kv_cache
    beside = step + media + config.memory.graphs + reserve * parts.layout.block_bytes
    left = planned - text_model.weight_bytes - draft_bytes - parts.table_bytes - parts.states.nbytes - beside
    return max(0, min(config.memory.kv_cache, left, free - beside - SPARE_BYTES))


@torch.inference_mode()
def step_bytes(parts: DeviceParts, tokens: int, longest: int, dtype: torch.dtype, extra_rows: int = 0) -> int:
    """Measure the memory of a step of this many tokens, with prompts of at most `longest`, besides weights and pages.

    The step has logits for as many rows as possible and `extra_rows` for drafts, or the vectors of every token of a
    pooling model."""
    memory = parts.device_table.memory
    pages = make_pages(parts.layout, 1, page_dtype(parts.layout, dtype), memory.device)
    torch.cuda.reset_peak_memory_stats(memory.device)
    before = torch.cuda.memory_allocated(memory.device)
    step = largest_step(parts, pages, tokens, longest)
    if step.encoder_inputs is not None:
        parts.model.encode_inputs(step.encoder_inputs)
    hidden = parts.model.forward(step)
    if parts.pooler is not None:
        pooled = parts.pooler.finish(hidden.float(), Pooling("token_embed"))
        # The vectors of the previous step may still be in the process of being copied.
        return torch.cuda.max_memory_allocated(memory.device) - before + pooled.nbytes
    rows = min(tokens, parts.device_table.tokens.shape[0] + extra_rows)
    logits = parts.model.logits(hidden[:rows])
    peak = torch.cuda.max_memory_allocated(memory.device) - before
    return peak + SAMPLING_COPIES * logits.nbytes


def largest_step(parts: DeviceParts, pages: Tensor, tokens: int, longest: int) -> DeviceStep:
    """Return the step of this many tokens that takes the most memory: prompts of at most `longest`, in as few rows as
    possible. For an encoder-decoder model: this many encoder tokens, then this many decoder tokens, all at position 0,
    because the position table may be shorter."""
    if not parts.model.program.encoder:
        return replace(_prompts(parts.layout, pages, tokens, longest), states=parts.states.layers)
    step = _prompts(parts.layout, pages, tokens, tokens)
    zeros = torch.zeros_like(step.ids)
    each = torch.arange(tokens + 1, dtype=torch.int32, device=pages.device)
    step = replace(step, positions=zeros, cross_attention=CrossAttentionInputs(zeros[:1], zeros, each, zeros + 1))
    return replace(step, encoder_inputs=replace(step, cross_attention=None, singles=False, spans=False))


def _prompts(layout: Layout, pages: Tensor, tokens: int, longest: int) -> DeviceStep:
    """Return a step of prompts that read the null block and write no keys.

    Its tables have room for `longest` tokens, because an indexer has memory for all positions of a table."""
    starts = [*range(0, tokens, longest), tokens]

    def integers(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=pages.device)

    zeros = torch.zeros(tokens, dtype=torch.int32, device=pages.device)
    groups, blocks = len(layout.groups), blocks_of(longest, layout.block_tokens)
    lengths = [stop - start for start, stop in pairwise(starts)]
    return DeviceStep(
        ids=zeros,
        positions=torch.arange(tokens, dtype=torch.int32, device=pages.device) % longest,
        rope_lengths=zeros + min(tokens, longest),
        slot_mapping=(zeros - 1).expand(groups, -1),
        slot=integers([0] * len(lengths)),
        first=integers([0] * len(lengths)),
        query_start=integers(starts),
        lengths=integers(lengths),
        tables=torch.zeros((groups, 1, blocks), dtype=torch.int32, device=pages.device),
        pages=pages,
        singles=1 in lengths,
        spans=lengths[0] > 1,
        segments=zeros,
        adapters=zeros,
    )
