"""A list of operations as the compiled kernels read it, and the team of threads that runs it.

The structures mirror program.h, where their fields are explained; `Team` compares their sizes when it is made.
"""

import ctypes
from collections.abc import Sequence
from ctypes import Structure, c_float, c_int32, c_int64, c_void_p
from typing import Any, ClassVar

import torch
from torch import Tensor

from kernels.cpu.library import MissingKernels, load
from kernels.cpu.packing import FORMS, Packed, Tiling

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
ACTS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}
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
        *_fields(c_int64, "x_stride y_stride inner"),
        *_fields(c_int32, "act gated"),
        ("limit", c_float),
    ]


class Heads(Structure):
    kind: ClassVar[int] = 4
    _fields_ = [
        ("qkv", c_void_p),
        *_fields(c_int64, "stride heads kv_heads dim turned"),
        *_fields(c_int32, "rope interleaved group layer"),
    ]


class Linear(Structure):
    kind: ClassVar[int] = 5
    _fields_ = [
        *_fields(c_void_p, "weight scales bias x y"),
        *_fields(c_int64, "x_stride y_stride outputs inputs group"),
        *_fields(c_int32, "form zeros scale_type"),
        ("order", c_void_p),
    ]


def linear(weight: Packed, bias: Tensor | None, x: Tensor, y: Tensor) -> Linear:
    """x: [rows, inputs]; y: [rows, outputs]; rows may be farther apart than that."""
    return Linear(
        weight=weight.data.data_ptr(),
        scales=None if weight.scales is None else weight.scales.data_ptr(),
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
        *_fields(c_void_p, "q out"),
        *_fields(c_int64, "q_stride out_stride heads kv_heads dim window"),
        *_fields(c_float, "scale softcap"),
        *_fields(c_int32, "group layer"),
    ]


class Cap(Structure):
    kind: ClassVar[int] = 7
    _fields_ = [("x", c_void_p), *_fields(c_int64, "stride size"), *_fields(c_float, "scale cap")]


class _Op(Structure):
    _fields_ = [("kind", c_int32), ("what", c_void_p)]


class _Angles(Structure):
    _fields_ = [("cos", c_void_p), ("sin", c_void_p)]


class _Group(Structure):
    _fields_ = [("table", c_void_p), ("slots", c_void_p)]


class _Step(Structure):
    _fields_ = [
        *_fields(c_int64, "tokens rows table_width"),
        *_fields(c_void_p, "ids first count angles groups pages"),
        *_fields(c_int64, "layers block_tokens page_kv_heads page_dim"),
        ("page_type", c_int32),
    ]


Op = Embed | Norm | Add | Activate | Heads | Linear | Attend | Cap
MIRRORED = (Embed, Norm, Add, Activate, Heads, Linear, Attend, Cap, _Op, _Angles, _Group, _Step)


class Program:
    """Operations in order. The tensors that their addresses point into live as long as `holds`."""

    def __init__(self, ops: Sequence[Op], holds: Sequence[Tensor]) -> None:
        self.ops, self.holds = tuple(ops), tuple(holds)
        self.array = (_Op * len(ops))(*(_Op(op.kind, ctypes.addressof(op)) for op in ops))


class StepData:
    """A step's own tensors: all contiguous and on the CPU; counts and positions int64."""

    def __init__(
        self,
        tokens: int,
        *,
        ids: Tensor | None = None,
        first: Tensor | None = None,
        count: Tensor | None = None,
        angles: Sequence[tuple[Tensor, Tensor]] = (),
        tables: Sequence[Tensor] = (),
        slots: Sequence[Tensor] = (),
        pages: Tensor | None = None,
    ) -> None:
        self.holds = (ids, first, count, *angles, *tables, *slots, pages)
        self._angles = (_Angles * len(angles))(*(_Angles(_at(cos), _at(sin)) for cos, sin in angles))
        self._groups = (_Group * len(tables))(
            *(_Group(_at(table), _at(own)) for table, own in zip(tables, slots, strict=True))
        )
        layers, _, block_tokens, kv_heads, dim = pages.shape[1:] if pages is not None else (0,) * 5
        self.struct = _Step(
            tokens=tokens,
            rows=0 if first is None else len(first),
            table_width=tables[0].shape[1] if tables else 0,
            ids=_at(ids),
            first=_at(first),
            count=_at(count),
            angles=ctypes.addressof(self._angles),
            groups=ctypes.addressof(self._groups),
            pages=_at(pages),
            layers=layers,
            block_tokens=block_tokens,
            page_kv_heads=kv_heads,
            page_dim=dim,
            page_type=0 if pages is None else TYPES[pages.dtype],
        )


