"""Program of a step for the compiled kernels: a list of operations, and the team of threads that runs it.

The structures mirror program.h, which documents their fields; the constructor of `Team` compares their sizes.
"""

import ctypes
from collections.abc import Sequence
from ctypes import Structure, c_float, c_int32, c_int64, c_void_p
from typing import Any, ClassVar

import torch
from torch import Tensor

from kernels.cpu.library import ACTIVATIONS, BF16_VARIANTS, MissingKernels, Tiling, load
from kernels.cpu.packing import FORMS, Packed
from kernels.cpu.shm_collective import CollectiveAborted, ShmCollective
from kernels.page_codes import head_dim

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
EMBED_BLOCKS = 16  # type of a table of blocks of ggml: this and the index of its form
PAGE_TYPES = TYPES | {torch.int8: 3, torch.uint8: 4}  # uint8: two numbers of 4 bits
ACTS = {name: number for number, name in enumerate(ACTIVATIONS)}
SCORES = {"softmax": 0, "softmax_chosen": 1, "sigmoid": 2}
RMS, LAYER = 0, 1

Field = tuple[str, Any]


def _fields(kind: Any, names: str) -> list[Field]:
    return [(name, kind) for name in names.split()]


class Embed(Structure):
    kind: ClassVar[int] = 0
    _fields_ = [
        *_fields(c_void_p, "table out"),
        *_fields(c_int64, "out_stride size"),
        ("type", c_int32),
        ("scale", c_float),
    ]


class Norm(Structure):
    kind: ClassVar[int] = 1
    _fields_ = [
        *_fields(c_void_p, "x weight bias y"),
        *_fields(c_int64, "x_stride y_stride groups size weight_stride"),
        ("norm", c_int32),
        ("eps", c_float),
    ]


class Add(Structure):
    kind: ClassVar[int] = 2
    _fields_ = [*_fields(c_void_p, "y x"), *_fields(c_int64, "y_stride x_stride size"), ("alpha", c_float)]


class Activate(Structure):
    kind: ClassVar[int] = 3
    _fields_ = [
        *_fields(c_void_p, "x y"),
        *_fields(c_int64, "x_stride y_stride inner groups"),
        *_fields(c_int32, "act gated"),
        *_fields(c_float, "limit up_offset"),
    ]


class RopeKV(Structure):
    kind: ClassVar[int] = 4
    _fields_ = [
        ("qkv", c_void_p),
        *_fields(c_int64, "stride heads kv_heads dim rotary_dim"),
        *_fields(c_int32, "rope interleaved group layer"),
    ]


class Linear(Structure):
    kind: ClassVar[int] = 5
    _fields_ = [
        *_fields(c_void_p, "weight bias x y"),
        *_fields(c_int64, "x_stride y_stride outputs inputs group"),
        *_fields(c_int32, "form zeros scale_type"),
        ("order", c_void_p),
    ]


def linear(weight: Packed, bias: Tensor | None, x: Tensor, y: Tensor) -> Linear:
    """x: [rows, inputs]; y: [rows, outputs]; rows may be farther apart than that."""
    return Linear(
        weight=weight.data.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        x=x.data_ptr(),
        y=y.data_ptr(),
        x_stride=x.stride(0),
        y_stride=y.stride(0),
        outputs=weight.outputs,
        inputs=weight.inputs,
        group=weight.group,
        form=FORMS.index(weight.form),
        zeros=weight.zeros,
        scale_type=TYPES[weight.scale_type],
        order=_at(weight.order),
    )


class Attend(Structure):
    kind: ClassVar[int] = 6
    _fields_ = [
        *_fields(c_void_p, "q sinks slopes biases selected out"),
        *_fields(c_int64, "q_stride out_stride heads kv_heads dim value_dim reach window chunk top_k"),
        *_fields(c_float, "scale softcap"),
        *_fields(c_int32, "group layer causal latent cross"),
    ]


