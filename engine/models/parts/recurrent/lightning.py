"""Lightning attention: MiniMax-Text-01 and MiniMax-M1."""

from dataclasses import replace

from engine.models.declared import declared
from engine.models.parts.linear import Linear, Parameter, Rows, parameter
from engine.models.parts.positions import Alibi
from engine.models.parts.recurrent.mixer import OwnUnits, Recurrent, Shape


@declared(frozen=True, kw_only=True)
class DecaySlopes:
    """Slopes of the decays of lightning attention: `factor` · 2^(-8 h / heads) for head h = 1 … heads, or those of
    ALiBi, which differ if `heads` is not a power of two."""

    heads: int
    factor: float
    alibi: bool

    def values(self) -> tuple[float, ...]:
        if self.alibi:
            return Alibi(factor=self.factor).slopes(self.heads)
        return tuple(self.factor * 2.0 ** (-8.0 * head / self.heads) for head in range(1, self.heads + 1))


@declared(frozen=True, kw_only=True)
class LightningAttention(Recurrent):
    """Lightning attention (arXiv:2405.17935) of MiniMax-01: out(norm(y) · sigmoid(output_gate x)), where y = S q for
    each head, with the state S ← e^-slope S + v kᵀ. q, k and v are silu(qkv_proj x), with the rows of one head after
    another. The norm is over all heads.

    State of a sequence: a matrix [head_dim, head_dim] for each head."""

    hidden: int
    heads: int
    head_dim: int
    slopes: DecaySlopes
    eps: float  # of the norm
    name: str = "self_attn"

    def linears(self) -> tuple[Linear, ...]:
        heads, dim = self.heads, self.head_dim
        qkv = tuple(
            Rows(source="qkv_proj", units=heads, width=dim, at=at * dim, groups=heads, stride=3 * dim)
            for at in range(3)
        )
        gate = (Rows(source="output_gate", units=heads, width=dim),)
        return (
            Linear(rows=qkv, inputs=self.hidden, split="rows"),
            Linear(rows=gate, inputs=self.hidden, split="rows"),
            Linear(rows=(Rows(source="out_proj", units=self.hidden),), inputs=heads * dim, split="inputs"),
        )

    def parameters(self) -> dict[str, Parameter]:
        slopes = replace(parameter("slope_rate", (self.heads, 1)), values=self.slopes.values())
        return {"A": slopes, "norm": parameter("norm.weight", (self.heads, self.head_dim))}

    def units(self) -> tuple[tuple[int, str], ...]:
        return ((self.heads, "heads of a mixer"),)

    def state_shapes(self, own: OwnUnits) -> tuple[Shape, ...]:
        return ((own(self.heads, "heads"), self.head_dim, self.head_dim),)

    def work_width(self, own: OwnUnits) -> int:
        # Projections, activations, and float32 copies of queries, keys, values and outputs.
        return 16 * own(self.heads, "heads") * self.head_dim
