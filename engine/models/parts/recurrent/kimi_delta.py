"""Kimi Delta Attention: Kimi Linear."""

from dataclasses import replace

from engine.models.declared import declared
from engine.models.parts.linear import Linear, Parameter, Rows, parameter
from engine.models.parts.recurrent.mixer import OwnUnits, Recurrent, Shape, conv_taps


@declared(frozen=True, kw_only=True)
class KimiDelta(Recurrent):
    """Kimi Delta Attention (arXiv:2510.26692): out(norm(delta_rule(silu(conv(q, k, v)), decay(a), sigmoid(b))) ·
    sigmoid(z)), where a = f_b(f_a(x)) has a decay for each dim of a key, and z = g_b(g_a(x)).

    State of a sequence: as of DeltaNet."""

    hidden: int
    heads: int
    head_dim: int  # of keys and values, and the size of f_a(x) and g_a(x)
    conv: int
    eps: float  # of the norm of each head
    log_decay: bool = True  # A is stored as log(-A), in GGUF as A
    name: str = "self_attn"

    def linears(self) -> tuple[Linear, ...]:
        heads, dim = self.heads, self.head_dim
        qkv = tuple(Rows(source=f"{name}_proj", units=heads, width=dim) for name in "qkv")
        low = tuple(Rows(source=f"{name}_a_proj", units=dim) for name in "fg")
        wide = (Rows(source=f"{name}_b_proj", units=heads, width=dim) for name in "fg")
        return (
            Linear(rows=qkv, inputs=self.hidden, split="rows"),
            Linear(rows=(Rows(source="b_proj", units=heads),), inputs=self.hidden, split="rows"),
            Linear(rows=low, inputs=self.hidden, split=None),
            *(Linear(rows=(rows,), inputs=dim, split="rows") for rows in wide),
            Linear(rows=(Rows(source="o_proj", units=self.hidden),), inputs=heads * dim, split="inputs"),
        )

    def exact_linears(self) -> tuple[Linear, ...]:
        return self.linears()[1:5]

    def parameters(self) -> dict[str, Parameter]:
        heads = (self.heads, 1)
        return {
            "conv": conv_taps(self.linears()[0].rows, self.conv, ("q_conv1d", "k_conv1d", "v_conv1d")),
            "A": replace(parameter("A_log", heads), negative_exp=self.log_decay, stored=(1, 1, self.heads, 1)),
            "dt_bias": parameter("dt_bias", (self.heads, self.head_dim)),
            "norm": replace(parameter("o_norm.weight", (self.head_dim, 1)), divided=False),
        }

    def units(self) -> tuple[tuple[int, str], ...]:
        return ((self.heads, "heads of a mixer"),)

    def state_shapes(self, own: OwnUnits) -> tuple[Shape, ...]:
        heads = own(self.heads, "heads")
        return (3 * heads * self.head_dim, self.conv - 1), (heads, self.head_dim, self.head_dim)

    def work_width(self, own: OwnUnits) -> int:
        # Projections, convolutions, and float32 copies of queries, keys, values, decays, outputs.
        return 22 * own(self.heads, "heads") * self.head_dim