class Cap(Structure):
    kind: ClassVar[int] = 7
    _fields_ = [("x", c_void_p), *_fields(c_int64, "stride size"), *_fields(c_float, "scale cap")]


class Route(Structure):
    kind: ClassVar[int] = 8
    _fields_ = [
        *_fields(c_void_p, "logits chosen weights correction"),
        *_fields(c_int64, "logits_stride count k groups groups_kept"),
        ("scale", c_float),
        *_fields(c_int32, "scores top_two normalized"),
    ]


class Experts(Structure):
    kind: ClassVar[int] = 9
    _fields_ = [*_fields(c_void_p, "linears scales"), *_fields(c_int64, "count k"), ("gathered", c_int32)]
    keep_alive: Any  # what `linears` points to


def experts(
    weights: Sequence[Packed],
    biases: Sequence[Tensor | None],
    x: Tensor,
    y: Tensor,
    k: int,
    *,
    gathered: bool,
    scales: Tensor | None = None,
) -> Experts:
    """weights, biases: of each expert, the weights of one form and size. y: [tokens · k, outputs]; x: [tokens · k,
    inputs], or [tokens, inputs] if it is `gathered`. scales: [tokens, k] float32, each of which multiplies the input of
    a pair."""
    assert len({(weight.form, weight.outputs, weight.inputs, weight.group, weight.zeros) for weight in weights}) == 1
    linears = (Linear * len(weights))(*(linear(*own, x, y) for own in zip(weights, biases, strict=True)))
    made = Experts(linears=ctypes.addressof(linears), scales=_at(scales), count=len(weights), k=k, gathered=gathered)
    made.keep_alive = linears, scales
    return made


class Combine(Structure):
    kind: ClassVar[int] = 10
    _fields_ = [
        *_fields(c_void_p, "x weights gate shared input y"),
        *_fields(c_int64, "x_stride gate_stride shared_stride input_stride y_stride size k count"),
    ]


class AllReduce(Structure):
    kind: ClassVar[int] = 11
    _fields_ = [
        *_fields(c_void_p, "x y"),
        *_fields(c_int64, "x_stride y_stride total"),
        ("collective", c_void_p),
        ("gathers", c_int32),
    ]


def all_reduce(collective: ShmCollective, x: Tensor, y: Tensor, *, gathers: bool) -> AllReduce:
    """x: [rows, this rank's columns or all]; y: [rows, all columns], of all ranks concatenated or summed."""
    return AllReduce(
        x=x.data_ptr(),
        y=y.data_ptr(),
        x_stride=x.stride(0),
        y_stride=y.stride(0),
        total=y.shape[1],
        collective=collective.handle,
        gathers=gathers,
    )


class CausalConv(Structure):
    kind: ClassVar[int] = 12
    _fields_ = [
        *_fields(c_void_p, "x weight bias y state"),
        *_fields(c_int64, "x_stride y_stride slot_stride channels width"),
        ("silu", c_int32),
    ]


class DeltaRule(Structure):
    kind: ClassVar[int] = 13
    _fields_ = [
        *_fields(c_void_p, "q k v a b A dt_bias y state"),
        *_fields(c_int64, "q_stride k_stride v_stride a_stride b_stride y_stride slot_stride"),
        *_fields(c_int64, "heads key_heads key_dim value_dim"),
        *_fields(c_float, "scale beta_scale lower_bound"),
        *_fields(c_int32, "qk_norm vector_decay"),
    ]


class SelectiveScan(Structure):
    kind: ClassVar[int] = 14
    _fields_ = [
        *_fields(c_void_p, "x dt A B C D dt_bias gate y state"),
        *_fields(c_int64, "x_stride dt_stride B_stride C_stride gate_stride y_stride slot_stride"),
        *_fields(c_int64, "heads groups head_dim state_dim"),
        *_fields(c_float, "dt_min dt_max"),
        ("vector_A", c_int32),
    ]


