"""Mamba mixer: Mamba, Falcon Mamba, Jamba."""

from dataclasses import replace

from engine.models.declared import declared
from engine.models.parts.linear import Linear, Parameter, Rows, packed, parameter
from engine.models.parts.norms import RMSNorm
from engine.models.parts.recurrent.mixer import OwnUnits, Recurrent, Shape, conv_taps


@declared(frozen=True, kw_only=True)
class Mamba(Recurrent):
    """Mamba mixer (arXiv:2312.00752): out(scan(u, dt_proj(dt), B, C) · silu(z)) with u = silu(conv(x)), where in_proj
    has rows of x and z, and x_proj(u) has dt, B and C.

    State of a sequence: the last conv - 1 inputs of the convolution, and `state` numbers for each channel."""

    hidden: int
    channels: int
    dt_rank: int  # size of dt
    state: int
    conv: int
    norms: tuple[RMSNorm, ...] = ()  # of dt, B and C
    bias: bool = False  # of in_proj and out_proj
    conv_bias: bool = True
    log_decay: bool = True  # A is stored as log(-A), in GGUF as A
    name: str = "mixer"

    def linears(self) -> tuple[Linear, ...]:
        rows = packed(*(Rows(source="in_proj", units=self.channels) for _ in range(2)))
        low = packed(*(Rows(source="x_proj", units=units) for units in (self.dt_rank, self.state, self.state)))
        out = Rows(source="out_proj", units=self.hidden)
        return (
            Linear(rows=rows, inputs=self.hidden, split="rows", bias=self.bias),
            Linear(rows=low, inputs=self.channels, split="inputs"),
            Linear(rows=(Rows(source="dt_proj", units=self.channels),), inputs=self.dt_rank, split="rows"),
            Linear(rows=(out,), inputs=self.channels, split="inputs", bias=self.bias),
        )

    def exact_linears(self) -> tuple[Linear, ...]:
        return self.linears()[1:3]

    def parameters(self) -> dict[str, Parameter]:
        channels = (self.channels, 1)
        found = {"conv": conv_taps(self.linears()[0].rows[:1], self.conv)}
        if self.conv_bias:
            found["conv_bias"] = parameter("conv1d.bias", channels)
        return found | {
            "A": replace(parameter("A_log", channels, inner=(self.state,)), negative_exp=self.log_decay),
            "dt_bias": parameter("dt_proj.bias", channels),
            "D": parameter("D", channels),
        }

    def units(self) -> tuple[tuple[int, str], ...]:
        return ((self.channels, "channels of a mixer"),)

    def state_shapes(self, own: OwnUnits) -> tuple[Shape, ...]:
        channels = own(self.channels, "channels")
        return (channels, self.conv - 1), (channels, 1, self.state)

    def work_width(self, own: OwnUnits) -> int:
        # Projections, the output of the convolution, and float32 time steps with two intermediate results.
        return 14 * own(self.channels, "channels") + 2 * (self.dt_rank + 2 * self.state)
