"""Memory of an engine besides weights and KV cache: process, activations and logits of a step, tables, CUDA graphs.

Compiled kernels allocate the buffers of the largest step at the start, so their numbers are exact. For torch and Triton
the widest layer is overestimated; on a GPU, profiling replaces the estimate with a measurement.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from appliance.planning.derivation import Step, number, product
from engine.api.config import MEDIA_CACHE, MEDIA_TOKENS, num_slots
from engine.kv.layout import Layout, blocks_of, whole_blocks
from engine.lowering.lower import lower, state_projection
from engine.lowering.measures import WHOLE_BLOCK, attends, buffer_widths, largest_product, widest_input, widest_sum
from engine.lowering.media_memory import embedding_copies, tower_sizes
from engine.lowering.operations import (
    Attend,
    AttendLatent,
    Route,
    SelectKeys,
)
from engine.lowering.rewrites import compiled_encoder, compiled_ops, keep_routes
from engine.models.draft import tokens_beside
from engine.models.parts import (
    MLP,
    Attention,
    Block,
    Body,
    Convolution,
    Indexer,
    LatentAttention,
    LayerInput,
    LocalAttention,
    LowRank,
    Model,
    Projection,
    Recurrent,
    bodies,
)
from engine.models.ranks import share_of
from kernels.cpu.library import tiling

MIB = 2**20
# Resident memory of an engine process without weights, including pages of shared libraries. VmRSS on Linux with Python
# 3.11 and torch 2.13 for CPUs, in MiB: interpreter 11, numpy and msgspec 17, modules of the engine 13, torch 169,
# threads and first steps 17 to 21; rounded up. On a GPU the value covers library handles and allocator rounding on the
# device, besides the context.
PROCESS_BYTES = {"cpu": 234 * MIB, "cuda": 512 * MIB}
THREAD_BYTES = MIB  # per compute thread: its stack and the allocator's arena
FOREIGN_BYTES = 154 * MIB  # modules of transformers 5.23, one model's code and torch's meta operations: 135 MiB
COMPILER_BYTES = 256 * MIB  # torch.compile on a CPU: its modules, sympy, and what compilations of a small model need
TORCH_CODE_BYTES = 4 * MIB  # pages of torch's own kernels, which compiled kernels never touch
LIBRARY_BYTES = 8 * MIB  # most that one torch thread keeps of a repacked matrix
SCORE_ELEMENTS = 1 << 27  # most attention scores that torch holds at once (kernels/attention/common.py)
SCORE_COPIES = 2
SORTED_WORDS = 5  # per key of an indexer in torch: its score, once more in a piece, sorted, and its position in 64 bits
PROGRAMS = 320  # most programs that select keys at the same time: two for each multiprocessor of the largest GPUs
NCCL_BYTES = 512 * MIB  # NCCL buffers of each GPU. Assumed.
SAMPLED_CANDIDATES = 16384  # of a row, with 8 bytes each (kernels/sampling/truncation.py)
GRAPH_BYTES = 8 * MIB  # per captured graph, independent of its batch size
COPIES = {"torch": 5, "triton": 5}  # copies of the logits in sampling: probabilities, their sorted copy and indices
COMPILED_COPIES = 2  # logits in place, and a copy for logprobs of logits that sampling changes
BUFFER = "buffer"  # first word of the step buffers' names
LEAST_TOKENS = 64  # minimum size of the buffers (engine/layers/compiled/model.py)
SPLIT = 512  # positions per split of the KV sequence (kernels/cpu/attention.h)
VECTOR = 16  # floats of the widest vector register
ALIGNED = 32  # alignment of device tables, in words (engine/worker/device_table.py)
MEETING_ROWS = 64  # rows of logits that ranks gather at once (engine/worker/build.py)
MEETING_ROOMS = 2  # buffers used in turns (kernels/cpu/shm_collective.h)
COLUMN_BYTES = 84  # host bytes per slot: sampling parameters, rotation, encoder input, adapter (engine/worker/table.py)
DEVICE_FIELDS = 12  # device fields per slot (kernels/sampling/columns.py)
ROUTE_WORDS = 7  # per token and expert: expert id, weight, order, pair, and a tile of three words (kernels/experts)


@dataclass(frozen=True)
class StepSize:
    """Sizes of the largest step."""

    tokens: int  # most tokens in the step
    rows: int  # most running requests
    draft_rows: int = 0  # rows of logits for draft tokens
    media_tokens: int = MEDIA_TOKENS  # most tokens of media in the step
    media_cache: int = MEDIA_CACHE  # bytes of embeddings that are kept for further requests
    routes: bool = False  # selected experts are kept until the end of the step

    @property
    def slots(self) -> int:
        return num_slots(self.rows, self.tokens)

    @property
    def logit_rows(self) -> int:
        return self.slots + self.draft_rows


def workspace(
    model: Model, *, device: str, kernels: str, size: StepSize, element_bytes: int, threads: int = 1, ranks: int = 1
) -> tuple[Step, ...]:
    """Return a rank's workspace without tables and CUDA graphs. `kernels` is torch, triton or a compiled variant."""
    process = Step("process", number(PROCESS_BYTES[device]), PROCESS_BYTES[device])
    found = [
        process,
        *_foreign(model),
        *_threads(model, device, kernels, threads, ranks),
        *_exchange(model, device, kernels, size, ranks),
    ]
    found += media_memory(model, size, element_bytes, ranks)
    if model.kept_layers:
        # Inputs of layers and the copy that a head projects. Compiled kernels have a buffer for the inputs.
        copies = 2 if kernels in COPIES else 1
        width = copies * len(model.kept_layers) * model.embed.hidden
        found.append(product("states for a head that drafts (tokens × width)", size.tokens, width, element_bytes))
    if model.pooler is not None:
        # token_embed keeps the states of every token in float32, and so do its stages. On a GPU the states of the
        # previous step are still being copied.
        copies = 3 if kernels == "triton" else 2
        found.append(product("pooled states (tokens × hidden)", size.tokens, copies * model.embed.hidden, 4))
    if kernels in COPIES:
        tokens = size.tokens
        if model.foreign is not None and model.foreign.recomputes:
            tokens = max(tokens, model.max_context)
        found.append(product("activations (tokens × widest layer)", tokens, widest_layer(model, ranks), element_bytes))
        found += _sources(model, kernels, size, element_bytes)
        found += _routes(model, size.tokens, ranks) if kernels == "triton" else ()
        if size.routes:
            experts = _selected_experts(model, ranks)
            words = ROUTE_WORDS + 1  # all layers, and their experts together
            found.append(product("selected experts (tokens × experts × words)", size.tokens, experts, words, 4))
        if model.head is None:
            return tuple(found)
        found.append(product("logits (rows × vocab × copies)", size.logit_rows, model.embed.vocab, 4, COPIES[kernels]))
        return tuple(found)
    if (projection := state_projection(model)) is not None:
        for name, width in buffer_widths(projection.ops).items():
            found.append(product(f"{BUFFER} {name} (tokens × width)", size.tokens, width, 4))
    program = keep_routes(lower(model, ranks)) if size.routes else lower(model, ranks)
    for name, width in buffer_widths((*compiled_ops(program), *chain(*compiled_encoder(program)))).items():
        found.append(product(f"{BUFFER} {name} (tokens × width)", max(size.tokens, LEAST_TOKENS), width, 4))
    found += _whole(model, size, ranks)
    found.append(product("packed rows (tokens × inputs)", size.tokens + VECTOR, *_packed(model, kernels, ranks), 4))
    if model.head is None:
        return tuple(found)
    found.append(product("logits (rows × vocab × copies)", size.logit_rows, model.embed.vocab, 4, COMPILED_COPIES))
    found.append(product("draw (threads × vocab)", threads, model.embed.vocab, 8))
    return tuple(found)