class GatedNorm(Structure):
    kind: ClassVar[int] = 15
    _fields_ = [
        *_fields(c_void_p, "x gate weight y"),
        *_fields(c_int64, "x_stride gate_stride y_stride groups size weight_stride"),
        ("eps", c_float),
        *_fields(c_int32, "gate_first silu"),
    ]


class LatentKV(Structure):
    kind: ClassVar[int] = 16
    _fields_ = [
        *_fields(c_void_p, "latent q y"),
        *_fields(c_int64, "latent_stride q_stride y_stride heads query_dim dim rotary_dim"),
        *_fields(c_int32, "rope interleaved group layer"),
    ]


class Heads(Structure):
    kind: ClassVar[int] = 17
    _fields_ = [("linears", c_void_p), ("count", c_int64)]
    keep_alive: Any  # what `linears` points to


def heads(weights: Sequence[Packed], x: Tensor, y: Tensor) -> Heads:
    """weights: of each head, all of one form and size. x, y: [rows, heads, inputs] and [rows, heads, outputs], or
    wider."""
    assert len({(weight.form, weight.outputs, weight.inputs) for weight in weights}) == 1
    linears = (Linear * len(weights))(*(linear(weight, None, x[:, i], y[:, i]) for i, weight in enumerate(weights)))
    made = Heads(linears=ctypes.addressof(linears), count=len(weights))
    made.keep_alive = linears
    return made


class ScaleQueries(Structure):
    kind: ClassVar[int] = 18
    _fields_ = [("qkv", c_void_p), *_fields(c_int64, "stride size length offset"), ("scale", c_float)]


class LoraShrink(Structure):
    kind: ClassVar[int] = 19
    _fields_ = [*_fields(c_void_p, "x a u"), *_fields(c_int64, "x_stride u_stride inputs columns")]


class LoraExpand(Structure):
    kind: ClassVar[int] = 20
    _fields_ = [
        *_fields(c_void_p, "u b ranks pieces y"),
        *_fields(c_int64, "u_stride y_stride rank outputs sources count"),
    ]
    keep_alive: Any  # what `pieces` points to


class RgLru(Structure):
    kind: ClassVar[int] = 21
    _fields_ = [
        *_fields(c_void_p, "x gate decay gate_bias decay_bias rate y state"),
        *_fields(c_int64, "x_stride gate_stride decay_stride y_stride slot_stride channels"),
    ]


class Select(Structure):
    kind: ClassVar[int] = 23
    _fields_ = [
        *_fields(c_void_p, "q weights selected"),
        *_fields(c_int64, "q_stride weights_stride heads dim top_k"),
        *_fields(c_int32, "group layer"),
    ]


class _LoraPiece(Structure):
    _fields_ = [*_fields(c_int64, "at rows source")]


def lora(
    a: Tensor, b: Tensor, ranks: Tensor, pieces: Sequence[tuple[int, int, int]], x: Tensor, y: Tensor, u: Tensor
) -> tuple[LoraShrink, LoraExpand]:
    """Return the operations before and after a linear: y += (x A) B of the token's adapter.

    a: [adapters, inputs, columns]; b: [adapters, rank, outputs]; ranks: [adapters, sources] int32, those in use;
    pieces: (first output, number of outputs, source); x: [rows, inputs]; y: [rows, outputs]; u: [rows, columns]."""
    array = (_LoraPiece * len(pieces))(*(_LoraPiece(*piece) for piece in pieces))
    shrink = LoraShrink(
        x=x.data_ptr(),
        a=_at(a),
        u=u.data_ptr(),
        x_stride=x.stride(0),
        u_stride=u.stride(0),
        inputs=a.shape[1],
        columns=a.shape[2],
    )
    expand = LoraExpand(
        u=u.data_ptr(),
        b=_at(b),
        ranks=_at(ranks),
        pieces=ctypes.addressof(array),
        y=y.data_ptr(),
        u_stride=u.stride(0),
        y_stride=y.stride(0),
        rank=b.shape[1],
        outputs=b.shape[2],
        sources=ranks.shape[1],
        count=len(pieces),
    )
    expand.keep_alive = array
    return shrink, expand


