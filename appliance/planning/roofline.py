"""Roofline of the machine: upper bounds on tokens per second.

A step takes the longer of its memory traffic over the bandwidth and its operations over the arithmetic throughput. The
numbers are ceilings, not forecasts: they exclude launch overhead, waiting and cache misses.

decode   a step reads every dense matrix once, the experts that its rows select, and the keys and values of its rows
prefill  a step of max_step_tokens tokens multiplies each token by every matrix it uses, and computes attention

For an encoder-decoder model, prefill means encoder input: it runs the encoder and the decoder's key and value
projections for cross-attention, which decode steps do not read again.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from appliance.constraints.weights import INTEGERS
from appliance.hardware.devices import CpuModel, GpuModel, cpu_by_kernels, gpu_by_cuda_name
from appliance.hardware.machine import Machine
from appliance.planning.derivation import Account, Step, leading, number
from engine.kv.layout import Layout
from engine.kv.states import state_layout
from engine.lowering.footprint import Holding
from engine.lowering.lower import lower
from engine.lowering.measures import attends, attention_operations, encoder_weights, multiplied, touched_experts
from engine.lowering.media_memory import tower_operations
from engine.lowering.operations import AttendLatent
from engine.lowering.program import Program
from engine.models.parts import Media, Model

DECODE_LENGTH = 1024  # context length of each row in a decode step
BATCHES = (1, 8, 32)


@dataclass(frozen=True)
class Limits:
    """Throughput of the hardware that one rank computes on."""

    bandwidth: int  # bytes per second
    operations: int  # operations per second
    source: str  # device name, and whether its numbers are assumed
    ranks: int = 1  # ranks that share a step; the time they wait for each other is not counted


@dataclass(frozen=True)
class Ceiling:
    """Upper bound on tokens per second."""

    rows: int  # rows of the decode step; 0 for prompts
    tokens_s: float
    limited_by: str  # "bandwidth" or "arithmetic"


@dataclass(frozen=True)
class StepSeconds:
    """Time of a step at the roofline."""

    rows: int
    formula: str
    seconds: float


@dataclass(frozen=True)
class DraftGain:
    """Expected gain by drafts at one number of rows."""

    rows: int
    step: float  # time of a step with drafts, relative to one without
    gains: tuple[tuple[float, float], ...]  # (probability that a draft token is accepted, relative rate)


@dataclass(frozen=True)
class Roofline:
    """Rooflines of decode steps at several batch sizes, and of prompts."""

    source: str
    length: int  # context length of the rows in a decode step
    decode: tuple[Ceiling, ...]
    prefill: Ceiling
    accounts: tuple[Account, ...]
    drafts: tuple[DraftGain, ...] = ()  # with speculative decoding
    media_s: float | None = None  # of a tower, for the embeddings of a step; None: the model reads only text


def limits(
    machine: Machine, *, device: str, dtype: str, weights: str, threads: int, engines: int, ranks: int = 1
) -> Limits | None:
    """Return the limits of one rank, or None for a GPU that is not in the table.

    `weights` is the type of the matrix products: float32, bfloat16, int8, int4 or fp8. `threads` is the count per rank.
    """
    found: Limits | None
    if device == "cuda":
        gpu = gpu_by_cuda_name(machine.gpus[0].name)
        found = None if gpu is None else _of_gpu(gpu, dtype, weights, engines if ranks == 1 else 1)
    else:
        found = _of_cpu(cpu_by_kernels(machine.kernels), weights, threads, engines * ranks)
    if found is None or ranks == 1:
        return found
    return replace(found, ranks=ranks, source=f"each of {ranks} ranks, {found.source}")


def _of_gpu(gpu: GpuModel, dtype: str, weights: str, engines: int) -> Limits:
    operations = gpu.fp32 if dtype == "float32" else gpu.bf16
    if weights == "fp8" and gpu.fp8:
        operations = gpu.fp8
    among = f", shared by {engines} engines" if engines > 1 else ""
    return Limits(gpu.bandwidth // engines, operations // engines, f"{gpu.title}, data sheet{among}")


def _of_cpu(cpu: CpuModel, weights: str, threads: int, engines: int) -> Limits:
    each = cpu.int8 if weights in INTEGERS else cpu.bf16 if weights == "bfloat16" else cpu.floats
    reach = min(cpu.reach(threads), cpu.reach(threads * engines) // engines)
    return Limits(reach, each * cpu.clock * threads, f"{threads} threads of {cpu.description}, assumed")


def roofline(
    model: Model,
    holdings: Sequence[Holding],
    layout: Layout,
    limit: Limits,
    *,
    step_tokens: int,
    length: int,
    most: int,
    media_tokens: int = 0,
) -> Roofline:
    """Return the rooflines. `length` is the context of each decode row; `most` is the largest decode batch;
    `media_tokens` is the number of embeddings that towers compute in a step."""
    made = _of_text(model, holdings, layout, limit, step_tokens=step_tokens, length=length, most=most)
    if model.media is None or not media_tokens:
        return made
    account, seconds = _media(model.media, limit, media_tokens)
    return replace(made, accounts=(*made.accounts, account), media_s=seconds)


def _media(media: Media, limit: Limits, tokens: int) -> tuple[Account, float]:
    """Return the time in which the towers compute the embeddings of a step, as one item. Every rank computes it."""
    count = media.step_embeddings(tokens)
    each = tower_operations(media, count)
    seconds = count * each / limit.operations
    steps = (
        leading("operations per embedding", number(each), each, "FLOP"),
        leading("computed", f"{number(count)} × {number(each)} / {number(limit.operations)}", seconds, "s"),
    )
    title = f"the time of towers for {count} embeddings in a step, by arithmetic of {limit.source}"
    return Account("towers", title, steps, "s", is_sum=False), seconds


def _of_text(
    model: Model,
    holdings: Sequence[Holding],
    layout: Layout,
    limit: Limits,
    *,
    step_tokens: int,
    length: int,
    most: int,
) -> Roofline:
    length = min(length, DECODE_LENGTH)
    if model.head is None:
        account, prefill = _prefill(model, holdings, limit, step_tokens)
        return Roofline(limit.source, length, (), prefill, (account,))
    rows = sorted({*(count for count in BATCHES if count <= most), most} - {0}) or [1]
    decode, accounts = [], []
    for count in rows:
        account, ceiling = _decode(model, holdings, layout, limit, count, length)
        decode.append(ceiling)
        accounts.append(account)
    account, prefill = _prefill(model, holdings, limit, step_tokens)
    return Roofline(limit.source, length, tuple(decode), prefill, (*accounts, account))


def slowest_step_s(model: Model, made: Roofline, limit: Limits, *, step_tokens: int, max_context: int) -> float:
    """Return the seconds of the slowest step at the roofline.

    This is the last chunk of a prompt that fills the context, or the largest decode step.
    """
    operations = 2 * active_parameters(model) + attention_operations(lower(model).ops, max_context)
    prompt_s = step_tokens * operations / (limit.ranks * limit.operations)
    return max(prompt_s, step_tokens / made.prefill.tokens_s, *(one.rows / one.tokens_s for one in made.decode), 0.0)


def _decode(
    model: Model, holdings: Sequence[Holding], layout: Layout, limit: Limits, rows: int, length: int
) -> tuple[Account, Ceiling]:
    program = lower(model)
    unread = encoder_weights(program)
    holdings = [one for one in holdings if one.weight not in unread]
    dense, experts, share = matrix_bytes(holdings, head=True), expert_bytes(holdings), touched_experts(program, rows)
    state = rows * state_bytes(layout, program, length)
    multiplied = 2 * active_parameters(model) + attention_operations(program.ops, length)
    steps = [leading("matrices except experts and embedding", number(dense), dense)]
    if experts:
        formula = f"{number(experts)} × {number(share)}"
        steps.append(leading("experts used by the rows", formula, experts * share))
    formula = f"{number(rows)} × {number(state_bytes(layout, program, length))}"
    steps.append(leading(f"keys and values, {length} tokens per row", formula, state))
    slot = state_layout(model, limit.ranks).slot_bytes
    if slot:
        steps.append(
            leading("recurrent state, read and written", f"{number(rows)} × 2 × {number(slot)}", 2 * rows * slot)
        )
    read = [value for value in (dense, experts * share, state, 2 * rows * slot) if value]
    more, ceiling = _ceiling(limit, read, rows, multiplied, rows)
    what = "row" if rows == 1 else "rows"
    title = f"the ceiling of decoding {rows} {what} of {length} tokens, by {ceiling.limited_by} of {limit.source}"
    return Account(f"decode:{rows}", title, (*steps, *more), "tokens/s", is_sum=False), ceiling


def step_seconds(
    model: Model, holdings: Sequence[Holding], layout: Layout, limit: Limits, *, rows: int, tokens: int, length: int
) -> StepSeconds:
    """Return the time of a step with `tokens` tokens of each row, whose context has `length` tokens."""
    program = lower(model)
    unread = encoder_weights(program)
    holdings = [one for one in holdings if one.weight not in unread]
    dense, experts = matrix_bytes(holdings, head=True), expert_bytes(holdings)
    read = [dense, experts * touched_experts(program, rows * tokens), rows * state_bytes(layout, program, length)]
    computed = rows * tokens, 2 * active_parameters(model) + attention_operations(program.ops, length)
    seconds = max(sum(read) / limit.bandwidth, math.prod(computed) / (limit.ranks * limit.operations))
    reading = f"({' + '.join(map(number, read))}) / {number(limit.bandwidth)}"
    computing = f"{' × '.join(map(number, computed))} / ({number(limit.ranks)} × {number(limit.operations)})"
    return StepSeconds(rows, f"max({reading}, {computing})", seconds)


def _prefill(model: Model, holdings: Sequence[Holding], limit: Limits, step_tokens: int) -> tuple[Account, Ceiling]:
    head = model.embed.vocab * model.embed.row_width
    multiplied = 2 * (active_parameters(model) - head) + attention_operations(lower(model).ops, step_tokens // 2)
    if model.encoder is not None:
        read_once = encoder_weights(lower(model))
        holdings = [one for one in holdings if one.weight in read_once]
        multiplied = source_operations(model, min(step_tokens, model.max_encoder_input))
    read = [value for value in (matrix_bytes(holdings, head=False), expert_bytes(holdings)) if value]
    more, ceiling = _ceiling(limit, read, step_tokens, multiplied, 0)
    first = leading("operations per token", number(multiplied), multiplied, "FLOP")
    title = f"the ceiling of prompts in steps of {step_tokens} tokens, by {ceiling.limited_by} of {limit.source}"
    return Account("prefill", title, (first, *more), "tokens/s", is_sum=False), ceiling


def _ceiling(
    limit: Limits, read: Sequence[float], tokens: int, multiplied: int, rows: int
) -> tuple[tuple[Step, ...], Ceiling]:
    """Return the ceiling of a step of `tokens` tokens that reads `read` bytes, with `multiplied` operations per
    token.
    """
    per_second = f"{number(limit.ranks)} × {number(limit.operations)}"
    reading, computing = sum(read) / limit.bandwidth, tokens * multiplied / (limit.ranks * limit.operations)
    bytes_read = " + ".join(map(number, read))
    slower, bound = max(reading, computing), "bandwidth" if reading >= computing else "arithmetic"
    steps = (
        leading("read", f"({bytes_read}) / {number(limit.bandwidth)}", reading, "s"),
        leading("computed", f"{number(tokens)} × {number(multiplied)} / ({per_second})", computing, "s"),
        leading(
            *("tokens per second", f"{number(tokens)} / max({number(reading)}, {number(computing)})"),
            *(tokens / slower, "tokens/s"),
        ),
    )
    return steps, Ceiling(rows, tokens / slower, bound)


def source_operations(model: Model, length: int) -> int:
    """Return the operations per token of an encoder input of this length."""
    ops = lower(model).encoder
    return 2 * multiplied(ops) + attention_operations(ops, length)


def matrix_bytes(holdings: Sequence[Holding], *, head: bool) -> int:
    """Return the bytes of the matrices that every token of text is multiplied by. A tied head is counted as the
    embedding. Towers are left out."""
    left_out = {"experts", "embedding", "tower", *(() if head else ("head",))}
    total = sum(one.bytes for one in holdings if one.part not in left_out)
    if head and not any(one.bytes for one in holdings if one.part == "head"):
        total += sum(one.bytes for one in holdings if one.part == "embedding")
    return total


def expert_bytes(holdings: Sequence[Holding]) -> int:
    """Return the bytes of all routed experts."""
    return sum(one.bytes for one in holdings if one.part == "experts")


def active_parameters(model: Model) -> int:
    """Return the number of weights that one token is multiplied by, including the head."""
    return model.embed.vocab * model.embed.row_width + multiplied(lower(model).ops)


def state_bytes(layout: Layout, program: Program, length: int) -> int:
    """Return the bytes of keys and values, or latents and keys of indexers, that a token reads at this context
    length."""
    selected = {
        op.layer: op.selected.width for op in attends(program.ops) if isinstance(op, AttendLatent) and op.selected
    }
    total = 0
    for group in layout.groups:
        reach = length if group.reach is None else min(length, group.reach)
        tokens = sum(min(reach, selected.get(layer, reach)) for layer in group.layers)
        total += layout.layer_bytes(group) * tokens
    return total
