"""Embeddings of audio."""

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
class SubsampledAudio:
    """Embedding of a log-mel spectrogram [frames, mels] of a Conformer (Phi-4): x = W conv((spectrogram - mean) ·
    scale). Convolutions of 3 · 3 with a stride of 2 divide the number of frames by `reduction`; all but the first are
    of single channels, followed by one of single positions."""

    mels: int
    hidden: int
    act: str
    channels: int
    reduction: int  # a power of two
    norm: None = None
    convolutions: tuple[str, ...] = ("embed.conv.0",)

    @property
    def bands(self) -> int:
        """Bands after the convolutions."""
        return self.reduced(self.mels)

    @property
    def halvings(self) -> int:
        return self.reduction.bit_length() - 1

    def reduced(self, size: int) -> int:
        """Return the size after the convolutions."""
        return -(-size // self.reduction)


@declared(frozen=True, kw_only=True)
class NormedAudio:
    """Embedding of a log-mel spectrogram [frames, mels] of a Conformer (Gemma 4): x = W conv(spectrogram). A norm of
    the channels and ReLU follow each of two convolutions of 3 · 3 with a stride of 2."""

    hidden: int
    channels: tuple[int, int]
    eps: float
    norm: None = None
    convolutions: tuple[str, ...] = ("subsample_conv_projection.layer0.conv",)

    @property
    def bands(self) -> int:
        """Bands after the convolutions."""
        return self.channels[0] // 4

    @staticmethod
    def reduced(size: int) -> int:
        """Return the size after the convolutions."""
        return -(-size // 4)