class Team:
    """Threads of one compiled variant. One call of `run` at a time; the caller is one of the threads."""

    def __init__(self, variant: str, threads: int) -> None:
        self.variant, self.threads = variant, threads
        self._runner: int | None = None
        self._library = load(variant)
        sizes = [c_int64() for _ in range(3)]
        self._library.slipway_tiling(*map(ctypes.byref, sizes))
        self.tiling = Tiling(variant, *(size.value for size in sizes))
        _compare_sizes(self._library)
        self._runner = self._library.slipway_start(threads)

    def run(self, program: Program, step: StepData) -> None:
        self._library.slipway_run(self._runner, program.array, len(program.ops), ctypes.byref(step.struct))

    def best(self, logits: Tensor, rows: Tensor, keys: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Of these rows of logits [.., vocab] float32: the token with the largest logit, or, with keys [rows, 2] int32,
        logit + noise (see engine/sampling/noise.py), int64, and that sum, float32. The first of equals; NaN is larger
        than all."""
        tokens, scores = torch.empty(len(rows), dtype=torch.int64), torch.empty(len(rows))
        rows = rows.to(torch.int64).contiguous()
        keys = None if keys is None else keys.to(torch.int32).contiguous()
        self._library.slipway_draw(
            *(self._runner, _at(logits), logits.shape[1], _at(rows), len(rows)),
            *(_at(keys), _at(tokens), _at(scores)),
        )
        return tokens, scores

    def best_of_cut(
        self, logits: Tensor, rows: Tensor, keys: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The same with noise, among the tokens that min_p, then top_k, then top_p leave (0, 0 and 1 cut nothing): each
        [rows]. A score that is not finite: a logit is NaN, or no token is possible."""
        tokens, scores = torch.empty(len(rows), dtype=torch.int64), torch.empty(len(rows))
        rows, keys = rows.to(torch.int64).contiguous(), keys.to(torch.int32).contiguous()
        cuts = (top_k.to(torch.int64), top_p.to(torch.float64), min_p.to(torch.float64).log())
        self._library.slipway_draw_cut(
            *(self._runner, _at(logits), logits.shape[1], _at(rows), len(rows), _at(keys)),
            *(*map(_at, cuts), _at(tokens), _at(scores)),
        )
        return tokens, scores

    def logprobs(self, logits: Tensor, chosen: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """logits: [rows, vocab] float32; chosen: [rows] int64, one token of each → its log probability [rows] float32,
        its rank [rows] int64, and the `count` most likely tokens [rows, count] int64 with theirs, float32, descending,
        equal ones by id."""
        rows = len(logits)
        own, ranks = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
        tokens, values = torch.empty((rows, count), dtype=torch.int64), torch.empty((rows, count))
        self._library.slipway_scores(
            *(self._runner, _at(logits), logits.shape[1], rows, _at(chosen), count),
            *(_at(own), _at(ranks), _at(tokens), _at(values)),
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
    assert tensor.is_contiguous() and tensor.device.type == "cpu", "compiled kernels read contiguous tensors of the CPU"
    return tensor.data_ptr()


def _compare_sizes(library: ctypes.CDLL) -> None:
    sizes = (c_int64 * len(MIRRORED))()
    found = library.slipway_sizes(sizes, len(MIRRORED))
    if found != len(MIRRORED) or list(sizes) != [ctypes.sizeof(one) for one in MIRRORED]:
        raise MissingKernels("the compiled kernels are of another version than their callers: reinstall the package")
