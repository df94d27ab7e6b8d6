"""Operations of recurrent mixers."""

from typing import Literal

from engine.lowering.operations.operation import Operation
from engine.lowering.operations.values import Columns, Value
from engine.lowering.operations.weights import RecurrentParameter
from engine.models.declared import declared


@declared(frozen=True, kw_only=True)
class CausalConv(Operation):
    """y = act(causal depthwise convolution of x), which continues the inputs in the state of the row's sequence.
    layer: number of the recurrent layer, whose first state it is; None: rows begin with zeros, and have no state."""

    x: Columns
    y: Value
    weight: RecurrentParameter  # [channels, 1, conv]
    bias: RecurrentParameter | None
    act: Literal["silu", "none"]
    layer: int | None


@declared(frozen=True, kw_only=True)
class DeltaRule(Operation):
    """y = gated delta rule of [q, k, v], with the decay from a and the gate from b (kernels/recurrent/delta_rule.py).
    The matrix of each value head is the last state of the layer."""

    qkv: Value
    a: Columns  # one for each value head, or with `vector_decay` for each dim of its key
    b: Columns
    y: Value
    slope: RecurrentParameter  # A
    dt_bias: RecurrentParameter
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    beta_scale: float
    vector_decay: bool
    layer: int


@declared(frozen=True, kw_only=True)
class SelectiveScan(Operation):
    """y = scan of x, B and C with the steps `dt` (kernels/recurrent/selective_scan.py). The matrix of each head is the
    last state of the layer. gate: y is multiplied by silu(gate)."""

    x: Columns
    b: Columns
    c: Columns
    dt: Columns
    gate: Columns | None
    y: Value
    a: RecurrentParameter
    d: RecurrentParameter | None
    dt_bias: RecurrentParameter | None
    heads: int
    head_dim: int
    groups: int
    state: int
    dt_limits: tuple[float, float]
    layer: int


@declared(frozen=True, kw_only=True)
class GatedRecurrence(Operation):
    """y = recurrence of x with the gates of inputs and decays (kernels/recurrent/rg_lru.py). A number for each channel
    is the last state of the layer."""

    x: Value
    gate: Value
    decay: Value
    y: Value
    gate_bias: RecurrentParameter
    decay_bias: RecurrentParameter
    rate: RecurrentParameter
    layer: int


@declared(frozen=True, kw_only=True)
class GatedNorm(Operation):
    """y = norm(x) · act(gate), or norm(x · act(gate)) with `gate_first`. The mean is over each of `groups` equal
    groups of columns. all_groups: number of groups of all ranks, if they are fewer than ranks; the mean is then over
    the columns of all ranks that have a share of the group."""

    x: Value
    gate: Columns
    y: Value
    weight: RecurrentParameter
    eps: float
    groups: int
    gate_first: bool
    act: Literal["silu", "sigmoid"] = "silu"
    all_groups: int | None = None


Recurrence = CausalConv | DeltaRule | GatedRecurrence | SelectiveScan
"""Operations that read and write the state of a sequence."""
RecurrentOp = Recurrence | GatedNorm
