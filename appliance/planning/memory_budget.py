"""Memory budget of one engine, or of each of its ranks, and the memory taken before the KV cache.

The planner and the solver's memory rule (appliance/planning/ranks.py) call the same function, so their numbers agree.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from appliance.config.manifest import Manifest
from appliance.constraints.rule import TRITON, View
from appliance.constraints.speculation import OFF
from appliance.hardware.machine import Machine
from appliance.planning.choice import Choice
from appliance.planning.derivation import Account, Step, number, product, summed
from appliance.planning.host import appliance_bytes, host_memory
from appliance.planning.memory import ELEMENT_BYTES, Host, spell_bytes
from appliance.planning.workspace import (
    COMPILER_BYTES,
    StepSize,
    attention_partials,
    attention_scores,
    draft_workspace,
    graphs,
    indexer_scores,
    logits_bytes,
    low_rank_buffer,
    low_rank_parts,
    pinned_bytes,
    tables,
    workspace,
)
from engine.api.config import MAX_RUNNING, Device, graph_ladder, mixed_graph_ladder
from engine.api.golden import ROOM_TOKENS
from engine.kv.layout import Layout, layout, page_sizes, with_drafts
from engine.kv.states import StateLayout, num_snapshots, state_layout
from engine.lowering.adapters import (
    AdapterStack,
    adapter_holdings,
    adapter_stacks,
    fitted_adapters,
    slot_holdings,
    slot_stacks,
    widest_columns,
    widest_parts,
)
from engine.lowering.footprint import (
    Holder,
    Holding,
    footprint,
    loading_bytes,
    mapped_bytes,
    part_bytes,
    temporary_bytes,
)
from engine.lowering.lower import lower
from engine.models.checkpoint import Checkpoint
from engine.models.media import bidirectional_tokens
from engine.models.parts import Model, is_bidirectional
from engine.models.ranks import rows_of
from kernels.cpu.library import tiling

STEP_TOKENS = {"cpu": 512, "cuda": 8192}
SELF_TEST = "KV blocks of golden prompts (blocks × block)"
STATES = "recurrent state (slots of requests and snapshots × bytes)"
LOGITS_PART = 8  # auto lowers max_running until the logits take at most 1 / LOGITS_PART of the usable memory
STATES_PART = 4  # and until the recurrent state takes at most 1 / STATES_PART of it


@dataclass(frozen=True)
class UsableMemory:
    """Memory that one rank may use, in bytes."""

    free: int  # free memory of the rank
    bytes: int  # part of it that the rank may use
    limited_by: str  # which limit applies, as message text
    is_shared: bool  # True if memory_share is the limit, False if the appliance's own memory is
    account: Account


@dataclass(frozen=True)
class MemoryBudget:
    """Memory of the rank with the most weights, without what depends on the context length."""

    usable: UsableMemory
    ranks: tuple[tuple[Holding, ...], ...]  # weights of each rank
    fixed: tuple[Step, ...]  # workspace that does not depend on the context length
    graphs: tuple[Step, ...]  # memory of captured CUDA graphs
    model: Model
    pages: Layout
    running: Choice[int]  # most requests in a step
    step: Choice[int]  # most tokens in a step
    graph_sizes: tuple[int, ...]  # batch sizes of captured decode steps
    mixed_graph_sizes: tuple[int, ...]  # tokens of captured steps with chunks of prompts
    size: StepSize  # the largest step
    view: View
    host: Host
    host_account: Account

    @cached_property
    def holdings(self) -> tuple[Holding, ...]:
        return max(self.ranks, key=lambda held: sum(part_bytes(held).values()))

    @property
    def states(self) -> StateLayout:
        return state_layout(self.model, self.view.tensor)

    @property
    def compiled(self) -> bool:
        return tiling(self.view.kernels) is not None

    @cached_property
    def weights(self) -> int:
        return sum(part_bytes(self.holdings).values())

    @cached_property
    def loading(self) -> int:
        """Return the peak memory of the rank while its weights load."""
        on_device = loading_bytes(self.holdings) if self.view.device == "cpu" else self.weights
        return int(self.fixed[0].value) + on_device

    def tables(self, context: int) -> tuple[Step, ...]:
        pooled = self.model if self.view.kernels == TRITON and self.model.pooler is not None else None
        return tables(
            self.pages,
            device=self.view.device,
            size=self.size,
            max_context=context,
            pooled=pooled,
            sources=self.model.encoder is not None,
            adapters=self.view.facts.model.adapter_groups > 0,
        )

    def scores(self, context: int) -> tuple[Step, ...]:
        sizes: dict[str, Any] = {"kernels": self.view.kernels, "size": self.size, "max_context": context}
        scores = attention_scores(self.model, **sizes, ranks=self.view.tensor)
        return *scores, *indexer_scores(self.model, **sizes)

    def workspace(self, context: int) -> int:
        return summed((*self.fixed, *self.graphs, *self.tables(context), *self.scores(context)))

    def left(self, context: int) -> int:
        """Return the bytes left for the KV cache at this context length."""
        return self.usable.bytes - self.weights - self.workspace(context)

    def taken(self, context: int) -> str:
        return (
            f"{spell_bytes(self.usable.bytes)} are usable ({self.usable.limited_by}), weights need "
            f"{spell_bytes(self.weights)} and workspace {spell_bytes(self.workspace(context))}"
        )


def measure(
    manifest: Manifest,
    checkpoint: Checkpoint,
    machine: Machine,
    view: View,
    ranks: tuple[tuple[Holding, ...], ...],
    *,
    threads: int,
) -> MemoryBudget:
    """Measure the memory of these choices. `ranks` holds the weights of each rank; `threads` is the count per rank."""
    model, pages, compiled = checkpoint.model, _pages(checkpoint, view), tiling(view.kernels) is not None
    running = batch_limit(manifest, checkpoint, machine, view)
    step = _step_tokens(manifest, checkpoint, view.device, running.value)
    size = StepSize(
        step.value,
        running.value,
        draft_rows=0 if view.speculation == "off" else manifest.speculation.tokens,
        media_tokens=manifest.engine.scheduling.max_media_tokens,
        media_cache=manifest.engine.cache.media,
        routes=manifest.engine.return_routed_experts,
    )
    draws = model.pooler is None
    sizes = graph_ladder(running.value) if view.graphs and view.kernels == TRITON and draws else ()
    mixed = mixed_graph_ladder(step.value) if sizes else ()
    host, host_account = host_memory(
        device=view.device,
        engines=view.data * view.tensor,
        vocab=model.embed.vocab,
        pinned=pinned_bytes(size=size, max_context=_table_context(manifest, checkpoint)),
        adapters=0 if checkpoint.adapter_slots is None else view.tensor * manifest.adapter_loading.host_cache,
        loading=max(map(temporary_bytes, ranks)),
    )
    usable, element_bytes = usable_memory(manifest, checkpoint, machine, view), ELEMENT_BYTES[view.activations]
    fixed = workspace(
        model,
        device=view.device,
        kernels=view.kernels,
        size=size,
        element_bytes=element_bytes,
        threads=threads,
        ranks=view.tensor,
    )
    models = [draft.model for draft in checkpoint.drafts]
    fixed = (*fixed, *draft_workspace(models, kernels=view.kernels, size=size, element_bytes=element_bytes))
    if manifest.hardware.torch_compile and view.device == "cpu":
        fixed = (*fixed, Step("torch.compile", number(COMPILER_BYTES), COMPILER_BYTES))
    if manifest.lifecycle.self_test.prompts and model.pooler is None:
        fixed = (*fixed, product(SELF_TEST, pages.blocks_of(ROOM_TOKENS), pages.block_bytes))
    if slots := state_slots(manifest, model, size.slots, drafts=view.speculation != OFF):
        fixed = (*fixed, product(STATES, slots, state_layout(model, view.tensor).slot_bytes))
    if mapped := max(map(mapped_bytes, ranks)):
        fixed = (*fixed, Step("weights mapped from the checkpoint file", number(mapped), mapped))
    if (compiled or view.kernels == TRITON) and (stacks := _adapter_stacks(checkpoint, view)):
        own = low_rank_buffer(size, widest_columns(stacks)) if compiled else low_rank_parts(size, widest_parts(stacks))
        fixed = (*fixed, own)
    if checkpoint.adapter_slots is not None and view.device == "cpu":
        cache = manifest.adapter_loading.host_cache
        fixed = (*fixed, Step("adapters in the host cache", number(cache), cache))
    if compiled:
        context = _table_context(manifest, checkpoint)
        kv_tokens = min(pages.block_tokens * pages.blocks(usable.bytes), size.slots * context)
        fixed = (*fixed, attention_partials(model, size, kv_tokens, view.tensor))
    return MemoryBudget(
        usable=usable,
        ranks=ranks,
        fixed=fixed,
        graphs=graphs(
            model, sizes=sizes, mixed=mixed, element_bytes=element_bytes, ranks=view.tensor, routes=size.routes
        ),
        model=model,
        pages=pages,
        running=running,
        step=step,
        graph_sizes=sizes,
        mixed_graph_sizes=mixed,
        size=size,
        view=view,
        host=host,
        host_account=host_account,
    )


def state_slots(manifest: Manifest, model: Model, requests: int, *, drafts: bool) -> int:
    """Return the number of slots with recurrent state: of requests, of snapshots, and an unused one (engine/worker).
    drafts: requests have a second one, for the state from before a draft."""
    snapshots = num_snapshots(state_layout(model), requests, prefix_cache=manifest.engine.cache.prefix)
    return 0 if snapshots is None else (1 + drafts) * requests + snapshots + 1


def batch_limit(manifest: Manifest, checkpoint: Checkpoint, machine: Machine, view: View) -> Choice[int]:
    """Return the most requests in a step.

    auto uses MAX_RUNNING, or fewer if the logits would take more than 1 / LOGITS_PART of the usable memory, or the
    recurrent state more than 1 / STATES_PART.
    """
    wanted = manifest.engine.scheduling.max_running
    if wanted != "auto":
        return Choice(wanted)
    usable, rows = usable_memory(manifest, checkpoint, machine, view).bytes, MAX_RUNNING
    requested = -(-manifest.hardware.capacity.requests // view.data)
    if requested > rows:
        return Choice(requested, "set by hardware.capacity.requests")

    def taken(count: int) -> int:
        return logits_bytes(checkpoint.model, count, view.kernels)

    def stored(count: int) -> int:
        slot = state_layout(checkpoint.model, view.tensor).slot_bytes
        return state_slots(manifest, checkpoint.model, count, drafts=view.speculation != OFF) * slot

    while rows > requested and stored(rows) > usable // STATES_PART:
        rows = max(requested, rows // 2)
    limited = rows < MAX_RUNNING
    while rows > requested and taken(rows) > usable // LOGITS_PART:
        rows, limited = max(requested, rows // 2), False
    if limited:
        return Choice(
            rows,
            f"recurrent state of {MAX_RUNNING} would take {spell_bytes(stored(MAX_RUNNING))}, and "
            f"{spell_bytes(usable // STATES_PART)} are a quarter of the usable memory",
        )
    if checkpoint.model.head is None:
        return Choice(rows, "the maximum of auto")
    if rows == MAX_RUNNING:
        return Choice(rows, f"the maximum of auto; logits take {spell_bytes(taken(rows))}")
    most = spell_bytes(usable // LOGITS_PART)
    return Choice(
        rows,
        f"logits of {MAX_RUNNING} would take {spell_bytes(taken(MAX_RUNNING))}, and {most} are an eighth of the "
        "usable memory",
    )


def usable_memory(manifest: Manifest, checkpoint: Checkpoint, machine: Machine, view: View) -> UsableMemory:
    """Return the memory budget of each rank: memory_share of the free memory, divided among the engines.

    On a CPU, the memory of the appliance itself is subtracted.
    """
    engines, share = view.data, manifest.hardware.memory_share
    free, source, beside = machine.memory_free, machine.memory_from, appliance_bytes(checkpoint.model.embed.vocab)
    among, sharing = f" among {engines} engines" if engines > 1 else "", engines
    if view.device == "cuda":
        free, source, beside = machine.gpus[0].free, machine.gpus[0].name, 0
    if view.device == "cuda" and view.tensor > 1:  # each rank has its own GPU
        used = machine.gpus[: engines * view.tensor]
        free, sharing, among = min(gpu.free for gpu in used), 1, f" on each of {len(used)} GPUs"
    elif view.tensor > 1:
        sharing = engines * view.tensor
        among = f" among {sharing} ranks"
    shared = math.floor(free * share)
    usable, limit = max(0, min(shared, free - beside)) // sharing, f"memory_share {share:g} of {spell_bytes(free)}"
    limit = f"{limit} free by {source}{among}"
    if free - beside < shared:
        limit = f"{spell_bytes(free)} free by {source}, minus {spell_bytes(beside)} for the appliance itself{among}"
    formula = f"⌊min(⌊{number(share)} × {number(free)}⌋, {number(free)} − {number(beside)}) / {number(sharing)}⌋"
    each = "rank" if view.tensor > 1 else "engine"
    account = Account(
        "budget",
        f"what one {each} may use: hardware.memory_share of the free memory by {source}, and the appliance beside it",
        (Step("budget", formula, usable),),
    )
    return UsableMemory(free // sharing, usable, limit, free - beside >= shared, account)


def rank_holdings(checkpoint: Checkpoint, view: View) -> tuple[tuple[Holding, ...], ...]:
    """Return the weights of each rank.

    Ranks differ only in their rows of the vocabulary, by at most one, so one rank of each size is counted.
    """
    shares = [rows_of(checkpoint.model.embed.vocab, rank, view.tensor)[1] for rank in range(view.tensor)]
    counted = {rows: _holdings(checkpoint, view, shares.index(rows)) for rows in set(shares)}
    held = [counted[rows] for rows in shares]
    if checkpoint.draft is not None:  # only rank 0 has it
        held[1:] = [tuple(one for one in each if one.part != "draft") for each in held[1:]]
    return tuple(held)


def _holdings(checkpoint: Checkpoint, view: View, rank: int) -> tuple[Holding, ...]:
    holder = _holder(view, rank, view.tensor)
    if checkpoint.adapter_slots is None:
        fitted = fitted_adapters(checkpoint.model, checkpoint.adapters)
        adapters = adapter_holdings(checkpoint.model, fitted, view.tensor, view.activations)
    else:
        adapters = slot_holdings(checkpoint.model, *checkpoint.adapter_slots, view.tensor, view.activations)
    own = footprint(checkpoint.model, checkpoint.tensors, checkpoint.quantization, holder)
    draft = draft_holdings(checkpoint, view) if rank == 0 else ()
    return (*adapters, *own, *(one._replace(part="draft") for one in draft))


def draft_holdings(checkpoint: Checkpoint, view: View) -> tuple[Holding, ...]:
    """Return the weights of the models that draft, which rank 0 has whole, by their parts in these models."""
    found: list[Holding] = []
    for index, draft in enumerate(checkpoint.drafts):
        holder = replace(_holder(view, 0, 1), shares_tables=index > 0 or view.tensor == 1)
        found += footprint(draft.model, draft.tensors, draft.quantization, holder)
    return tuple(found)


def _holder(view: View, rank: int, ranks: int) -> Holder:
    return Holder(
        dtype=view.activations,
        device=view.device,
        tiling=tiling(view.kernels, bf16=view.multiplies_bf16),
        bits=view.weights,
        group=view.facts.group_size,
        head=view.facts.head,
        embedding=view.facts.embedding,
        rank=rank,
        ranks=ranks,
        triton=view.kernels == TRITON,
    )


def _adapter_stacks(checkpoint: Checkpoint, view: View) -> tuple[AdapterStack, ...]:
    """Return the stacked matrices of adapters, or of slots for them."""
    program = lower(checkpoint.model, view.tensor)
    if checkpoint.adapter_slots is not None:
        return slot_stacks(program, *checkpoint.adapter_slots, view.tensor)
    return adapter_stacks(program, fitted_adapters(checkpoint.model, checkpoint.adapters), view.tensor)


def _pages(checkpoint: Checkpoint, view: View) -> Layout:
    """Return the layout of the pages, including those of a draft model."""
    return with_drafts(_own_pages(checkpoint.model, view, view.tensor), draft_pages(checkpoint, view))


def draft_pages(checkpoint: Checkpoint, view: View) -> list[Layout]:
    """Return the layouts of the pages of models that draft. Rank 0 alone has them; all ranks have equally many
    blocks."""
    return [_own_pages(draft.model, view, 1) for draft in checkpoint.drafts]


def _own_pages(model: Model, view: View, ranks: int) -> Layout:
    return layout(
        model,
        block_tokens=view.block_tokens,
        **page_sizes(view.kv_cache),
        ranks=ranks,
    )


def _step_tokens(manifest: Manifest, checkpoint: Checkpoint, device: Device, running: int) -> Choice[int]:
    wanted = manifest.engine.scheduling.max_step_tokens
    if wanted != "auto":
        return Choice(wanted)
    if (needed := source_step(manifest, checkpoint, running)) > STEP_TOKENS[device]:
        return Choice(needed, "the longest encoder input, which is read in one step, and one token per running request")
    if checkpoint.model.encoder_only:
        return Choice(STEP_TOKENS[device], f"for {device}")
    longest = _table_context(manifest, checkpoint)
    together = min(bidirectional_tokens(checkpoint.model.media), longest)
    if together and together + running > STEP_TOKENS[device]:
        return Choice(together + running, "an image and its prompt are read in one step, beside the running requests")
    if is_bidirectional(checkpoint.model) and longest > STEP_TOKENS[device]:
        return Choice(longest, "the longest prompt: the model has bidirectional attention and reads it in one step")
    return Choice(STEP_TOKENS[device], f"for {device}")


def source_step(manifest: Manifest, checkpoint: Checkpoint, running: int) -> int:
    """Return the tokens that a step needs for the longest encoder input and one token of each running request.

    Return 0 if the model has no encoder.
    """
    longest = min(checkpoint.model.max_encoder_input, _table_context(manifest, checkpoint))
    return longest + running if longest else 0


def _table_context(manifest: Manifest, checkpoint: Checkpoint) -> int:
    wanted = manifest.model.max_context
    return checkpoint.max_context if wanted == "auto" else wanted
