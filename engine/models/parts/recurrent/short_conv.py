"""Gated short convolution: LFM2."""

from engine.models.declared import declared
from engine.models.parts.linear import Linear, Parameter, Rows, packed, parameter
from engine.models.parts.recurrent.mixer import OwnUnits, Recurrent, Shape, conv_taps, projected_width


@declared(frozen=True, kw_only=True)
class ShortConv(Recurrent):
    """Gated short convolution (LFM2): out(C · conv(B · x)), where in_proj has rows of B, C and x.

    State of a sequence: the last conv - 1 inputs of the convolution."""

    hidden: int
    conv: int
    bias: bool = False  # of the projections and the convolution
    name: str = "conv"

    def linears(self) -> tuple[Linear, ...]:
        rows = packed(*(Rows(source="in_proj", units=self.hidden) for _ in range(3)))
        out = Rows(source="out_proj", units=self.hidden)
        return (
            Linear(rows=rows, inputs=self.hidden, split="rows", bias=self.bias),
            Linear(rows=(out,), inputs=self.hidden, split="inputs", bias=self.bias),
        )

    def parameters(self) -> dict[str, Parameter]:
        found = {"conv": conv_taps(self.linears()[0].rows[:1], self.conv, ("conv",))}
        return found | {"conv_bias": parameter("conv.bias", (self.hidden, 1))} if self.bias else found

    def units(self) -> tuple[tuple[int, str], ...]:
        return ((self.hidden, "channels of a convolution"),)

    def state_shapes(self, own: OwnUnits) -> tuple[Shape, ...]:
        return ((own(self.hidden, "channels"), self.conv - 1),)

    def work_width(self, own: OwnUnits) -> int:
        return projected_width(self, own)
