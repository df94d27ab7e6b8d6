"""Executor of a tower's program with Triton kernels, by the functions of the decoder (`fused/`). Attention is among the
rows of the same frame or window, without pages."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from engine.distributed.world import World
from engine.layers.fused_rows import activation, add, add_norm, keep, normalize, prepare_rows, qk_norm, rotate
from engine.layers.linear import Read, Target
from engine.layers.loaded import LoadedWeights, unloaded
from engine.layers.step import NO_ROWS, TowerRows
from engine.lowering.operations import (
    Activation,
    Add,
    AddNormalize,
    Attend,
    Columns,
    Input,
    Keep,
    Linear,
    Normalize,
    PrepareKV,
    QKNorm,
    Rotate,
    Value,
)
from engine.lowering.program import Op, Program
from engine.lowering.rewrites import fuse_add_normalize, fuse_prepare_kv, last_uses
from engine.models.parts import RMSNorm
from kernels.attention.encoder import ENCODER_ATTENTION


def has_kernels(program: Program) -> bool:
    """Return whether this executor runs a program: no other operations, and no layer norm of all heads together."""
    ops = _fused(program)
    norms = (op.weight.attention.qk_norm for op in ops if isinstance(op, QKNorm))
    return all(type(op) in (Input, *FUNCTIONS) for op in ops) and all(isinstance(norm, RMSNorm) for norm in norms)


class TritonExecutor:
    def __init__(self, program: Program, world: World, target: Target) -> None:
        self.program, self.target = program, target
        self.weights: LoadedWeights = unloaded(program, None, world)
        ops = _fused(program)
        self._ops = tuple(zip(ops, last_uses(ops, program.out), strict=True))

    @property
    def buffer_bytes(self) -> int:
        return 0

    def reserve(self, tokens: int) -> None:
        """Allocate nothing: torch allocates as it computes."""

    def load(self, read: Read) -> None:
        for layer in self.weights.by_name.values():
            layer.load(read, self.target)

    def run(self, x: Tensor, rows: TowerRows = NO_ROWS) -> Tensor:
        run = _Run(self.weights, rows, x.device)
        run[self.program.given] = x
        for op, unused in self._ops:
            if not isinstance(op, Input):
                FUNCTIONS[type(op)](op, run)
            for name in unused:
                run.values.pop(name, None)
        found: Tensor = run[self.program.out]
        return found

    @torch.inference_mode()
    def warm(self) -> None:
        """Run the program with a single row, and with frames of several, so that its kernels are compiled."""
        for count in ((1,), (16, 17)):
            x = torch.zeros(sum(count), self.program.given.width, dtype=self.target.dtype, device=self.target.device)
            angles = {
                rope: (x.new_zeros((len(x), 1, rope.dim), dtype=torch.float32),) * 2 for rope in self.program.ropes
            }
            self.run(x, TowerRows(count, count, angles))


class _Run:
    def __init__(self, weights: LoadedWeights, rows: TowerRows, device: torch.device) -> None:
        self.weights = weights
        self.values: dict[str, Any] = {}
        self.frames, self.windows = (_starts(count, device) for count in (rows.count, rows.windows))
        self.angles = {rope: _by_pair(*both, rope.interleaved) for rope, both in rows.angles.items()}

    def has(self, value: Value) -> bool:
        return value.name in self.values

    def columns(self, columns: Columns) -> Tensor:
        found: Tensor = self[columns.value]
        return found[:, columns.first : columns.first + columns.width]

    def __getitem__(self, value: Value) -> Any:
        return self.values[value.name]

    def __setitem__(self, value: Value, tensor: Any) -> None:
        self.values[value.name] = tensor


def _add_normalize(op: AddNormalize, run: _Run) -> None:
    run[op.x], run[op.y] = add_norm(run.weights.norm(op.weight), run[op.added], run[op.x], op.scale)


def _linear(op: Linear, run: _Run) -> None:
    run[op.y] = run.weights.matrix(op.weight)(run.columns(op.x) if isinstance(op.x, Columns) else run[op.x])


def _attend(op: Attend, run: _Run) -> None:
    part, starts = op.part, run.windows if op.windowed else run.frames
    q, k, v = run[op.qkv].unflatten(-1, (-1, part.head_dim)).split((op.heads, op.kv_heads, op.kv_heads), 1)
    out, biases = torch.empty(q.shape, dtype=q.dtype, device=q.device), run.weights.bias(op.bias)
    ENCODER_ATTENTION(q, k, v, starts, out, op.scale, False, part.window, part.softcap, biases)
    run[op.y] = out.flatten(1)


FUNCTIONS: dict[type, Callable[[Any, _Run], None]] = {
    Keep: keep,
    Normalize: normalize,
    AddNormalize: _add_normalize,
    Linear: _linear,
    Activation: activation,
    Add: add,
    QKNorm: qk_norm,
    Rotate: rotate,
    PrepareKV: prepare_rows,
    Attend: _attend,
}


def _starts(count: Sequence[int], device: torch.device) -> Tensor:
    """Return the first row of each frame, and the number of rows, int32."""
    return torch.tensor(list(accumulate(count, initial=0)), dtype=torch.int32, device=device)


def _by_pair(cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Return the angles of each pair, [patches, pairs], from those for `rotate_`, [patches, 1, dim]."""
    half = cos.shape[2] // 2
    first, second = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(half), slice(half, None))
    return cos[:, 0, first].contiguous(), sin[:, 0, second].contiguous()


def _fused(program: Program) -> tuple[Op, ...]:
    return fuse_add_normalize(fuse_prepare_kv(program.ops, norms=True))
