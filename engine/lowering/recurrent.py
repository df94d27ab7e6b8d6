"""Lowering of recurrent mixers. A mixer reads the output of its first projection and yields its operations; the output
projection and the sum over ranks follow in `engine.lowering.lower`."""

import math
from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, singledispatch

from engine.lowering.operations import (
    Activation,
    BlockLinear,
    BlockMatrices,
    CausalConv,
    DeltaRule,
    Gate,
    GatedNorm,
    GatedRecurrence,
    Linear,
    Matrix,
    NormalizeParts,
    NormVector,
    RecurrentParameter,
    SelectiveScan,
    Value,
    scaled,
    split,
    whole,
)
from engine.lowering.program import Op
from engine.models.parts import (
    DeltaNet,
    KimiDelta,
    LightningAttention,
    Mamba,
    Mamba2,
    Recurrent,
    RgLru,
    ShortConv,
)
from engine.models.ranks import shared_units


@dataclass(frozen=True)
class MixerInputs:
    """Inputs of the lowering of a mixer."""

    x: Value  # input of the part
    layer: int  # number of the recurrent layer
    path: str  # of the module in the checkpoint
    matrices: tuple[Matrix, ...]  # of `Recurrent.linears`
    parameters: Mapping[str, RecurrentParameter]
    ranks: int

    def share(self, units: int, what: str) -> int:
        return shared_units(units, 0, self.ranks, what)[1]

    @cached_property
    def projected(self) -> Value:
        """Output of the first projection."""
        rows = self.matrices[0].linear.rows
        return Value(name="projected", width=sum(self.share(row.units, "rows") * row.width for row in rows))

    def third(self) -> Value:
        """Input of the output projection of mixers whose first projection has three parts of equal size."""
        return Value(name="mixed", width=self.projected.width // 3)


Mixed = Generator[Op, None, Value]
"""Operations of a mixer; the input of the output projection is returned."""


def mix(part: Recurrent, given: MixerInputs) -> Mixed:
    """Yield the operations of a mixer up to the input of its output projection, which is returned."""
    yield Linear(x=given.x, y=given.projected, weight=given.matrices[0])
    return (yield from _mix(part, given))


@singledispatch
def _mix(part: Recurrent, given: MixerInputs) -> Mixed:
    raise NotImplementedError(f"{type(part).__name__} has no lowering")


@_mix.register
def _(part: DeltaNet, given: MixerInputs) -> Mixed:
    of, projected = given.parameters, given.projected
    key_heads, value_heads = given.share(part.key_heads, "key heads"), given.share(part.value_heads, "value heads")
    mixed, gates = Value(name="mixed", width=value_heads * part.value_dim), Value(name="gates", width=2 * value_heads)
    yield Linear(x=given.x, y=gates, weight=given.matrices[1])
    conved = Value(name="conved", width=projected.width - mixed.width)
    qkv, z = split(projected, conved.width, mixed.width)
    yield CausalConv(x=qkv, y=conved, weight=of["conv"], bias=None, act="silu", layer=given.layer)
    b, a = split(gates, value_heads, value_heads)
    yield DeltaRule(
        qkv=conved,
        a=a,
        b=b,
        y=mixed,
        slope=of["A"],
        dt_bias=of["dt_bias"],
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=part.key_dim,
        value_dim=part.value_dim,
        beta_scale=part.beta_scale,
        vector_decay=False,
        layer=given.layer,
    )
    yield GatedNorm(x=mixed, gate=z, y=mixed, weight=of["norm"], eps=part.eps, groups=value_heads, gate_first=False)
    return mixed


@_mix.register
def _(part: KimiDelta, given: MixerInputs) -> Mixed:
    of, projected, mixed, dim = given.parameters, given.projected, given.third(), part.head_dim
    heads = given.share(part.heads, "heads")
    conved, low_rank = Value(name="conved", width=projected.width), Value(name="low_rank", width=2 * dim)
    b = Value(name="gates", width=heads)
    a, z = Value(name="decays", width=heads * dim), Value(name="gate", width=heads * dim)
    forget, gate = split(low_rank, dim, dim)
    _, b_proj, low_proj, forget_proj, gate_proj, _ = given.matrices
    yield CausalConv(x=whole(projected), y=conved, weight=of["conv"], bias=None, act="silu", layer=given.layer)
    yield Linear(x=given.x, y=b, weight=b_proj)
    yield Linear(x=given.x, y=low_rank, weight=low_proj)
    yield Linear(x=forget, y=a, weight=forget_proj)
    yield Linear(x=gate, y=z, weight=gate_proj)
    yield DeltaRule(
        qkv=conved,
        a=whole(a),
        b=whole(b),
        y=mixed,
        slope=of["A"],
        dt_bias=of["dt_bias"],
        key_heads=heads,
        value_heads=heads,
        key_dim=dim,
        value_dim=dim,
        beta_scale=1.0,
        vector_decay=True,
        layer=given.layer,
    )
    yield GatedNorm(
        x=mixed,
        gate=whole(z),
        y=mixed,
        weight=of["norm"],
        eps=part.eps,
        groups=heads,
        gate_first=False,
        act="sigmoid",
    )
    return mixed


@_mix.register
def _(part: Mamba, given: MixerInputs) -> Mixed:
    of, projected = given.parameters, given.projected
    mixed, conved, steps = (Value(name=name, width=projected.width // 2) for name in ("mixed", "conved", "steps"))
    x, z = split(projected, mixed.width, mixed.width)
    _, x_proj, dt_proj, _ = given.matrices
    yield CausalConv(x=x, y=conved, weight=of["conv"], bias=of.get("conv_bias"), act="silu", layer=given.layer)
    low_rank = Value(name="low_rank", width=part.dt_rank + 2 * part.state)
    dt, b, c = split(low_rank, part.dt_rank, part.state, part.state)
    yield Linear(x=conved, y=low_rank, weight=x_proj, reduce=given.ranks > 1)
    if part.norms:
        yield NormalizeParts(x=low_rank, weights=tuple(NormVector(norm=one, path=given.path) for one in part.norms))
    yield Linear(x=dt, y=steps, weight=dt_proj)
    yield SelectiveScan(
        x=whole(conved),
        b=b,
        c=c,
        dt=whole(steps),
        gate=z,
        y=mixed,
        a=of["A"],
        d=of["D"],
        dt_bias=of["dt_bias"],
        heads=mixed.width,
        head_dim=1,
        groups=1,
        state=part.state,
        dt_limits=(0.0, math.inf),
        layer=given.layer,
    )
    return mixed


@_mix.register
def _(part: Mamba2, given: MixerInputs) -> Mixed:
    of, projected = given.parameters, given.projected
    heads, groups = given.share(part.heads, "heads"), given.share(part.groups, "groups of heads")
    mixed = Value(name="mixed", width=heads * part.head_dim)
    conved = Value(name="conved", width=projected.width - mixed.width - heads)
    z, xbc, dt = split(projected, mixed.width, conved.width, heads)
    sizes = mixed.width, groups * part.state, groups * part.state
    for columns, factor in zip(split(projected, mixed.width, *sizes, heads), part.scales, strict=False):
        yield from scaled(columns, factor)
    x, b, c = split(conved, *sizes)
    yield CausalConv(x=xbc, y=conved, weight=of["conv"], bias=of.get("conv_bias"), act="silu", layer=given.layer)
    yield SelectiveScan(
        x=x,
        b=b,
        c=c,
        dt=dt,
        gate=z if part.norm == "none" else None,
        y=mixed,
        a=of["A"],
        d=of["D"],
        dt_bias=of["dt_bias"],
        heads=heads,
        head_dim=part.head_dim,
        groups=groups,
        state=part.state,
        dt_limits=part.dt_limits,
        layer=given.layer,
    )
    if part.norm != "none":
        yield GatedNorm(
            x=mixed,
            gate=z,
            y=mixed,
            weight=of["norm"],
            eps=part.eps,
            groups=groups,
            gate_first=part.norm == "gated",
            all_groups=part.groups if part.groups < given.ranks else None,
        )
    return mixed


@_mix.register
def _(part: LightningAttention, given: MixerInputs) -> Mixed:
    """The recurrence is a selective scan whose steps are all 1, because their limits are."""
    of, mixed, heads = given.parameters, given.third(), given.share(part.heads, "heads")
    activated = Value(name="activated_qkv", width=given.projected.width)
    z = Value(name="gate", width=mixed.width)
    yield Activation(x=given.projected, y=activated, act="silu", gated=False)
    q, k, v = split(activated, *(mixed.width,) * 3)
    yield SelectiveScan(
        x=v,
        b=k,
        c=q,
        dt=replace(q, width=heads),  # any numbers
        gate=None,
        y=mixed,
        a=of["A"],
        d=None,
        dt_bias=None,
        heads=heads,
        head_dim=part.head_dim,
        groups=heads,
        state=part.head_dim,
        dt_limits=(1.0, 1.0),
        layer=given.layer,
    )
    yield Linear(x=given.x, y=z, weight=given.matrices[1])
    yield GatedNorm(
        x=mixed,
        gate=whole(z),
        y=mixed,
        weight=of["norm"],
        eps=part.eps,
        groups=1,
        gate_first=False,
        act="sigmoid",
        all_groups=1 if given.ranks > 1 else None,
    )
    return mixed


@_mix.register
def _(part: RgLru, given: MixerInputs) -> Mixed:
    of, x = given.parameters, given.projected
    names = ("mixed", "opening", "activated", "conved", "gate", "decays")
    mixed, opening, opened, conved, gate, decay = (Value(name=name, width=x.width) for name in names)
    yield Linear(x=given.x, y=opening, weight=given.matrices[1])
    yield CausalConv(x=whole(x), y=conved, weight=of["conv"], bias=of["conv_bias"], act="none", layer=given.layer)
    for source, value in zip(part.block_matrices(), (gate, decay), strict=True):
        matrices = BlockMatrices(source=source, heads=part.heads, size=part.head_dim, path=given.path)
        yield BlockLinear(x=conved, y=value, weight=matrices, heads=given.share(part.heads, "heads"))
    rates = {role: of[role] for role in ("gate_bias", "decay_bias", "rate")}
    yield GatedRecurrence(x=conved, gate=gate, decay=decay, y=mixed, layer=given.layer, **rates)
    yield Activation(x=opening, y=opened, act=part.act, gated=False)
    yield Gate(x=whole(mixed), gate=whole(opened), y=mixed, act="none")
    return mixed


@_mix.register
def _(part: ShortConv, given: MixerInputs) -> Mixed:
    of, mixed = given.parameters, given.third()
    b, c, x = split(given.projected, *(mixed.width,) * 3)
    conved = Value(name="conved", width=mixed.width)
    yield Gate(x=x, gate=b, y=mixed, act="none")
    yield CausalConv(
        x=whole(mixed), y=conved, weight=of["conv"], bias=of.get("conv_bias"), act="none", layer=given.layer
    )
    yield Gate(x=whole(conved), gate=c, y=mixed, act="none")
    return mixed