class LoraExperts(Structure):
    kind: ClassVar[int] = 22
    _fields_ = [
        ("shrink", LoraShrink),
        ("expand", LoraExpand),
        ("scales", c_void_p),
        *_fields(c_int64, "count k"),
        ("gathered", c_int32),
    ]
    keep_alive: Any


def lora_experts(
    a: Tensor,
    b: Tensor,
    ranks: Tensor,
    pieces: Sequence[tuple[int, int, int]],
    x: Tensor,
    y: Tensor,
    k: int,
    *,
    gathered: bool,
    scales: Tensor | None = None,
) -> LoraExperts:
    """Return the operation after the linears of experts: y += (x A) B of the adapter and the expert of each pair.

    a: [adapters, experts, inputs, columns]; b: [adapters, experts, rank, outputs]; ranks: [adapters, experts, sources]
    int32; pieces: as in `lora`; x, y, k, gathered, scales: as in `experts`."""
    # `lora` reads the sizes of u alone, and a pair's u is in the memory of its thread.
    nowhere = x.new_empty(0, a.shape[3])
    shrink, expand = lora(a.flatten(0, 1), b.flatten(0, 1), ranks.flatten(0, 1), pieces, x, y, nowhere)
    made = LoraExperts(shrink=shrink, expand=expand, scales=_at(scales), count=a.shape[1], k=k, gathered=gathered)
    made.keep_alive = expand.keep_alive, scales
    return made


class _Op(Structure):
    _fields_ = [("kind", c_int32), ("params", c_void_p)]


class _Angles(Structure):
    _fields_ = [("cos", c_void_p), ("sin", c_void_p)]


class _Group(Structure):
    _fields_ = [("table", c_void_p), ("slot_mapping", c_void_p)]


class _Step(Structure):
    _fields_ = [
        *_fields(c_int64, "tokens rows table_width"),
        *_fields(c_void_p, "ids first count slots adapters starts spans angles groups pages"),
        *_fields(c_int64, "layers planes block_tokens page_kv_heads page_dim"),
        ("page_type", c_int32),
    ]


Op = (
    Embed
    | Norm
    | Add
    | Activate
    | RopeKV
    | Linear
    | Attend
    | Cap
    | Route
    | Experts
    | Combine
    | AllReduce
    | CausalConv
    | DeltaRule
    | SelectiveScan
    | GatedNorm
    | LatentKV
    | Heads
    | ScaleQueries
    | LoraShrink
    | LoraExpand
    | RgLru
    | LoraExperts
    | Select
)
MIRRORED = (
    Embed,
    Norm,
    Add,
    Activate,
    RopeKV,
    Linear,
    Attend,
    Cap,
    Route,
    Experts,
    Combine,
    AllReduce,
    CausalConv,
    DeltaRule,
    SelectiveScan,
    GatedNorm,
    LatentKV,
    Heads,
    ScaleQueries,
    LoraShrink,
    LoraExpand,
    RgLru,
    _LoraPiece,
    LoraExperts,
    Select,
    _Op,
    _Angles,
    _Group,
    _Step,
)


class Program:
    """Operations in order. `keep_alive` keeps the tensors alive that the operations' addresses point to."""

    def __init__(self, ops: Sequence[Op], keep_alive: Sequence[Tensor]) -> None:
        self.ops, self.keep_alive = tuple(ops), tuple(keep_alive)
        self.array = (_Op * len(ops))(*(_Op(op.kind, ctypes.addressof(op)) for op in ops))