def draft_workspace(models: Sequence[Model], *, kernels: str, size: StepSize, element_bytes: int) -> tuple[Step, ...]:
    """Return the workspace of a draft model or of prediction heads. The largest pass has the tokens of a step and some
    more for each row."""
    slots, found = size.slots, list[Step]()
    passes = StepSize(size.tokens + slots * tokens_beside(len(models)), slots)
    for index, model in enumerate(models):
        own = workspace(model, device="cpu", kernels=kernels, size=passes, element_bytes=element_bytes, threads=0)[1:]
        kept = [one for one in own if one.value and not one.name.startswith(_OF_THE_PROCESS)]
        found += [Step(_draft_name(one.name, index), one.formula, one.value) for one in kept]
    if len(models) > 1:  # the last states of each request, from which later heads compute positions again
        width = models[0].embed.hidden
        found.append(
            product("kept states of heads (slots × heads × width)", slots, len(models) - 1, width, element_bytes)
        )
    return tuple(found)


_OF_THE_PROCESS = ("threads", "pages of torch", "repacked", "draw")


def _draft_name(name: str, index: int) -> str:
    return f"{name}, draft model {index + 1}" if index else f"{name}, draft model"


def media_memory(model: Model, size: StepSize, element_bytes: int, ranks: int = 1) -> tuple[Step, ...]:
    """Return the memory of media, without the weights of the tower."""
    if model.media is None:
        return ()
    tower, width = tower_sizes(model.media), model.media.width
    tokens = model.media.step_embeddings(size.media_tokens)
    of_clips = tower.of_clips(tokens)
    return (
        Step("embeddings of media for further requests", number(size.media_cache), size.media_cache),
        product("embeddings of media (tokens × copies × width)", tokens, embedding_copies(ranks), width, element_bytes),
        product("tower (tokens × values of their patches)", tokens, tower.elements, element_bytes),
        *((product("convolutions and windows of clips", of_clips, element_bytes),) if of_clips else ()),
    )


