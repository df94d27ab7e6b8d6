"""Recurrent mixers, by compiled kernels."""

from engine.layers.compiled.build import CompiledOps, Functions, Structures, TorchOp
from engine.layers.norm import gated_norm_of_ranks
from engine.lowering.operations import CausalConv, DeltaRule, GatedNorm, GatedRecurrence, SelectiveScan
from kernels.cpu import program as cpu


def _causal_conv(op: CausalConv, ops: CompiledOps) -> Structures:
    x, y = ops.columns(op.x), ops.buffers[op.y]
    state = None if op.layer is None else ops.states[op.layer][0]
    weight = ops.weights.parameter(op.weight)
    yield cpu.CausalConv(
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        bias=None if op.bias is None else ops.weights.parameter(op.bias).data_ptr(),
        y=y.data_ptr(),
        state=None if state is None else state.data_ptr(),
        x_stride=x.stride(0),
        y_stride=y.stride(0),
        slot_stride=0 if state is None else state.stride(0),
        channels=weight.shape[1],
        width=weight.shape[0],
        silu=op.act == "silu",
    )


def _delta_rule(op: DeltaRule, ops: CompiledOps) -> Structures:
    qkv, y, state = ops.buffers[op.qkv], ops.buffers[op.y], ops.states[op.layer][-1]
    a, b = ops.columns(op.a), ops.columns(op.b)
    keys = op.key_heads * op.key_dim
    yield cpu.DeltaRule(
        q=qkv.data_ptr(),
        k=qkv[:, keys:].data_ptr(),
        v=qkv[:, 2 * keys :].data_ptr(),
        a=a.data_ptr(),
        b=b.data_ptr(),
        A=ops.weights.parameter(op.slope).data_ptr(),
        dt_bias=ops.weights.parameter(op.dt_bias).data_ptr(),
        y=y.data_ptr(),
        state=state.data_ptr(),
        **dict.fromkeys(("q_stride", "k_stride", "v_stride"), qkv.stride(0)),
        a_stride=a.stride(0),
        b_stride=b.stride(0),
        y_stride=y.stride(0),
        slot_stride=state.stride(0),
        heads=op.value_heads,
        key_heads=op.key_heads,
        key_dim=op.key_dim,
        value_dim=op.value_dim,
        scale=op.key_dim**-0.5,
        beta_scale=op.beta_scale,
        qk_norm=True,
        vector_decay=op.vector_decay,
    )


def _selective_scan(op: SelectiveScan, ops: CompiledOps) -> Structures:
    x, b, c, dt = (ops.columns(one) for one in (op.x, op.b, op.c, op.dt))
    gate = None if op.gate is None else ops.columns(op.gate)
    a, y, state = ops.weights.parameter(op.a), ops.buffers[op.y], ops.states[op.layer][-1]
    yield cpu.SelectiveScan(
        x=x.data_ptr(),
        dt=dt.data_ptr(),
        A=a.data_ptr(),
        B=b.data_ptr(),
        C=c.data_ptr(),
        D=None if op.d is None else ops.weights.parameter(op.d).data_ptr(),
        dt_bias=None if op.dt_bias is None else ops.weights.parameter(op.dt_bias).data_ptr(),
        gate=None if gate is None else gate.data_ptr(),
        y=y.data_ptr(),
        state=state.data_ptr(),
        x_stride=x.stride(0),
        B_stride=b.stride(0),
        C_stride=c.stride(0),
        gate_stride=0 if gate is None else gate.stride(0),
        dt_stride=dt.stride(0),
        y_stride=y.stride(0),
        slot_stride=state.stride(0),
        heads=op.heads,
        groups=op.groups,
        head_dim=op.head_dim,
        state_dim=op.state,
        dt_min=op.dt_limits[0],
        dt_max=op.dt_limits[1],
        vector_A=a.ndim == 2,
    )


def _gated_recurrence(op: GatedRecurrence, ops: CompiledOps) -> Structures:
    x, gate, decay, y = (ops.buffers[one] for one in (op.x, op.gate, op.decay, op.y))
    state = ops.states[op.layer][-1]
    yield cpu.RgLru(
        x=x.data_ptr(),
        gate=gate.data_ptr(),
        decay=decay.data_ptr(),
        gate_bias=ops.weights.parameter(op.gate_bias).data_ptr(),
        decay_bias=ops.weights.parameter(op.decay_bias).data_ptr(),
        rate=ops.weights.parameter(op.rate).data_ptr(),
        y=y.data_ptr(),
        state=state.data_ptr(),
        x_stride=x.stride(0),
        gate_stride=gate.stride(0),
        decay_stride=decay.stride(0),
        y_stride=y.stride(0),
        slot_stride=state.stride(0),
        channels=x.shape[1],
    )


def _gated_norm_of_ranks(op: GatedNorm, ops: CompiledOps) -> TorchOp:
    assert ops.vocabulary is not None, "a tower has no recurrent layers"
    x, gate, y = ops.buffers[op.x], ops.columns(op.gate), ops.buffers[op.y]
    weight, world = ops.weights.parameter(op.weight), ops.vocabulary.world

    def compute(tokens: int) -> None:
        y[:tokens] = gated_norm_of_ranks(op, x[:tokens], gate[:tokens], weight, world)

    return TorchOp(compute)


def _gated_norm(op: GatedNorm, ops: CompiledOps) -> Structures:
    if op.all_groups is not None:
        yield _gated_norm_of_ranks(op, ops)
        return
    x, gate, y, weight = (
        ops.buffers[op.x],
        ops.columns(op.gate),
        ops.buffers[op.y],
        ops.weights.parameter(op.weight),
    )
    size = x.shape[1] // op.groups
    yield cpu.GatedNorm(
        x=x.data_ptr(),
        gate=gate.data_ptr(),
        weight=weight.data_ptr(),
        y=y.data_ptr(),
        x_stride=x.stride(0),
        gate_stride=gate.stride(0),
        y_stride=y.stride(0),
        groups=op.groups,
        size=size,
        weight_stride=size if len(weight) == x.shape[1] else 0,
        eps=op.eps,
        gate_first=op.gate_first,
        silu=op.act == "silu",
    )


FUNCTIONS: Functions = {
    CausalConv: _causal_conv,
    DeltaRule: _delta_rule,
    SelectiveScan: _selective_scan,
    GatedRecurrence: _gated_recurrence,
    GatedNorm: _gated_norm,
}