class StepData:
    """Tensors of one step, contiguous and on the CPU. Counts, positions and slots are int64; adapters:
    [tokens] int32, -1 for none; starts: [rows], tokens of the encoder input of each; spans: [tokens, 2] int64, as in
    `Batch`; pages: see pages.py."""

    def __init__(
        self,
        tokens: int,
        *,
        ids: Tensor | None = None,
        first: Tensor | None = None,
        count: Tensor | None = None,
        slots: Tensor | None = None,
        adapters: Tensor | None = None,
        starts: Tensor | None = None,
        spans: Tensor | None = None,
        angles: Sequence[tuple[Tensor, Tensor]] = (),
        tables: Sequence[Tensor] = (),
        slot_mapping: Sequence[Tensor] = (),
        pages: Tensor | None = None,
    ) -> None:
        self.keep_alive = (ids, first, count, slots, adapters, starts, spans, *angles, *tables, *slot_mapping, pages)
        self._angles = (_Angles * len(angles))(*(_Angles(_at(cos), _at(sin)) for cos, sin in angles))
        self._groups = (_Group * len(tables))(
            *(_Group(_at(table), _at(own)) for table, own in zip(tables, slot_mapping, strict=True))
        )
        layers, planes, block_tokens, kv_heads, dim = pages.shape[1:] if pages is not None else (0,) * 5
        self.struct = _Step(
            tokens=tokens,
            rows=0 if first is None else len(first),
            table_width=tables[0].shape[1] if tables else 0,
            ids=_at(ids),
            first=_at(first),
            count=_at(count),
            slots=_at(slots),
            adapters=_at(adapters),
            starts=_at(starts),
            spans=_at(spans),
            angles=ctypes.addressof(self._angles),
            groups=ctypes.addressof(self._groups),
            pages=_at(pages),
            layers=layers,
            planes=planes,
            block_tokens=block_tokens,
            page_kv_heads=kv_heads,
            page_dim=dim if pages is None else head_dim(pages),
            page_type=0 if pages is None else PAGE_TYPES[pages.dtype],
        )


