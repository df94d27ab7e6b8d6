"""Recurrent mixers, by Triton kernels."""

from collections.abc import Callable
from typing import Any

from engine.layers.fused.run import Run
from engine.layers.norm import gated_norm_of_ranks
from engine.lowering.operations import CausalConv, DeltaRule, GatedNorm, GatedRecurrence, SelectiveScan
from kernels.recurrent.causal_conv import CAUSAL_CONV
from kernels.recurrent.delta_rule import DELTA_RULE
from kernels.recurrent.gated_norm import GATED_NORM
from kernels.recurrent.rg_lru import RG_LRU
from kernels.recurrent.selective_scan import SELECTIVE_SCAN


def _causal_conv(op: CausalConv, run: Run) -> None:
    weights, state = run.weights, run.step.states[op.layer][0]
    bias = None if op.bias is None else weights.parameter(op.bias)
    arguments = run.columns(op.x), weights.parameter(op.weight), bias, op.act, state, *run.state_rows
    run[op.y], _ = CAUSAL_CONV(*arguments)


def _delta_rule(op: DeltaRule, run: Run) -> None:
    keys, weights, state = op.key_heads * op.key_dim, run.weights, run.step.states[op.layer][-1]
    q, k, v = run[op.qkv].split((keys, keys, op.value_heads * op.value_dim), 1)
    a, b, dt_bias = run.columns(op.a), run.columns(op.b), weights.parameter(op.dt_bias)
    if op.vector_decay:
        a = a.unflatten(1, (-1, op.key_dim))
    heads = (one.unflatten(1, (-1, dim)) for one, dim in ((q, op.key_dim), (k, op.key_dim), (v, op.value_dim)))
    decay = a, b, weights.parameter(op.slope), dt_bias
    y, _ = DELTA_RULE(*heads, *decay, state, *run.state_rows, op.key_dim**-0.5, True, op.beta_scale)
    run[op.y] = y.flatten(1)


def _selective_scan(op: SelectiveScan, run: Run) -> None:
    weights, state = run.weights, run.step.states[op.layer][-1]
    b, c = (run.columns(one).unflatten(1, (-1, op.state)) for one in (op.b, op.c))
    x = run.columns(op.x).unflatten(1, (-1, op.head_dim))
    gate = None if op.gate is None else run.columns(op.gate).unflatten(1, (-1, op.head_dim))
    a = weights.parameter(op.a)
    d, bias = (None if one is None else weights.parameter(one) for one in (op.d, op.dt_bias))
    y, _ = SELECTIVE_SCAN(x, run.columns(op.dt), a, b, c, d, bias, gate, state, *run.state_rows, op.dt_limits)
    run[op.y] = y.flatten(1)


def _gated_norm(op: GatedNorm, run: Run) -> None:
    weight, x, gate = run.weights.parameter(op.weight), run[op.x], run.columns(op.gate)
    if op.all_groups is not None:
        run[op.y] = gated_norm_of_ranks(op, x, gate, weight, run.model.vocabulary.world)
        return
    run[op.y] = GATED_NORM(x, gate, weight, op.eps, op.gate_first, op.act, op.groups)


def _gated_recurrence(op: GatedRecurrence, run: Run) -> None:
    given = run[op.x], run[op.gate], run[op.decay]
    vectors = (run.weights.parameter(one) for one in (op.gate_bias, op.decay_bias, op.rate))
    run[op.y], _ = RG_LRU(*given, *vectors, run.step.states[op.layer][-1], *run.state_rows)


FUNCTIONS: dict[type, Callable[[Any, Run], None]] = {
    CausalConv: _causal_conv,
    DeltaRule: _delta_rule,
    SelectiveScan: _selective_scan,
    GatedNorm: _gated_norm,
    GatedRecurrence: _gated_recurrence,
}
