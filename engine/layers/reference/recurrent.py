"""Recurrent mixers, with torch."""

from collections.abc import Callable
from typing import Any

from engine.layers.norm import gated_norm_of_ranks
from engine.layers.reference.run import Run, heads
from engine.lowering.operations import CausalConv, DeltaRule, GatedNorm, GatedRecurrence, SelectiveScan
from kernels.recurrent.causal_conv import CAUSAL_CONV, convolved
from kernels.recurrent.delta_rule import DELTA_RULE
from kernels.recurrent.gated_norm import GATED_NORM
from kernels.recurrent.rg_lru import RG_LRU
from kernels.recurrent.selective_scan import SELECTIVE_SCAN


def _causal_conv(op: CausalConv, run: Run) -> None:
    weight = run.weights.parameter(op.weight)
    bias = None if op.bias is None else run.weights.parameter(op.bias)
    if op.layer is None:
        run[op.y] = convolved(run.columns(op.x), weight, bias, run.step.count)
        return
    state = run.step.states[op.layer][0]
    run[op.y], _ = CAUSAL_CONV.reference(run.columns(op.x), weight, bias, op.act, state, *run.step.state_rows)


def _delta_rule(op: DeltaRule, run: Run) -> None:
    keys, values = op.key_heads * op.key_dim, op.value_heads * op.value_dim
    q, k, v = run[op.qkv].split((keys, keys, values), 1)
    a, b, dt_bias = run.columns(op.a), run.columns(op.b), run.weights.parameter(op.dt_bias)
    if op.vector_decay:
        a, dt_bias = heads(a, op.key_dim), dt_bias.view(-1, op.key_dim)
    y, _ = DELTA_RULE.reference(
        heads(q, op.key_dim),
        heads(k, op.key_dim),
        heads(v, op.value_dim),
        a,
        b,
        run.weights.parameter(op.slope),
        dt_bias,
        run.step.states[op.layer][-1],
        *run.step.state_rows,
        scale=op.key_dim**-0.5,
        beta_scale=op.beta_scale,
    )
    run[op.y] = y.flatten(1)


def _selective_scan(op: SelectiveScan, run: Run) -> None:
    y, _ = SELECTIVE_SCAN.reference(
        heads(run.columns(op.x), op.head_dim),
        run.columns(op.dt),
        run.weights.parameter(op.a),
        heads(run.columns(op.b), op.state),
        heads(run.columns(op.c), op.state),
        None if op.d is None else run.weights.parameter(op.d),
        None if op.dt_bias is None else run.weights.parameter(op.dt_bias),
        None if op.gate is None else heads(run.columns(op.gate), op.head_dim),
        run.step.states[op.layer][-1],
        *run.step.state_rows,
        dt_limits=op.dt_limits,
    )
    run[op.y] = y.flatten(1)


def _gated_norm(op: GatedNorm, run: Run) -> None:
    weight, x, gate = run.weights.parameter(op.weight), run[op.x], run.columns(op.gate)
    if op.all_groups is not None:
        run[op.y] = gated_norm_of_ranks(op, x, gate, weight, run.world)
        return
    run[op.y] = GATED_NORM.reference(x, gate, weight, op.eps, op.gate_first, op.act, op.groups)


def _gated_recurrence(op: GatedRecurrence, run: Run) -> None:
    given = run[op.x], run[op.gate], run[op.decay]
    vectors = (run.weights.parameter(one) for one in (op.gate_bias, op.decay_bias, op.rate))
    run[op.y], _ = RG_LRU.reference(*given, *vectors, run.step.states[op.layer][-1], *run.step.state_rows)


FUNCTIONS: dict[type, Callable[[Any, Run], None]] = {
    CausalConv: _causal_conv,
    DeltaRule: _delta_rule,
    SelectiveScan: _selective_scan,
    GatedNorm: _gated_norm,
    GatedRecurrence: _gated_recurrence,
}
