"""Embedding of log-mel spectrograms. Every rank has it completely."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from engine.layers.conformer import CONFORMER_SPECTROGRAM, SPECTROGRAM, NormedAudioLayer, SubsampledAudioLayer
from engine.layers.linear import Read, Target
from engine.layers.patches import Grid
from engine.models.parts import AudioEmbedding, ChunkedAudio, NormedAudio, SubsampledAudio
from engine.models.sources import join

SPECTROGRAMS = (SPECTROGRAM, CONFORMER_SPECTROGRAM)
"""Tensors of items that are audio clips."""


class AudioLayer:
    """See `engine.models.parts.AudioEmbedding`."""

    weights: tuple[Tensor, ...]  # [hidden, inputs, 3] of each convolution
    biases: tuple[Tensor, ...]  # [hidden]
    positions: Tensor | None = None  # [positions, hidden]; None: sines and cosines

    def __init__(self, part: AudioEmbedding, root: str) -> None:
        self.part, self.path = part, join(root, part.name)

    def load(self, read: Read, target: Target) -> None:
        def loaded(*names: str) -> Tensor:
            return read(join(self.path, *names)).to(target.device, target.dtype, copy=True)

        self.weights = tuple(loaded(name, "weight") for name in self.part.convolutions)
        self.biases = tuple(loaded(name, "bias") for name in self.part.convolutions)
        if not self.part.chunk:
            self.positions = loaded(self.part.table, "weight")

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (*self.weights, *self.biases, *(() if self.positions is None else (self.positions,)))

    def embed(self, spectrograms: Tensor, dtype: torch.dtype) -> Tensor:
        """[windows, mels, frames] → [windows · positions, hidden]; a window may be shorter than the table."""
        x = spectrograms.to(dtype)
        for weight, bias, stride in zip(self.weights, self.biases, (1, 2), strict=True):
            x = torch.nn.functional.gelu(torch.nn.functional.conv1d(x, weight, bias, stride=stride, padding=1))
        table = sinusoids(x.shape[2], self.part.hidden).to(x) if self.positions is None else self.positions
        return (x.transpose(1, 2) + table[: x.shape[2]]).flatten(0, 1)

    def rows(self, item: Mapping[str, Tensor], dtype: torch.dtype) -> tuple[Tensor, tuple[Grid, ...]]:
        """Return the embeddings of a clip and their grids. Raises ValueError for tensors that the tower does not
        read."""
        if self.part.chunk:
            return chunk_rows(self, item, dtype)
        if self.part.complete:
            return window_rows(self, item, dtype)
        found = spectrogram_rows(self, item, dtype)
        return found, ((1, 1, len(found)),)


class ChunkedAudioLayer:
    """See `engine.models.parts.ChunkedAudio`."""

    weights: tuple[Tensor, ...]  # [channels, inputs, 3, 3] of each convolution
    biases: tuple[Tensor, ...]  # [channels]
    out: Tensor  # [hidden, channels · bands]

    def __init__(self, part: ChunkedAudio, root: str) -> None:
        self.part, self.root = part, root

    def load(self, read: Read, target: Target) -> None:
        def loaded(*names: str) -> Tensor:
            return read(join(self.root, *names)).to(target.device, target.dtype, copy=True)

        self.weights = tuple(loaded(name, "weight") for name in self.part.convolutions)
        self.biases = tuple(loaded(name, "bias") for name in self.part.convolutions)
        self.out = loaded(self.part.out, "weight")

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (*self.weights, *self.biases, self.out)

    def rows(self, item: Mapping[str, Tensor], dtype: torch.dtype) -> tuple[Tensor, tuple[Grid, ...]]:
        """Return the embeddings of a clip and a grid for each window of attention.

        item: `input_features` [mels, frames]. Raises ValueError for other tensors."""
        part, features = self.part, item.get("input_features")
        if features is None or features.shape[-2:-1] != (part.mels,) or not features.shape[-1]:
            raise ValueError(
                f"an item of media has {', '.join(item)}; the tower reads input_features of {part.mels} bands"
            )
        frames = features.shape[-1]
        chunk = part.chunk if part.fills else min(part.chunk, frames)
        x = torch.nn.functional.pad(features.reshape(part.mels, frames).to(dtype), (0, -frames % chunk))
        x = x.view(part.mels, -1, chunk).transpose(0, 1).unsqueeze(1)
        for weight, bias in zip(self.weights, self.biases, strict=True):
            x = torch.nn.functional.gelu(torch.nn.functional.conv2d(x, weight, bias, stride=2, padding=1))
        x = x.permute(0, 3, 1, 2).flatten(2) @ self.out.T
        rows = (x + sinusoids(x.shape[1], part.hidden).to(x)).flatten(0, 1)[: part.positions(frames)]
        whole, rest = divmod(len(rows), part.window * part.reduced(part.chunk))
        sizes = [part.window * part.reduced(part.chunk)] * whole + ([rest] if rest else [])
        return rows, tuple((1, 1, size) for size in sizes)


AudioInput = AudioLayer | ChunkedAudioLayer | SubsampledAudioLayer | NormedAudioLayer


def sinusoids(count: int, width: int) -> Tensor:
    """Return sines and cosines of positions, [count, width] fp32: of p · 10000^(-i / (width / 2 - 1))."""
    half = width // 2
    steps = torch.exp(-math.log(10_000) / (half - 1) * torch.arange(half).float())
    angles = torch.arange(count)[:, None] * steps[None]
    return torch.cat((angles.sin(), angles.cos()), 1)


def audio_layer(part: AudioEmbedding | ChunkedAudio | SubsampledAudio | NormedAudio, root: str) -> AudioInput:
    match part:
        case AudioEmbedding():
            return AudioLayer(part, root)
        case ChunkedAudio():
            return ChunkedAudioLayer(part, root)
        case SubsampledAudio():
            return SubsampledAudioLayer(part, root)
        case NormedAudio():
            return NormedAudioLayer(part, root)


def chunk_rows(layer: AudioLayer, item: Mapping[str, Tensor], dtype: torch.dtype) -> tuple[Tensor, tuple[Grid, ...]]:
    """Return the embeddings of the chunks of a clip, and a grid for each of them.

    item: as of `spectrogram_rows`; of any length. Raises ValueError for other tensors."""
    features, frames = _clip(layer, item)
    size = layer.part.chunk
    whole = frames // size * size
    chunks = features[:, :whole].reshape(len(features), -1, size).transpose(0, 1)
    parts = [chunks, *([features[None, :, whole:frames]] if frames > whole else [])]
    rows = [layer.embed(part, dtype) for part in parts if len(part)]
    sizes = [size // 2] * len(chunks) + ([(frames - whole + 1) // 2] if frames > whole else [])
    return torch.cat(rows), tuple((1, 1, one) for one in sizes)


def _clip(layer: AudioLayer, item: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    """Return a spectrogram [mels, frames], and the number of its frames that are the clip."""
    try:
        features, mask = item[SPECTROGRAM], item["feature_attention_mask"]
    except KeyError:
        names = "input_features and feature_attention_mask"
        raise ValueError(f"an item of media has {', '.join(item)}; the tower reads {names}") from None
    features = features.reshape(-1, features.shape[-1])
    frames, part = int(mask.sum()), layer.part
    longest = features.shape[1] if part.chunk else part.frames
    if features.shape[0] != part.mels or not 0 < frames <= features.shape[1] <= longest:
        limit = "" if part.chunk else f" and up to {longest} frames"
        raise ValueError(
            f"a spectrogram has {features.shape[0]} bands and {features.shape[1]} frames; the tower reads "
            f"{part.mels} bands{limit}"
        )
    return features, frames


def spectrogram_rows(layer: AudioLayer, item: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Return the embeddings of a clip, [positions, hidden], of two frames each.

    item: `input_features` [mels, frames] and `feature_attention_mask` [frames], which is 1 for the frames of the clip,
    which come first, and 0 for silence after them. Raises ValueError for other tensors."""
    features, frames = _clip(layer, item)
    return layer.embed(features.unsqueeze(0), dtype)[: (frames - 1) // 2 + 1]


def window_rows(layer: AudioLayer, item: Mapping[str, Tensor], dtype: torch.dtype) -> tuple[Tensor, tuple[Grid, ...]]:
    """Return the embeddings of complete windows, [windows · positions, hidden], and their grid (windows, 1, positions).

    item: `input_features` [windows, mels, frames]. Raises ValueError for other tensors."""
    if "input_features" not in item:
        raise ValueError(f"an item of media has {', '.join(item)}; the tower reads input_features")
    features, part = item["input_features"], layer.part
    features = features.reshape(-1, *features.shape[-2:])
    if features.shape[1:] != (part.mels, part.frames) or not len(features):
        raise ValueError(
            f"spectrograms have the shape {list(features.shape)}; the tower reads windows of {part.mels} bands and "
            f"{part.frames} frames"
        )
    return layer.embed(features, dtype), ((len(features), 1, part.positions),)