class Team:
    """Threads of one compiled variant. One call of `run` at a time; the caller is one of the threads. cpus: one for
    each thread, to which all but the caller are pinned, or none. bf16: weights are packed for bf16 arithmetic."""

    def __init__(self, variant: str, threads: int, cpus: Sequence[int] = (), *, bf16: bool = False) -> None:
        self.variant, self.threads = variant, threads
        self._runner: int | None = None
        if cpus and len(cpus) != threads:
            raise ValueError(f"{len(cpus)} CPUs for {threads} threads: pass one per thread, or none")
        if bf16 and variant not in BF16_VARIANTS:
            raise ValueError(f"{variant} kernels have no bf16 arithmetic; {' and '.join(BF16_VARIANTS)} kernels have")
        self._library = load(variant)
        cut = [c_int64() for _ in range(3)]
        self._library.slipway_tiling(*map(ctypes.byref, cut))
        self.tiling = Tiling(variant, *(each.value for each in cut), bf16=bf16)
        _compare_sizes(self._library)
        self._runner = self._library.slipway_start(threads, (c_int32 * len(cpus))(*cpus) if cpus else None)
        if self._runner is None:
            raise OSError(f"{threads} threads cannot be started: the limit of processes or of memory is reached")

    def run(self, program: Program, step: StepData) -> None:
        """Run the program. Raise CollectiveAborted if another rank of the model is lost."""
        if self._library.slipway_run(self._runner, program.array, len(program.ops), ctypes.byref(step.struct)):
            raise CollectiveAborted("another rank of the model has exited")

    def call(self, function: str, *arguments: Tensor | int | None) -> None:
        """Call a function of the library on rows of logits, see SAMPLING. Tensors must be contiguous, except for the
        rows of tensors whose stride is an argument."""
        getattr(self._library, f"slipway_{function}")(
            self._runner, *(one.data_ptr() if isinstance(one, Tensor) else one for one in arguments)
        )

    def best(self, logits: Tensor, rows: Tensor, keys: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return for each of these rows of logits [.., vocab] float32 the token with the largest logit, int64, and that
        logit, float32. With keys, [rows, 2] int32, logit + noise decides (see engine/sampling/noise.py) and is
        returned. The first of equals; NaN is larger than all numbers."""
        tokens, scores = torch.empty(len(rows), dtype=torch.int64), torch.empty(len(rows))
        rows = rows.to(torch.int64).contiguous()
        keys = None if keys is None else keys.to(torch.int32).contiguous()
        assert logits.is_contiguous()
        self.call("draw", logits, logits.shape[1], rows, len(rows), keys, tokens, scores)
        return tokens, scores

    def best_truncated(
        self, logits: Tensor, rows: Tensor, keys: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Draw with noise among the tokens that min_p, then top_k, then top_p keep (0, 0 and 1 cut nothing). Return
        tokens and scores as `best` does, and where the cuts end, floor float32 and last int64: the kept tokens have a
        logit above the floor, or equal to it and an id up to `last`. All are [rows]. A score is not finite if a logit
        is NaN or no token is possible."""
        tokens, scores = torch.empty(len(rows), dtype=torch.int64), torch.empty(len(rows))
        floors, lasts = torch.empty_like(scores), torch.empty_like(tokens)
        rows, keys = rows.to(torch.int64).contiguous(), keys.to(torch.int32).contiguous()
        cuts = (top_k.to(torch.int64), top_p.to(torch.float64), min_p.to(torch.float64).log())
        assert logits.is_contiguous()
        self.call(
            *("draw_truncated", logits, logits.shape[1], rows, len(rows), keys, *(cut.contiguous() for cut in cuts)),
            *(tokens, scores, floors, lasts),
        )
        return tokens, scores, floors, lasts

    def logprobs(
        self,
        logits: Tensor,
        chosen: Tensor,
        count: int,
        at: Tensor | None = None,
        kept: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return log probabilities of the rows `at` (None: all) of logits, [.., vocab] float32. chosen: [rows] int64,
        one token of each row → its log probability [rows] float32, its rank [rows] int64, and the `count` most likely
        tokens [rows, count] int64 and their log probabilities, float32, descending, equal ones by id. kept: a divisor
        for each row, and the floor and last of `best_truncated`; logits / divisor outside of them are impossible."""
        at = torch.arange(len(logits)) if at is None else at.to(torch.int64).contiguous()
        rows, chosen = len(at), chosen.to(torch.int64).contiguous()
        own, ranks = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
        tokens, values = torch.empty((rows, count), dtype=torch.int64), torch.empty((rows, count))
        divisors, floors, lasts = (None, None, None) if kept is None else (one.contiguous() for one in kept)
        assert logits.stride(1) == 1 and (lasts is None or lasts.dtype == torch.int64)
        self.call(
            *("logprobs", logits, logits.stride(0), logits.shape[1], at, rows, chosen, count, divisors, floors, lasts),
            *(own, ranks, tokens, values),
        )
        return own, ranks, tokens, values

    def close(self) -> None:
        if self._runner is not None:
            self._library.slipway_stop(self._runner)
            self._runner = None

    def __del__(self) -> None:
        self.close()


def _at(tensor: Tensor | None) -> int | None:
    if tensor is None:
        return None
    assert tensor.is_contiguous() and tensor.device.type == "cpu", "compiled kernels read contiguous CPU tensors"
    return tensor.data_ptr()


def _compare_sizes(library: ctypes.CDLL) -> None:
    sizes = (c_int64 * len(MIRRORED))()
    found = library.slipway_sizes(sizes, len(MIRRORED))
    if found != len(MIRRORED) or list(sizes) != [ctypes.sizeof(one) for one in MIRRORED]:
        raise MissingKernels("the compiled kernels do not match this version of the package; reinstall it")