def low_rank_buffer(size: StepSize, columns: int) -> Step:
    """Return the buffer of the products with the first matrices of LoRA adapters. columns: of the widest one."""
    return product(f"{BUFFER} low_rank_of_adapters (tokens × width)", max(size.tokens, LEAST_TOKENS), columns, 4)


def low_rank_parts(size: StepSize, floats: int) -> Step:
    """Return the products with the first matrices of LoRA adapters in Triton kernels. floats: per token."""
    return product("products of adapters (tokens × width)", size.tokens, floats, 4)


def _foreign(model: Model) -> tuple[Step, ...]:
    return () if model.foreign is None else (Step("transformers' code", number(FOREIGN_BYTES), FOREIGN_BYTES),)


def _threads(model: Model, device: str, kernels: str, threads: int, ranks: int) -> tuple[Step, ...]:
    """Return the memory of CPU compute threads. torch's library repacks parts of the matrices it multiplies by."""
    if device != "cpu":
        return ()
    stacks = product("threads", threads, THREAD_BYTES)
    if kernels != "torch":
        return (stacks,)
    repacked = min(LIBRARY_BYTES, 4 * largest_product(lower(model, ranks).ops))
    code = Step("pages of torch's kernels", number(TORCH_CODE_BYTES), TORCH_CODE_BYTES)
    return stacks, code, product("repacked parts of matrices (threads × bytes)", threads, repacked)


