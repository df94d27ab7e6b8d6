"""Recurrent block of Griffin: RecurrentGemma."""

from dataclasses import replace

from engine.models.declared import declared
from engine.models.parts.linear import Linear, Parameter, Rows, parameter
from engine.models.parts.recurrent.mixer import OwnUnits, Recurrent, Shape, conv_taps


@declared(frozen=True, kw_only=True)
class RgLru(Recurrent):
    """Recurrent block of Griffin (arXiv:2402.19427): out(rg_lru(u) · act(linear_y x)) with u = conv(linear_x x). The
    gates of the recurrence (kernels/recurrent/rg_lru.py) are products of u with a square matrix for each head.

    State of a sequence: the last conv - 1 inputs of the convolution, and a number for each channel."""

    hidden: int
    heads: int
    head_dim: int  # channels of a head
    conv: int
    act: str
    name: str = "temporal_block"

    def linears(self) -> tuple[Linear, ...]:
        heads, dim = self.heads, self.head_dim
        both = (Rows(source=f"linear_{name}", units=heads, width=dim) for name in "xy")
        out = Rows(source="linear_out", units=self.hidden)
        return (
            *(Linear(rows=(rows,), inputs=self.hidden, split="rows", bias=True) for rows in both),
            Linear(rows=(out,), inputs=heads * dim, split="inputs", bias=True),
        )

    def parameters(self) -> dict[str, Parameter]:
        size = self.heads, self.head_dim
        gates = (("gate_bias", "input"), ("decay_bias", "recurrent"))
        return {
            "conv": conv_taps((Rows(source="", units=self.heads, width=self.head_dim),), self.conv, ("conv_1d",)),
            "conv_bias": parameter("conv_1d.bias", size),
            **{role: replace(parameter(f"rg_lru.{name}_gate_bias", size), stored=size) for role, name in gates},
            "rate": parameter("rg_lru.recurrent_param", size),
        }

    def block_matrices(self) -> dict[str, Shape]:
        """Return the matrices of the gates: of the input, and of the decay."""
        shape = self.heads, self.head_dim, self.head_dim
        return dict.fromkeys(("rg_lru.input_gate_weight", "rg_lru.recurrent_gate_weight"), shape)

    def units(self) -> tuple[tuple[int, str], ...]:
        return ((self.heads, "heads of a mixer"),)

    def state_shapes(self, own: OwnUnits) -> tuple[Shape, ...]:
        channels = own(self.heads, "heads") * self.head_dim
        return (channels, self.conv - 1), (channels,)

    def work_width(self, own: OwnUnits) -> int:
        # Projections, the output of the convolution, and float32 gates, decays and inputs.
        return 18 * own(self.heads, "heads") * self.head_dim
