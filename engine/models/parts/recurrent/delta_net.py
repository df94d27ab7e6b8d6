"""Gated DeltaNet: Qwen3-Next, Qwen3.5, OLMo Hybrid."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from engine.models.declared import declared
from engine.models.parts.linear import Linear, Parameter, Rows, packed, parameter
from engine.models.parts.recurrent.mixer import OwnUnits, Recurrent, Shape, conv_taps, projected_width


@declared(frozen=True, kw_only=True)
class DeltaNet(Recurrent):
    """Gated DeltaNet (arXiv:2412.06464): out(norm(delta_rule(silu(conv(q, k, v)), decay(a), sigmoid(b))) · silu(z)).

    Value heads share the query and the key of a key head: head h of the former belongs to head h // (value_heads /
    key_heads). State of a sequence: the last conv - 1 inputs of the convolution, and a matrix [key_dim, value_dim] for
    each value head."""

    hidden: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int  # width of the convolution
    eps: float  # of the norm of each value head
    projections: Literal["grouped", "joined", "separate", "half"]
    """Names of the projections, and of the tensors of the convolution:

    grouped    in_proj_qkvz and in_proj_ba, with the rows of one key head after another (Qwen3-Next); conv1d
    joined     in_proj_qkv, in_proj_z, in_proj_b and in_proj_a (Qwen3.5); conv1d
    separate   q_proj, k_proj, v_proj, g_proj (z), b_proj and a_proj (OLMo Hybrid); q_conv1d, k_conv1d and v_conv1d
    half       in_proj_qkv and in_proj_z, but in_proj_ba with the rows of one key head after another (GGUF); conv1d
    """
    beta_scale: float = 1.0  # multiplies sigmoid(b)
    stored_key_heads: int = 0
    """Number of key heads in the tensors if the others repeat them: value head h shares those of head h modulo this
    number. 0: the tensors have all key heads. In GGUF, value heads have this order, and key_heads is their number."""
    log_decay: bool = True  # A is stored as log(-A), in GGUF as A
    name: str = "linear_attn"

    def linears(self) -> tuple[Linear, ...]:
        into = [Linear(rows=rows, inputs=self.hidden, split="rows") for rows in self._rows()]
        out = Rows(source="o_proj" if self.projections == "separate" else "out_proj", units=self.hidden)
        return *into, Linear(rows=(out,), inputs=self.value_heads * self.value_dim, split="inputs")

    def exact_linears(self) -> tuple[Linear, ...]:
        return self.linears()[1:2]

    def _rows(self) -> tuple[tuple[Rows, ...], tuple[Rows, ...]]:
        """Return the rows of q, k, v and z, and the rows of b and a."""
        heads, values = self.key_heads, self.value_heads
        sizes = ((heads, self.key_dim), (heads, self.key_dim), (values, self.value_dim), (values, self.value_dim))
        gates = ((values, 1), (values, 1))
        if self.projections == "separate":
            names = zip(("q_proj", "k_proj", "v_proj", "g_proj"), sizes, strict=True)
            wide = tuple(Rows(source=name, units=units, width=width) for name, (units, width) in names)
            return wide, tuple(Rows(source=name, units=values) for name in ("b_proj", "a_proj"))
        if self.projections == "grouped":
            return _by_head("in_proj_qkvz", heads, sizes), _by_head("in_proj_ba", heads, gates)
        *qkv, (z_heads, z_dim) = sizes
        pieces = zip(qkv, (self.stored_key_heads, self.stored_key_heads, 0), strict=True)
        wide = packed(
            *(Rows(source="in_proj_qkv", units=units, width=width, period=period) for (units, width), period in pieces)
        )
        wide = (*wide, Rows(source="in_proj_z", units=z_heads, width=z_dim))
        if self.projections == "half":
            return wide, _by_head("in_proj_ba", heads, gates)
        return wide, (Rows(source="in_proj_b", units=values), Rows(source="in_proj_a", units=values))

    def parameters(self) -> dict[str, Parameter]:
        separate, heads = self.projections == "separate", (self.value_heads, 1)
        convs = ("q_conv1d", "k_conv1d", "v_conv1d") if separate else ("conv1d",)
        norm = parameter("o_norm.weight" if separate else "norm.weight", (self.value_dim, 1))
        return {
            "conv": conv_taps(self._rows()[0][:3], self.conv, convs),
            "A": replace(parameter("A_log", heads), negative_exp=self.log_decay),
            "dt_bias": parameter("dt_bias", heads),
            "norm": replace(norm, divided=False),
        }

    def units(self) -> tuple[tuple[int, str], ...]:
        return (self.value_heads, "value heads"), (self.key_heads, "key heads")

    def state_shapes(self, own: OwnUnits) -> tuple[Shape, ...]:
        heads = own(self.value_heads, "value heads")
        channels = 2 * own(self.key_heads, "key heads") * self.key_dim + heads * self.value_dim
        return (channels, self.conv - 1), (heads, self.key_dim, self.value_dim)

    def work_width(self, own: OwnUnits) -> int:
        return projected_width(self, own)


def _by_head(source: str, groups: int, sizes: Sequence[tuple[int, int]]) -> tuple[Rows, ...]:
    """Return rows of a tensor in `groups` equal groups. sizes: number of heads of each kind, and rows per head."""
    each = [units * width // groups for units, width in sizes]
    return tuple(
        Rows(source=source, units=units, width=width, at=sum(each[:number]), groups=groups, stride=sum(each))
        for number, (units, width) in enumerate(sizes)
    )