def attention_scores(
    model: Model, *, kernels: str, size: StepSize, max_context: int, ranks: int = 1
) -> tuple[Step, ...]:
    """Return the memory of torch's attention for the longest row: keys, values and the scores of one step."""
    found = [op for op in attends(lower(model, ranks).ops) if op.layer is not None and not op.cross]
    if kernels != "torch" or not found:
        return ()
    tokens = min(size.tokens, max_context)

    def keys(op: Attend | AttendLatent) -> int:
        most = op.window or op.chunk
        return max_context if most is None else min(max_context, most + tokens)

    most = max(found, key=lambda op: op.heads * keys(op))
    rows = min(tokens, max(1, SCORE_ELEMENTS // (most.heads * keys(most))))
    gathered = product(
        "keys and values of a row (copies × tokens × heads × width)",
        *(4, keys(most), most.kv_heads, most.key_dim, 4),
    )
    scores = product("scores of a row (copies × heads × tokens × keys)", SCORE_COPIES, most.heads, rows, keys(most), 4)
    return gathered, scores


def indexer_scores(model: Model, *, kernels: str, size: StepSize, max_context: int) -> tuple[Step, ...]:
    """Return the memory in which an indexer compares all keys of a sequence. Compiled kernels use the parts of
    attention for it."""
    heads = max((op.part.heads for op in lower(model).ops if isinstance(op, SelectKeys)), default=0)
    tokens = min(size.tokens, max_context)
    if not heads or kernels not in COPIES:
        return ()
    if kernels == "triton":
        return (product("scores of an indexer (programs × positions)", min(size.tokens, PROGRAMS), max_context, 4),)
    rows = min(tokens, max(1, SCORE_ELEMENTS // (heads * max_context)))
    return (
        product("products of an indexer (heads × tokens × keys)", heads, rows, max_context, 4),
        product("scores of an indexer (words × tokens × keys)", SORTED_WORDS, tokens, max_context, 4),
    )


def _sources(model: Model, kernels: str, size: StepSize, element_bytes: int) -> tuple[Step, ...]:
    """Return the memory for encoder input in a step.

    This is the encoder output, which every decoder layer reads, and with torch also the scores of the longest input.
    """
    if model.encoder is None:
        return ()
    states = product("states of encoder inputs (tokens × hidden)", size.tokens, model.embed.hidden, element_bytes)
    if kernels != "torch":
        return (states,)
    longest = min(model.max_encoder_input, size.tokens)
    found = [op for op in lower(model).encoder if isinstance(op, Attend)]
    heads, copies = max(op.heads for op in found), 1 + any(op.bias is not None for op in found)
    name = "scores of an encoder input (copies × heads × tokens × tokens)"
    return states, product(name, copies, heads, longest, longest, 4)


def _routes(model: Model, tokens: int, ranks: int) -> tuple[Step, ...]:
    """Return the memory of Triton's expert layer, in 4-byte words: router logits, routes, and the sum for the
    all-reduce.
    """
    parts = [op.part for op in lower(model, ranks).ops if isinstance(op, Route)]
    if not parts:
        return ()
    sums = model.embed.hidden if ranks > 1 else 0
    words = max(part.routed + (part.shared_gate is not None) + ROUTE_WORDS * part.top_k + sums for part in parts)
    return (product("routes to experts (tokens × words)", tokens, words, 4),)


def _whole(model: Model, size: StepSize, ranks: int) -> tuple[Step, ...]:
    """Return the memory of one layer's keys and values for bidirectional prompts."""
    program = lower(model, ranks)
    op = next((op for op in attends((*program.encoder, *program.ops)) if op.layer is None), None)
    if op is None:
        return ()
    blocks = whole_blocks(size.tokens, size.slots, WHOLE_BLOCK)
    name = f"{BUFFER} keys and values (blocks × tokens × heads)"
    return (product(name, 2 * blocks, WHOLE_BLOCK, op.kv_heads * op.key_dim, 4),)


def _exchange(model: Model, device: str, kernels: str, size: StepSize, ranks: int) -> tuple[Step, ...]:
    """Return the additional memory for exchanging sums and logits between ranks."""
    if ranks == 1:
        return ()
    sums, share = size.tokens * widest_sum(lower(model, ranks)), -(-model.embed.vocab // ranks)
    if kernels not in COPIES:
        floats = max(sums, min(size.rows, MEETING_ROWS) * share)
        return (
            product("shared-memory all-reduce of a rank (slots × floats)", MEETING_ROOMS, floats, 4),
            product("a rank's own logits (rows × vocab / ranks)", size.logit_rows, share, 4),
        )
    found = (
        product("sums of the ranks, gathered (ranks + 1, tokens, width)", ranks + 1, sums, 4),
        product("logits of the ranks, gathered (ranks + 1, rows, vocab / ranks)", ranks + 1, size.logit_rows, share, 4),
    )
    return found if device == "cpu" else (*found, Step("buffers of nccl", number(NCCL_BYTES), NCCL_BYTES))


def logits_bytes(model: Model, rows: int, kernels: str) -> int:
    """Return the bytes of the logits of `rows` rows in float32, including the copies that sampling makes."""
    if model.head is None:
        return 0
    return rows * model.embed.vocab * 4 * COPIES.get(kernels, COMPILED_COPIES)


def _packed(model: Model, kernels: str, ranks: int) -> tuple[int, ...]:
    """Return the floats per token of the packed inputs of a matrix product, as factors.

    Matrix tiles need two copies because they hold three bf16 parts of each input. A token with experts has one row for
    each selected expert.
    """
    tiles = tiling(kernels)
    copies = 2 if tiles is not None and tiles.matrix else 1
    program = lower(model, ranks)
    most, times = widest_input((*program.encoder, *program.ops))
    most = max(most, model.embed.hidden)
    return (copies * most, times) if times > 1 else (copies * most,)


def attention_partials(model: Model, size: StepSize, kv_tokens: int, ranks: int = 1) -> Step:
    """Return the memory of partial attention results of compiled kernels when a step reads the whole cache."""
    found = attends(lower(model, ranks).ops)
    heads, dim = max((op.heads for op in found), default=0), max((op.value_dim for op in found), default=0)
    pieces = kv_tokens // SPLIT + size.slots
    return product("parts of attention (pieces × heads × width)", pieces, heads, dim + VECTOR, 4)


def tables(
    layout: Layout,
    *,
    device: str,
    size: StepSize,
    max_context: int,
    pooled: Model | None = None,
    sources: bool = False,
    adapters: bool = False,
) -> tuple[Step, ...]:
    """Return the request table: a token id for each position, and an entry for each block.

    `pooled` is the model if GPU kernels pool its prompts. `sources` is true for a model with an encoder,
    `adapters` for one with LoRA adapters.
    """
    width, blocks = max_context + 1, blocks_of(max_context + 1, layout.block_tokens)
    groups, slots = len(layout.groups), size.slots
    if device == "cpu":
        return (
            product("token ids (requests × positions)", slots, width, 4),
            product("block tables (groups × requests × blocks)", groups, slots, blocks, 4),
            product("sampling parameters (requests)", slots, COLUMN_BYTES + 8 * groups),
        )
    wide, rows = _aligned(width), _aligned(slots + 1)
    return (
        product("token ids (requests × positions)", slots, wide, 4),
        product("block tables (groups × requests × blocks)", groups, slots, _aligned(blocks), 4),
        product("sampling parameters (fields × requests)", DEVICE_FIELDS + 1, _aligned(slots), 4),
        product("rows of a step (words)", 3 * rows + _aligned(wide + 64 * slots + 4096), 4),
        *(() if pooled is None else _pooled_tables(pooled, slots)),
        *((product("lengths of encoder inputs (requests)", _aligned(slots), 4),) if sources else ()),
        *((product("adapters (requests)", _aligned(slots), 4),) if adapters else ()),
    )


def _pooled_tables(model: Model, slots: int) -> tuple[Step, ...]:
    """Return the tables for pooling: segment starts and sums of the states of each slot
    (engine/layers/fused_pooler.py).
    """
    kinds = 0 if model.embed.segments is None else model.embed.segments.count
    begins = product("starts of segments (requests × segments)", _aligned(slots * (kinds - 1)), 4)
    states = product("states of unfinished prompts (requests × hidden)", slots, model.embed.hidden, 8)
    return (begins, states) if kinds > 1 else (states,)


def pinned_bytes(*, size: StepSize, max_context: int) -> int:
    """Return the page-locked host memory for table updates on a GPU: four uploads in flight."""
    rows = _aligned(size.slots + 1)
    return 4 * 4 * (4 * rows + _aligned(_aligned(max_context + 1) + 64 * size.slots + 4096))


def graphs(
    model: Model,
    *,
    sizes: Sequence[int],
    element_bytes: int,
    mixed: Sequence[int] = (),
    ranks: int = 1,
    routes: bool = False,
) -> tuple[Step, ...]:
    """Return the memory of captured steps. sizes: rows of decode steps. mixed: tokens of steps with chunks of prompts.
    routes: the selected experts of all layers are an output.

    All sizes of a kind share the activations, logits and output buffers of the largest (engine/worker/device.py); each
    graph has its own descriptor.
    """
    if not sizes:
        return ()
    rows = max(sizes)
    steps = (
        product("activations of the largest graph", rows, widest_layer(model, ranks), element_bytes),
        *_routes(model, rows, ranks),
        product("logits of the largest graph, and their buffer", 2, rows, model.embed.vocab, 4),
        product("candidates of sampling in the largest graph", rows, SAMPLED_CANDIDATES, 8),
        product("hidden states of the largest graph", rows, model.embed.hidden, element_bytes),
        product("descriptions of graphs", len(sizes) + len(mixed), GRAPH_BYTES),
        *_graph_outputs("largest graph", model, rows, element_bytes, ranks, routes=routes),
    )
    if not mixed:
        return steps
    tokens = max(mixed)
    return (
        *steps,
        product("activations of the largest mixed graph", tokens, widest_layer(model, ranks), element_bytes),
        *_routes(model, tokens, ranks),
        product("hidden states of the largest mixed graph, twice", 2, tokens, model.embed.hidden, element_bytes),
        *_graph_outputs("largest mixed graph", model, tokens, element_bytes, ranks, routes=routes),
    )


def _graph_outputs(
    graph: str, model: Model, tokens: int, element_bytes: int, ranks: int, *, routes: bool
) -> tuple[Step, ...]:
    """Return the memory of outputs that only some models have: inputs of layers for a head that drafts, and selected
    experts. Each is in the pool of the graphs and in the buffer that all sizes share."""
    found = []
    if model.kept_layers:
        width = len(model.kept_layers) * model.embed.hidden
        found.append(product(f"states for a head that drafts in the {graph}, twice", 2, tokens, width, element_bytes))
    if routes:
        words = (ROUTE_WORDS + 2) * _selected_experts(model, ranks)  # of all layers until the end, and joined, twice
        found.append(product(f"selected experts in the {graph} (tokens × words)", tokens, words, 4))
    return tuple(found)


def _selected_experts(model: Model, ranks: int) -> int:
    """Return the selected experts of a token in all layers."""
    return sum(routes.width for routes in keep_routes(lower(model, ranks)).routes)


def _aligned(count: int) -> int:
    return -(-count // ALIGNED) * ALIGNED


def widest_layer(model: Model, ranks: int = 1) -> int:
    """Return the elements per token of the widest layer, including the hidden states."""
    if model.foreign is not None:
        return model.foreign.width
    blocks = model.blocks if model.encoder is None else (*model.encoder.blocks, *model.blocks)
    inputs = 0 if model.layer_inputs is None else 2 * model.layer_inputs.layers * model.layer_inputs.width
    streams = 0 if model.streams is None else 4 * model.streams.count * model.embed.hidden
    return max((_activations(block, ranks) for block in blocks), default=0) + 4 * model.embed.hidden + inputs + streams


def _activations(block: Block, ranks: int) -> int:
    return max((_width(body, ranks) for branch in block for body in bodies(branch)), default=0)


def _width(body: Body, ranks: int) -> int:
    match body:
        case Attention() if body.gated:
            return 2 * (3 * _own(body.heads, ranks) + 2 * _own(body.kv_heads, ranks)) * body.head_dim
        case Recurrent():
            return body.work_width(lambda units, _: _own(units, ranks))
        case Attention():
            return 2 * (2 * _own(body.heads, ranks) + 2 * _own(body.kv_heads, ranks)) * body.head_dim
        case LatentAttention():
            widths = body.query_dim + body.state_dim + body.kv_lora_rank + body.v_head_dim
            indexer = 0 if body.indexer is None else _indexer_width(body.indexer)
            return 2 * (_own(body.heads, ranks) * widths + body.state_dim) + indexer
        case MLP():
            return 3 * _own(body.intermediate_size, ranks)
        case LayerInput():
            return 2 * body.width
        case LowRank():
            return body.rank + body.hidden
        case Projection():
            return 2 * body.hidden
        case LocalAttention() | Convolution():
            raise ValueError("only towers have this part")
    # Triton stores one row per token and selected expert. torch computes the experts one by one, in float32.
    shared = 0 if body.shared is None else 3 * _own(body.shared.intermediate_size, ranks) + body.hidden
    return body.top_k * (3 * _own(body.intermediate_size, ranks) + body.hidden) + 6 * body.hidden + shared


def _indexer_width(part: Indexer) -> int:
    """Elements of queries, key, float32 weights and selected positions."""
    return 2 * (part.heads * part.head_dim + part.head_dim + 2 * part.heads + part.top_k)


def _own(units: int, ranks: int) -> int:
    """Return one rank's share of `units`. Raise ValueError if they cannot be divided evenly."""
    found = share_of(units, 0, ranks)
    if found is None:
        raise ValueError(f"{ranks} ranks cannot share {units}")
    return found[1]
