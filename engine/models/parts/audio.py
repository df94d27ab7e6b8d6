"""Embeddings of audio and the layers of Conformers."""

from engine.models.declared import declared


@declared(frozen=True, kw_only=True)
class AudioEmbedding:
    """Embedding of a log-mel spectrogram [mels, 2 · positions]: x = gelu(conv2(gelu(conv1(spectrogram)))) + row of the
    position. Both convolutions have a width of 3; the second has a stride of 2."""

    mels: int
    hidden: int
    positions: int
    convolutions: tuple[str, str] = ("conv1", "conv2")
    table: str = "embed_positions"
    name: str = ""  # prefix of the names
    complete: bool = False  # an item is one or more complete windows, without a mask
    chunk: int = 0
    """Frames of a chunk: a spectrogram of any length is divided (Qwen2.5-Omni). The positions of a chunk attend to one
    another, and their rows are sines and cosines. 0: one chunk of up to `frames`, with a table."""

    @property
    def frames(self) -> int:
        return 2 * self.positions

    @property
    def norm(self) -> None:
        return None


@declared(frozen=True, kw_only=True)
class ChunkedAudio:
    """Embedding of a log-mel spectrogram [mels, frames] of any length, in chunks, of which the last one is padded with
    zeros: x = W gelu(conv3(gelu(conv2(gelu(conv1(chunk)))))) + row of the position within the chunk. The convolutions
    are 3 · 3 with a stride of 2; W reads the channels of all bands. Rows are sines and cosines. `window` chunks attend
    to one another."""

    mels: int
    hidden: int
    channels: int
    chunk: int  # frames
    window: int
    fills: bool = (
        True  # a spectrogram of less than a chunk is padded to a chunk; else it is the only one, of its length
    )
    convolutions: tuple[str, str, str] = ("conv2d1", "conv2d2", "conv2d3")
    out: str = "conv_out"  # W
    norm: None = None

    @property
    def bands(self) -> int:
        """Bands after the convolutions."""
        return self.reduced(self.mels)

    def positions(self, frames: int) -> int:
        """Return the number of embeddings of a spectrogram."""
        whole, rest = divmod(frames, self.chunk)
        return whole * self.reduced(self.chunk) + self.reduced(rest)

    @staticmethod
    def reduced(size: int) -> int:
        """Return the size after the convolutions."""
        for _ in range(3):
            size = (size + 1) // 2
        return size


@declared(frozen=True, kw_only=True)
class Conformer:
    """Encoder of a log-mel spectrogram [frames, mels] with convolutions in its blocks (arXiv:2005.08100, as changed for
    Phi-4): x = W conv((spectrogram - mean) · scale). Convolutions of 3 · 3 with a stride of 2 divide the number of
    frames by `reduction`. In each block:

    x = x + ½ mlp(x);  x = x + attention(norm(x));  x = x + convolution(x);  x = norm(x + ½ mlp(x))

    mlp          down(up y · act(gate y)), y = norm(x)
    convolution  W₃ act(W₂ c), where c convolves each channel of (W₁ y + b₁) · act(W₀ y + b₀) over the last `kernel`
                 positions, y = norm(x)
    attention    among `window` positions, with a learned bias of each head for each distance up to `distances`; zeros
                 fill the last of several windows

    Every rank computes the encoder completely."""

    mels: int
    hidden: int
    heads: int
    intermediate_size: int
    layers: int
    act: str  # of the MLPs
    gate_act: str  # of the gates of convolutions
    convolution_act: str
    embed_act: str  # of the convolutions of spectrograms
    channels: int  # of the convolutions of spectrograms
    reduction: int  # a power of two
    kernel: int
    distances: int
    multiplier: int = 1  # convolutions of a channel
    symmetric: bool = False  # distances have no sign
    window: int = 500
    norm: None = None
    convolutions: tuple[str, ...] = ("embed.conv.0",)

    @property
    def bands(self) -> int:
        """Bands after the convolutions of spectrograms."""
        return self.reduced(self.mels)

    @property
    def halvings(self) -> int:
        return self.reduction.bit_length() - 1

    def reduced(self, size: int) -> int:
        """Return the size after the convolutions of spectrograms."""
        return -(-size // self.reduction)


@declared(frozen=True, kw_only=True)
class LocalConformer:
    """Conformer with local attention (arXiv:2303.01037, as changed for Gemma 4): x = W conv(spectrogram). A norm of the
    channels and ReLU follow each of two convolutions of 3 · 3 with a stride of 2. In each block:

    x = x + scale · after(mlp(before(x)));  x = x + after(attention(before(x)));
    x = x + convolution(x);  x = x + scale · after(mlp(before(x)));  x = norm(x)

    A position attends to itself and `window` - 1 positions before it. A score is q · k + q · r for the projection r of
    sines and cosines of the distance, within ± `softcap`. A convolution is W₂ act(norm(c)), where c are convolutions of
    each channel, over `kernel` positions up to the own one, of the first half of W₁ norm(x) times the sigmoid of the
    second. With `clipped`, inputs and outputs of all projections but those of r and W are clipped to limits in the
    checkpoint. Inputs of norms are clipped to ± `limit`. Every rank computes the encoder completely."""

    hidden: int
    heads: int
    layers: int
    act: str
    channels: tuple[int, int]  # of the convolutions of spectrograms
    kernel: int
    window: int
    softcap: float
    scale: float  # of the MLPs
    eps: float
    limit: float
    clipped: bool
    norm: None = None
    convolutions: tuple[str, ...] = ("subsample_conv_projection.layer0.conv",)

    @property
    def bands(self) -> int:
        """Bands after the convolutions of spectrograms."""
        return self.channels[0] // 4

    @staticmethod
    def reduced(size: int) -> int:
        """Return the size after the convolutions of spectrograms."""
        return -(-size // 4)
