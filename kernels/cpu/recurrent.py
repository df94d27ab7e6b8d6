"""Compiled bodies of the operations in kernels/recurrent, with a Team as an additional first argument (see bodies.py).

The compiled program of a model has the same operations; see `CausalConv`, `DeltaRule`, `SelectiveScan`, `RgLru` and
`GatedNorm` in program.py.
"""

import math

import torch
from torch import Tensor

from kernels.cpu import program as cpu
from kernels.cpu.program import Program, StepData, Team


def causal_conv(
    team: Team,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    act: str,
    state: Tensor | None,
    query_start: Tensor,
    slots: Tensor,
    first: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """See kernels/recurrent/causal_conv.py. Without a state, every row begins with zeros."""
    y, columns = torch.empty(x.shape), weight.T.contiguous()
    op = cpu.CausalConv(
        x=x.data_ptr(),
        weight=columns.data_ptr(),
        bias=_at(bias),
        y=y.data_ptr(),
        state=_at(state),
        x_stride=x.stride(0),
        y_stride=y.stride(0),
        slot_stride=0 if state is None else state.stride(0),
        channels=weight.shape[0],
        width=weight.shape[1],
        silu=act == "silu",
    )
    kept = (x, columns, y) if state is None else (x, columns, y, state)
    _run(team, op, kept, query_start, slots, first)
    return y, state


def delta_rule(
    team: Team,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    query_start: Tensor,
    slots: Tensor,
    first: Tensor,
    scale: float,
    qk_norm: bool = True,
    beta_scale: float = 1.0,
    lower_bound: float | None = None,
) -> tuple[Tensor, Tensor]:
    """See kernels/recurrent/delta_rule.py."""
    y = torch.empty(v.shape)
    op = cpu.DeltaRule(
        q=q.data_ptr(),
        k=k.data_ptr(),
        v=v.data_ptr(),
        a=a.data_ptr(),
        b=b.data_ptr(),
        A=A.data_ptr(),
        dt_bias=dt_bias.data_ptr(),
        y=y.data_ptr(),
        state=state.data_ptr(),
        q_stride=q.stride(0),
        k_stride=k.stride(0),
        v_stride=v.stride(0),
        a_stride=a.stride(0),
        b_stride=b.stride(0),
        y_stride=y.stride(0),
        slot_stride=state.stride(0),
        heads=v.shape[1],
        key_heads=q.shape[1],
        key_dim=q.shape[2],
        value_dim=v.shape[2],
        scale=scale,
        beta_scale=beta_scale,
        lower_bound=lower_bound or 0.0,
        qk_norm=qk_norm,
        vector_decay=a.ndim == 3,
    )
    _run(team, op, (q, k, v, a, b, A, dt_bias, y, state), query_start, slots, first)
    return y, state


def selective_scan(
    team: Team,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    gate: Tensor | None,
    state: Tensor,
    query_start: Tensor,
    slots: Tensor,
    first: Tensor,
    dt_limits: tuple[float, float] = (0.0, math.inf),
) -> tuple[Tensor, Tensor]:
    """See kernels/recurrent/selective_scan.py."""
    y = torch.empty(x.shape)
    heads, size = x.shape[1:]
    wide_d = None if D is None else D.view(heads, -1).expand(heads, size).contiguous()
    op = cpu.SelectiveScan(
        x=x.data_ptr(),
        dt=dt.data_ptr(),
        A=A.data_ptr(),
        B=B.data_ptr(),
        C=C.data_ptr(),
        D=_at(wide_d),
        dt_bias=_at(dt_bias),
        gate=_at(gate),
        y=y.data_ptr(),
        state=state.data_ptr(),
        x_stride=x.stride(0),
        dt_stride=dt.stride(0),
        B_stride=B.stride(0),
        C_stride=C.stride(0),
        gate_stride=0 if gate is None else gate.stride(0),
        y_stride=y.stride(0),
        slot_stride=state.stride(0),
        heads=heads,
        groups=B.shape[1],
        head_dim=size,
        state_dim=B.shape[2],
        dt_min=dt_limits[0],
        dt_max=dt_limits[1],
        vector_A=A.ndim == 2,
    )
    kept = [one for one in (x, dt, A, B, C, wide_d, dt_bias, gate, y, state) if one is not None]
    _run(team, op, kept, query_start, slots, first)
    return y, state


def rg_lru(
    team: Team,
    x: Tensor,
    gate: Tensor,
    decay: Tensor,
    gate_bias: Tensor,
    decay_bias: Tensor,
    rate: Tensor,
    state: Tensor,
    query_start: Tensor,
    slots: Tensor,
    first: Tensor,
) -> tuple[Tensor, Tensor]:
    """See kernels/recurrent/rg_lru.py."""
    y = torch.empty(x.shape)
    op = cpu.RgLru(
        x=x.data_ptr(),
        gate=gate.data_ptr(),
        decay=decay.data_ptr(),
        gate_bias=gate_bias.data_ptr(),
        decay_bias=decay_bias.data_ptr(),
        rate=rate.data_ptr(),
        y=y.data_ptr(),
        state=state.data_ptr(),
        x_stride=x.stride(0),
        gate_stride=gate.stride(0),
        decay_stride=decay.stride(0),
        y_stride=y.stride(0),
        slot_stride=state.stride(0),
        channels=x.shape[1],
    )
    _run(team, op, (x, gate, decay, gate_bias, decay_bias, rate, y, state), query_start, slots, first)
    return y, state


def gated_norm(
    team: Team,
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    gate_first: bool = False,
    act: str = "silu",
    groups: int = 1,
) -> Tensor:
    """See kernels/recurrent/gated_norm.py."""
    y = torch.empty(x.shape)
    size = x.shape[1] // groups
    op = cpu.GatedNorm(
        x=x.data_ptr(),
        gate=gate.data_ptr(),
        weight=weight.data_ptr(),
        y=y.data_ptr(),
        x_stride=x.stride(0),
        gate_stride=gate.stride(0),
        y_stride=y.stride(0),
        groups=groups,
        size=size,
        weight_stride=size if len(weight) == x.shape[1] else 0,
        eps=eps,
        gate_first=gate_first,
        silu=act == "silu",
    )
    team.run(Program([op], (x, gate, weight, y)), StepData(len(x)))
    return y


def _run(team: Team, op: cpu.Op, keep_alive: list[Tensor] | tuple[Tensor, ...], *rows: Tensor) -> None:
    """Run one operation with a state. rows: query_start, slots, first."""
    query_start, slots, first = (one.to(torch.int64) for one in rows)
    step = StepData(int(query_start[-1]), first=first, count=query_start.diff(), slots=slots)
    team.run(Program([op], keep_alive), step)


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
