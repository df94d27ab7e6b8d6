"""Embeddings of the log-mel spectrograms of Conformers. Every rank has them completely."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear

from engine.layers.patches import Grid
from engine.layers.whole_weights import WholeWeights
from engine.lowering.media_memory import CONVOLVED_POSITIONS
from engine.models.media import normed_sources, subsampled_sources
from engine.models.parts import NormedAudio, SubsampledAudio
from kernels.activation import ACTIVATIONS

SPECTROGRAM = "input_features"
CONFORMER_SPECTROGRAM = "audio_input_features"


class SubsampledAudioLayer(WholeWeights):
    """See `engine.models.parts.SubsampledAudio`. Source: transformers modeling_phi4_multimodal.py."""

    def __init__(self, part: SubsampledAudio, path: str) -> None:
        super().__init__(path, subsampled_sources(part, ""))
        self.part = part

    def rows(self, item: Mapping[str, Tensor], dtype: torch.dtype) -> tuple[Tensor, tuple[Grid, ...]]:
        """Return the embeddings of a clip, and their grid.

        item: `audio_input_features` [frames, mels]. Raises ValueError for other tensors."""
        part, features = self.part, item.get(CONFORMER_SPECTROGRAM)
        if features is None or features.shape[-1] != part.mels or not features.numel():
            raise ValueError(
                f"an item of media has {', '.join(item)}; the tower reads {CONFORMER_SPECTROGRAM} of {part.mels} bands"
            )
        x = self._embedded(features.reshape(-1, part.mels).to(dtype))
        return x, ((1, 1, len(x)),)

    def _embedded(self, features: Tensor) -> Tensor:
        """[frames, mels] → [positions, hidden]."""
        own, part = self._loaded, self.part
        x = (features - own["encoder_embedding.global_mean"]) * own["encoder_embedding.global_invstd"]
        found = list[Tensor]()
        for first in range(0, part.reduced(len(x)), CONVOLVED_POSITIONS):
            # Convolutions also read frames of the previous position, but not of the next one.
            before = min(first, 1)
            frames = x[(first - before) * part.reduction : (first + CONVOLVED_POSITIONS) * part.reduction]
            found.append(self._positions(frames)[before:])
        return torch.cat(found)

    def _positions(self, x: Tensor) -> Tensor:
        """Return the result of the convolutions of normalised frames, [frames, mels] → [positions, hidden]."""
        own, part = self._loaded, self.part
        act, x = ACTIVATIONS[part.act], x.view(1, 1, *x.shape)

        def convolved(x: Tensor, number: int, **options: int) -> Tensor:
            weight, bias = (own[f"embed.conv.{number}.{name}"] for name in ("weight", "bias"))
            return torch.nn.functional.conv2d(x, weight, bias, **options)

        x = act(convolved(x, 0, stride=2, padding=1))
        for number in range(1, part.halvings):
            x = convolved(x, 3 * number - 1, stride=2, padding=1, groups=part.channels)
            x = act(convolved(x, 3 * number))
        return linear(x[0].transpose(0, 1).flatten(1), own["embed.out.weight"], own["embed.out.bias"])


class NormedAudioLayer(WholeWeights):
    """See `engine.models.parts.NormedAudio`. Source: transformers modeling_gemma4.py."""

    def __init__(self, part: NormedAudio, path: str) -> None:
        super().__init__(path, normed_sources(part, ""))
        self.part = part

    def rows(self, item: Mapping[str, Tensor], dtype: torch.dtype) -> tuple[Tensor, tuple[Grid, ...]]:
        """Return the embeddings of a clip, and their grid.

        item: `input_features` [frames, mels], without padding. Raises ValueError for other tensors."""
        part, features = self.part, item.get(SPECTROGRAM)
        if features is None or not features.numel() or part.reduced(features.shape[-1]) != part.bands:
            raise ValueError(
                f"an item of media has {', '.join(item)}; the tower reads {SPECTROGRAM} of {4 * part.bands} bands"
            )
        own, path = self._loaded, "subsample_conv_projection"
        x = features.to(dtype).view(1, 1, -1, features.shape[-1])
        for number, size in enumerate(part.channels):
            weight, norm = (own[f"{path}.layer{number}.{name}.weight"] for name in ("conv", "norm"))
            x = torch.nn.functional.conv2d(x, weight, stride=2, padding=1)
            x = layer_norm(x.permute(0, 2, 3, 1), (size,), norm, None, part.eps).relu().permute(0, 3, 1, 2)
        rows = linear(x[0].permute(1, 2, 0).flatten(1), own[f"{path}.input_proj_linear.weight"])
        return rows, ((1, 1, len(rows)),)
