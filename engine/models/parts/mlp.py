"""Parts that read one token at a time: MLPs, experts and plain projections."""

from typing import Literal

from engine.models.declared import declared
from engine.models.parts.linear import LowRankUpdate
from engine.models.parts.norms import RMSNorm

XIELU = "xielu"  # activation with learned numbers, which a checkpoint has under `act_fn` of an MLP (Apertus)


@declared(frozen=True, kw_only=True)
class MLP:
    """down(act(gate x) · up x), or down(act(up x)) if gate is None."""

    hidden: int
    intermediate_size: int
    act: str = "silu"  # silu | gelu | gelu_tanh | quick_gelu | relu | relu2 | xielu
    bias: bool = False
    down_bias: bool = False  # without `bias`: of the down projection alone
    gate: str | None = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    interleaved: bool = False  # gate and up are one tensor, whose rows alternate: gate, up, gate, …
    up_first: bool = False  # gate and up are one tensor, with the rows of up before those of gate (GTE)
    gate_scale: float = 1.0  # multiplies gate x
    sparsity: float = 0.0
    """If not 0, gate x is replaced by max(gate x - t, 0) first. For normally distributed values, the threshold t of a
    token makes this share of them 0: it is their mean plus a multiple of their standard deviation (Gemma 3n)."""
    update: LowRankUpdate | None = None  # of the projection to gate and up, whose rows are one tensor
    clamp: tuple[float, float] | None = None  # gate x is at most the first number, and up x within ± the second
    clipped: bool = False  # inputs and outputs of each projection are clipped to limits in the checkpoint (Gemma 4)
    inputs: int = 0  # size of x, if it is not `hidden`
    name: str = "mlp"


@declared(frozen=True, kw_only=True)
class Stacked:
    """Names of the tensors of a checkpoint that stores a projection of all experts of a layer in one tensor. The first
    braces are replaced by the name of the projection."""

    weight: str
    """Pattern of the weights, [num_experts, outputs, inputs], such as `{}.weight`."""
    others: str = ""
    """Pattern of biases and of the tensors of a quantization format, [num_experts, …], such as `{}_{}`. The second
    braces are replaced by the last component of the name in a single expert."""
    transposed: bool = False  # weights are [num_experts, inputs, outputs]

    def name(self, projection: str, last: str) -> str:
        """Return the name of a tensor whose name in a single expert ends with `last`."""
        return self.weight.format(projection) if last == "weight" else self.others.format(projection, last)


@declared(frozen=True, kw_only=True)
class Experts:
    """Σ w_e · expert_e(x) over the `top_k` experts with the largest scores (ties: lowest index), plus
    sigmoid(s x) · shared(x) if there is a shared expert, or shared(x) without `shared_gate`.

    `scores` defines the scores and w_e:

    softmax          softmax of the router logits over all experts
    softmax_chosen   softmax over the selected experts, which equals the former normalised to a sum of 1
    sigmoid          sigmoid of each logit
    sparsemixer      of each selected expert in turn, the largest logit m first: softmax over the remaining experts with
                     (m - logit) / max(|logit|, m) ≤ 2 · `jitter` (arXiv:2409.12136)

    Experts are selected by score + `correction`. If there are `groups` (equal numbers of experts, in order), only those
    of the `groups_kept` best groups are selected; `group_score` ranks groups by their largest sum, or by the total of
    their two largest. w_e is the score without correction, divided by the sum over the selected experts if
    `normalized`, and multiplied by `weight_scale`. Numbers from `num_experts` on are `zero_experts`, whose output is
    their input (arXiv:2509.01322, section 2.1).

    Expert e is an MLP with tensors under `experts`.e: act(gate x) · up x, or with `limit` and `up_offset`
    act(min(gate x, limit)) · (clamp(up x, -limit, limit) + up_offset). The router is a separate projection, which is
    never quantized. With `router_norm`, its input is the norm of the residual stream instead of the experts' input, and
    its logits are multiplied by `logits_scale`. w_e is also multiplied by the number of the expert under
    `expert_scales`, if there is one. `stacked` declares the tensors of a checkpoint that has all experts in one tensor.
    """

    hidden: int
    intermediate_size: int  # of each routed expert
    num_experts: int  # that have weights
    top_k: int  # experts per token
    scores: Literal["softmax", "softmax_chosen", "sigmoid", "sparsemixer"]
    jitter: float = 0.0  # of sparsemixer
    zero_experts: int = 0
    act: str = "silu"
    limit: float | None = None
    up_offset: float = 0.0
    clamp: tuple[float, float] | None = None  # as in MLP
    bias: bool = False  # of the experts' projections
    router: str = "gate"
    router_bias: bool = False
    router_norm: RMSNorm | None = None
    logits_scale: float = 1.0
    expert_scales: str = ""  # name of a number for each expert
    correction: str = ""  # name of a number for each expert
    correction_is_row: bool = False  # stored as [1, num_experts] (ERNIE)
    groups: int = 1
    groups_kept: int = 1
    group_score: Literal["max", "top_two"] = "top_two"
    normalized: bool = False
    weight_scale: float = 1.0
    scales_inputs: bool = False  # w_e multiplies the input of expert e instead of its output (Llama 4)
    experts: str = "experts"
    gate: str | None = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    interleaved: bool = False  # as in MLP
    stacked: Stacked | None = None
    shared: MLP | None = None
    shared_gate: str | None = None
    name: str = "mlp"

    @property
    def routed(self) -> int:
        """Number of experts that a router selects from."""
        return self.num_experts + self.zero_experts


@declared(frozen=True, kw_only=True)
class Projection:
    """y = W x. Every rank has the matrix."""

    hidden: int  # size of inputs and outputs
    name: str


@declared(frozen=True, kw_only=True)
class LayerInput:
    """up(act(gate x) · input of the layer), where the input is the layer's part of `LayerInputs`. Every rank has both
    matrices."""

    hidden: int
    width: int  # of the input
    layer: int
    act: str
    gate: str = "per_layer_input_gate"
    up: str = "per_layer_projection"
    name: str = ""


@declared(frozen=True, kw_only=True)
class LowRank:
    """x + norm(up(down x)), a projection of low rank (LAuReL). Every rank has both matrices."""

    hidden: int
    rank: int
    norm: RMSNorm
    down: str = "linear_left"
    up: str = "linear_right"
    name: str = ""
