"""Attention and convolutions of Conformers, which encode audio."""

from engine.models.declared import declared
from engine.models.parts.norms import RMSNorm


@declared(frozen=True, kw_only=True)
class LocalAttention:
    """Attention of a position to itself and `window` - 1 positions before it (Gemma 4's Conformer). A score is
    c · k · q' + q' · r within ± `softcap`, where q' is q times softplus of `scales`, and r the projection `distances`
    of sines and cosines of the distance. Every rank has all heads."""

    hidden: int
    heads: int
    window: int
    softcap: float
    clipped: bool  # inputs and outputs of each projection are clipped to limits in the checkpoint
    sources: tuple[str, str, str, str] = ("q_proj.linear", "k_proj.linear", "v_proj.linear", "post.linear")
    scales: str = "per_dim_scale"
    distances: str = "relative_k_proj"
    name: str = "self_attn"

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


@declared(frozen=True, kw_only=True)
class Convolution:
    """Convolution of a Conformer (arXiv:2005.08100): out(act(norm(inner(c)))), where c convolves each channel of
    u · gate_act(g) over the last `kernel` positions of a window, and `into` projects x to u and g. Every rank has all
    channels."""

    hidden: int
    kernel: int
    gate_act: str
    act: str
    into: str
    filters: str  # of the convolution
    out: str
    inner: str = ""  # name of a projection; "": there is none
    norm: RMSNorm | None = None
    limit: float | None = None  # the input of the norm is clipped to ± this number
    bias: bool = False
    multiplier: int = 1  # convolutions of a channel
    clipped: bool = False  # inputs and outputs of `into` and `out` are clipped to limits in the checkpoint
    name: str = ""
