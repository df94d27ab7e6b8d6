"""Embeddings of tokens, and inputs and streams that layers share."""

from engine.models.declared import declared
from engine.models.parts.norms import Norm, RMSNorm


@declared(frozen=True, kw_only=True)
class Lookup:
    """Table with `count` rows; the row of a token's position or segment is added to its embedding."""

    count: int
    name: str = ""
    offset: int = 0  # row of position 0
    period: int | None = None
    """Sinusoidal table, which is not in the checkpoint: sines (first half of a row) and cosines of
    p · 10000^(-i / period) for row p."""


@declared(frozen=True, kw_only=True)
class Embedding:
    """x = norm(scale · row of the token + row of its position + row of its segment). With `width`, the row of a token
    is projected by `into`, and the hidden states by `out` before the head; there are no segments (OPT-350M)."""

    vocab: int
    hidden: int
    width: int | None = None  # of the rows of tokens; None: `hidden`
    into: str = "project_in"
    out: str = "project_out"
    scale: float = 1.0
    name: str = "embed_tokens"
    positions: Lookup | None = None
    segments: Lookup | None = None
    norm: Norm | None = None
    positions_last: bool = False  # rows of positions are added to the embeddings of media too; no segments

    @property
    def is_sum(self) -> bool:
        """True if the rows of positions or segments are added at once."""
        apart = self.width is not None or self.positions_last
        return not apart and (self.positions is not None or self.segments is not None)

    @property
    def row_width(self) -> int:
        """Size of a token's row, and of the inputs of the head."""
        return self.width or self.hidden


@declared(frozen=True, kw_only=True)
class LayerInputs:
    """A vector of each token for each layer (per-layer embeddings): factor · (norm(W x) + scale · row of the token),
    where x is the token's embedding, and the norm is over the vector of each layer. A row has the vectors of all
    layers. Every rank has both matrices."""

    vocab: int
    layers: int
    width: int  # of the vector of a layer
    scale: float
    factor: float
    norm: RMSNorm
    table: str = "embed_tokens_per_layer"
    projection: str = "per_layer_model_projection"  # W


@declared(frozen=True, kw_only=True)
class Streams:
    """Hidden states in several streams (AltUp, kernels/streams.py). The blocks of a layer compute the first one from
    predictions; then all are corrected by its change. The last block of a layer, a `LayerInput`, is added to all other
    streams; with `scaled`, it reads the first one times a vector.

    Coefficients are projections of tanh(W norm(x) / hidden), where x is the first stream."""

    count: int
    norm: RMSNorm
    scaled: bool = True
    into: str = "altup_projections"  # projections from the embedding to the other streams
    out: str = "altup_unembed_projections"
    router: str = "altup.modality_router"  # W
    prediction: str = "altup.prediction_coefs"
    correction: str = "altup.correction_coefs"
    scale: str = "altup.correct_output_scale"
