"""Parts after the last layer: the head, poolers, and attention that aligns words with audio."""

from typing import Literal

from engine.models.declared import declared
from engine.models.parts.linear import Linear
from engine.models.parts.norms import Norm


@declared(frozen=True, kw_only=True)
class Head:
    """Logits = softcap(scale · (h W^T + b))."""

    tied: bool  # W is the embedding
    scale: float = 1.0
    softcap: float | None = None
    bias: bool = False  # b is the bias of the layer `name`
    unit_rows: bool = False  # the rows of W are divided by their lengths (Baichuan 2)
    added: str = ""  # name of b if it is a separate tensor [1, vocab], which a checkpoint may lack
    tied_unless_stored: bool = False  # `tied` is false if and only if the checkpoint has a tensor of the head (T5)
    name: str = "lm_head"
    rows: int = 0  # of W, if it has logits of some tokens only (EAGLE-3); 0: those of the embedding
    ids: str = ""  # name of a tensor [rows] int64: distance from the number of a row to the id of its token


@declared(frozen=True, kw_only=True)
class Dense:
    """y = act(x W^T (+ b)), in float32."""

    linear: Linear
    act: str = "none"  # none | tanh | sigmoid, or an activation of MLPs
    path: str = ""  # prefix of the tensor names, from the root of the checkpoint


@declared(frozen=True, kw_only=True)
class TokenLogits:
    """Logits of some tokens."""

    tokens: tuple[int, ...]
    source: str  # name of the matrix
    vocab: int  # its number of rows
    hidden: int


@declared(frozen=True, kw_only=True)
class Difference:
    """The first of two numbers minus the second."""


@declared(frozen=True, kw_only=True)
class PooledNorm:
    """Norm of the pooled vector."""

    norm: Norm
    path: str = ""  # as in Dense


Stage = Dense | TokenLogits | Difference | PooledNorm
Pool = Literal["first", "last", "mean", "max"]


@declared(frozen=True, kw_only=True)
class Pooler:
    """Reduces the hidden states of a prompt to one vector (`pool`), then applies `stages` in order, then `activation`,
    which a request may disable."""

    task: Literal["embed", "classify", "token_classify"]
    """Output: a vector of the prompt (`embed`), scores of its labels (`classify`) or of each token's labels."""
    width: int  # size of the output
    pool: Pool
    stages: tuple[Stage, ...] = ()
    activation: Literal["none", "normalize", "softmax", "sigmoid"] = "none"
    labels: tuple[str, ...] = ()
    dimensions: tuple[int, ...] = ()  # lengths to which a vector may be truncated before normalisation
    any_dimensions: bool = False
    padding: int | None = None  # token with which texts are padded to the longest prompt (SigLIP)
    canonical: Literal["", "lower", "words"] = ""  # texts are in lower case; words: and without punctuation
    whole: bool = True  # False: there are only vectors of single tokens (late interaction)


@declared(frozen=True, kw_only=True)
class Alignment:
    """Heads of cross-attention whose weights follow the audio: they give the times of the tokens of a transcript."""

    heads: tuple[tuple[int, int], ...]  # (block of the decoder, head), in ascending order
    median_width: int = 7  # positions of the median filter, an odd number

    @property
    def layers(self) -> tuple[int, ...]:
        """The blocks that have such heads."""
        return tuple(dict.fromkeys(layer for layer, _ in self.heads))
