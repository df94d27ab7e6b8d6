"""Mamba-2 mixer: Mamba-2, Granite 4, Bamba, Falcon-H1, Nemotron-H, Zamba2."""

import math
from dataclasses import replace
from typing import Literal

from engine.models.declared import declared
from engine.models.parts.linear import Linear, Parameter, Rows, packed, parameter
from engine.models.parts.recurrent.mixer import OwnUnits, Recurrent, Shape, conv_taps, projected_width


@declared(frozen=True, kw_only=True)
class Mamba2(Recurrent):
    """Mamba-2 mixer (arXiv:2405.21060): out(norm(scan(silu(conv(x, B, C)), dt) · silu(z))).

    `norm` is the input of the norm:

    gated   the output of the scan times silu(z)
    scan    the output of the scan, before it is multiplied by silu(z)
    none    there is no norm

    The projection has rows of z, x, B, C and dt. State of a sequence: the last conv - 1 inputs of the convolution, and
    a matrix [head_dim, state] for each head."""

    hidden: int
    heads: int
    head_dim: int
    groups: int  # of heads that share B and C, and the mean of the norm
    state: int
    conv: int
    eps: float
    bias: bool = False  # of the projections
    conv_bias: bool = True
    dt_limits: tuple[float, float] = (0.0, math.inf)
    norm: Literal["gated", "scan", "none"] = "gated"
    scales: tuple[float, ...] = ()  # factors of z, x, B, C and dt; empty: all are 1 (Falcon-H1)
    log_decay: bool = True  # A is stored as log(-A), in GGUF as A
    name: str = "mixer"

    def linears(self) -> tuple[Linear, ...]:
        heads, inner = self.heads, self.heads * self.head_dim
        sizes = ((heads, self.head_dim),) * 2 + ((self.groups, self.state),) * 2 + ((heads, 1),)
        rows = packed(*(Rows(source="in_proj", units=units, width=width) for units, width in sizes))
        out = Rows(source="out_proj", units=self.hidden)
        return (
            Linear(rows=rows, inputs=self.hidden, split="rows", bias=self.bias),
            Linear(rows=(out,), inputs=inner, split="inputs", bias=self.bias),
        )

    def parameters(self) -> dict[str, Parameter]:
        heads, conved = (self.heads, 1), self.linears()[0].rows[1:4]
        found = {"conv": conv_taps(conved, self.conv)}
        if self.conv_bias:
            found["conv_bias"] = parameter("conv1d.bias", *((piece.units, piece.width) for piece in conved))
        found |= {
            "A": replace(parameter("A_log", heads), negative_exp=self.log_decay),
            "dt_bias": parameter("dt_bias", heads),
            "D": replace(parameter("D", heads), repeat=self.head_dim),
        }
        return found if self.norm == "none" else found | {"norm": parameter("norm.weight", (self.heads, self.head_dim))}

    def units(self) -> tuple[tuple[int, str], ...]:
        return (self.heads, "heads of a mixer"), (self.groups, "groups of a mixer's heads")

    def state_shapes(self, own: OwnUnits) -> tuple[Shape, ...]:
        heads = own(self.heads, "heads")
        channels = heads * self.head_dim + 2 * own(self.groups, "groups of heads") * self.state
        return (channels, self.conv - 1), (heads, self.head_dim, self.state)

    def work_width(self, own: OwnUnits) -> int:
        return projected_width(self, own)
