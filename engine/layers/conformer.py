"""Encoders of log-mel spectrograms with convolutions in their blocks. Every rank has them completely."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear, pad, softplus

from engine.layers.patches import Grid
from engine.layers.whole_weights import WholeWeights
from engine.models.media import CLIPPED, conformer_sources, local_conformer_sources
from engine.models.parts import Conformer, LocalConformer
from kernels.activation import ACTIVATIONS

SPECTROGRAM = "input_features"
CONFORMER_SPECTROGRAM = "audio_input_features"
BLOCK = 256
"""Positions whose spectrogram is convolved at once. The first convolution of a long clip would take gigabytes: it has
160 times as many numbers as the hidden states."""


class ConformerLayer(WholeWeights):
    """See `engine.models.parts.Conformer`. Source: transformers modeling_phi4_multimodal.py."""

    def __init__(self, part: Conformer, path: str) -> None:
        super().__init__(path, conformer_sources(part, ""))
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
        count, window = len(x), part.window
        if count > window:
            x = pad(x, (0, 0, 0, -count % window))
        x = x.view(-1, min(count, window), part.hidden)
        biases = self._biases(x.shape[1])
        for index in range(part.layers):
            x = self._block(x, biases, f"encoders.{index}")
        return x.flatten(0, 1)[:count], ((1, 1, count),)

    def _embedded(self, features: Tensor) -> Tensor:
        """[frames, mels] → [positions, hidden]."""
        own, part = self._loaded, self.part
        x = (features - own["encoder_embedding.global_mean"]) * own["encoder_embedding.global_invstd"]
        found = list[Tensor]()
        for first in range(0, part.reduced(len(x)), BLOCK):
            # Convolutions also read frames of the previous position, but not of the next one.
            before = min(first, 1)
            frames = x[(first - before) * part.reduction : (first + BLOCK) * part.reduction]
            found.append(self._positions(frames)[before:])
        return torch.cat(found)

    def _positions(self, x: Tensor) -> Tensor:
        """Return the result of the convolutions of normalised frames, [frames, mels] → [positions, hidden]."""
        own, part = self._loaded, self.part
        act, x = ACTIVATIONS[part.embed_act], x.view(1, 1, *x.shape)

        def convolved(x: Tensor, number: int, **options: int) -> Tensor:
            weight, bias = (own[f"embed.conv.{number}.{name}"] for name in ("weight", "bias"))
            return torch.nn.functional.conv2d(x, weight, bias, **options)

        x = act(convolved(x, 0, stride=2, padding=1))
        for number in range(1, part.halvings):
            x = convolved(x, 3 * number - 1, stride=2, padding=1, groups=part.channels)
            x = act(convolved(x, 3 * number))
        return self._linear(x[0].transpose(0, 1).flatten(1), "embed.out")

    def _biases(self, count: int) -> Tensor:
        """Return the biases of the scores, [heads, count, count]."""
        most, places = self.part.distances, torch.arange(count)
        distances = (places - places.unsqueeze(1)).clamp(-most, most - 1)
        rows = distances.abs() if self.part.symmetric else distances + most
        table = self._loaded["relative_attention_bias_layer.bias_values.weight"]
        return table[rows.to(table.device)].permute(2, 0, 1)

    def _block(self, x: Tensor, biases: Tensor, path: str) -> Tensor:
        """x: [windows, positions, hidden]."""
        x = x + 0.5 * self._mlp(x, f"{path}.feed_forward_in")
        x = x + self._attended(self._norm(x, f"{path}.layer_norm_att"), biases, f"{path}.self_attn")
        x = x + self._convolved(self._norm(x, f"{path}.conv.layer_norm"), f"{path}.conv")
        x = x + 0.5 * self._mlp(x, f"{path}.feed_forward_out")
        return self._norm(x, f"{path}.layer_norm")

    def _mlp(self, x: Tensor, path: str) -> Tensor:
        up, gate = self._linear(self._norm(x, f"{path}.layer_norm"), f"{path}.gate_up_proj").chunk(2, -1)
        return self._linear(up * ACTIVATIONS[self.part.act](gate), f"{path}.down_proj")

    def _attended(self, x: Tensor, biases: Tensor, path: str) -> Tensor:
        q, k, v = (self._linear(x, f"{path}.{name}_proj").unflatten(2, (self.part.heads, -1)) for name in "qkv")
        heads = (one.transpose(1, 2) for one in (q, k, v))
        y = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=biases.unsqueeze(0))
        return self._linear(y.transpose(1, 2).flatten(2), f"{path}.o_proj")

    def _convolved(self, x: Tensor, path: str) -> Tensor:
        own, part = self._loaded, self.part
        up, gate = self._single(x.transpose(1, 2), f"{path}.glu.ext_pw_conv_1d").chunk(2, 1)
        up, gate = up + own[f"{path}.glu.b1"], gate + own[f"{path}.glu.b2"]
        y = pad(up * ACTIVATIONS[part.gate_act](gate), (part.kernel - 1, 0))
        filters = f"{path}.dw_sep_conv_1d.dw_conv"
        y = torch.nn.functional.conv1d(y, own[f"{filters}.weight"], own[f"{filters}.bias"], groups=part.hidden)
        y = ACTIVATIONS[part.convolution_act](self._single(y, f"{path}.dw_sep_conv_1d.pw_conv"))
        return self._single(y, f"{path}.ext_pw_conv_1d").transpose(1, 2)

    def _single(self, x: Tensor, name: str) -> Tensor:
        """Return a convolution of single positions, [windows, channels, positions]."""
        return torch.nn.functional.conv1d(x, self._loaded[f"{name}.weight"], self._loaded[f"{name}.bias"])

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return linear(x, self._loaded[f"{name}.weight"], self._loaded[f"{name}.bias"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = self._loaded[f"{name}.weight"], self._loaded[f"{name}.bias"]
        return layer_norm(x, (self.part.hidden,), weight, bias)


class LocalConformerLayer(WholeWeights):
    """See `engine.models.parts.LocalConformer`. Source: transformers modeling_gemma4.py."""

    def __init__(self, part: LocalConformer, path: str) -> None:
        super().__init__(path, local_conformer_sources(part, ""))
        self.part = part

    def rows(self, item: Mapping[str, Tensor], dtype: torch.dtype) -> tuple[Tensor, tuple[Grid, ...]]:
        """Return the embeddings of a clip, and their grid.

        item: `input_features` [frames, mels], without padding. Raises ValueError for other tensors."""
        part, features = self.part, item.get(SPECTROGRAM)
        if features is None or not features.numel() or part.reduced(features.shape[-1]) != part.bands:
            raise ValueError(
                f"an item of media has {', '.join(item)}; the tower reads {SPECTROGRAM} of {4 * part.bands} bands"
            )
        x = self._embedded(features.reshape(-1, features.shape[-1]).to(dtype))
        distances = self._distances(x)
        for index in range(part.layers):
            x = self._block(x, distances, f"layers.{index}")
        return x, ((1, 1, len(x)),)

    def _embedded(self, features: Tensor) -> Tensor:
        """[frames, mels] → [positions, hidden]."""
        own, path = self._loaded, "subsample_conv_projection"
        x = features.view(1, 1, *features.shape)
        for number, size in enumerate(self.part.channels):
            weight, norm = (own[f"{path}.layer{number}.{name}.weight"] for name in ("conv", "norm"))
            x = torch.nn.functional.conv2d(x, weight, stride=2, padding=1)
            x = layer_norm(x.permute(0, 2, 3, 1), (size,), norm, None, self.part.eps).relu().permute(0, 3, 1, 2)
        return linear(x[0].permute(1, 2, 0).flatten(1), own[f"{path}.input_proj_linear.weight"])

    def _distances(self, x: Tensor) -> Tensor:
        """Return sines and cosines of the distances to the positions of a window, the farthest first,
        [window, hidden]."""
        count = self.part.hidden // 2
        steps = torch.exp(torch.arange(count) * (-math.log(10_000.0) / max(count - 1, 1)))
        angles = torch.arange(self.part.window - 1, -1, -1).unsqueeze(1) * steps
        return torch.cat((angles.sin(), angles.cos()), 1).to(x)

    def _block(self, x: Tensor, distances: Tensor, path: str) -> Tensor:
        x = self._mlp(x, f"{path}.feed_forward1")
        y = self._attended(self._norm(self._limited(x), f"{path}.norm_pre_attn"), distances, f"{path}.self_attn")
        x = x + self._norm(self._limited(y), f"{path}.norm_post_attn")
        x = self._mlp(self._convolved(x, f"{path}.lconv1d"), f"{path}.feed_forward2")
        return self._norm(self._limited(x), f"{path}.norm_out")

    def _mlp(self, x: Tensor, path: str) -> Tensor:
        y = self._linear(self._norm(self._limited(x), f"{path}.pre_layer_norm"), f"{path}.ffw_layer_1")
        y = self._limited(self._linear(ACTIVATIONS[self.part.act](y), f"{path}.ffw_layer_2"))
        return x + self._norm(y, f"{path}.post_layer_norm") * self.part.scale

    def _attended(self, x: Tensor, distances: Tensor, path: str) -> Tensor:
        part, window = self.part, self.part.window
        q, k, v = (self._linear(x, f"{path}.{name}_proj").float().unflatten(1, (part.heads, -1)) for name in "qkv")
        dim = q.shape[2]
        q = q * (dim**-0.5 / math.log(2)) * softplus(self._loaded[f"{path}.per_dim_scale"].float())
        k = k * (math.log(1 + math.e) / math.log(2))
        near = [pad(one, (0, 0, 0, 0, window - 1, 0)).unfold(0, window, 1) for one in (k, v)]
        relative = linear(distances, self._loaded[f"{path}.relative_k_proj.weight"]).unflatten(1, (part.heads, dim))
        scores = torch.einsum("thd,thdw->thw", q, near[0]) + torch.einsum("thd,whd->thw", q, relative.float())
        scores = torch.tanh(scores / part.softcap) * part.softcap
        places = torch.arange(len(x), device=x.device)
        before = places.unsqueeze(1) - torch.arange(window - 1, -1, -1, device=x.device) < 0
        shares = scores.masked_fill(before.unsqueeze(1), float("-inf")).softmax(-1)
        y = torch.einsum("thw,thdw->thd", shares, near[1]).flatten(1)
        return self._linear(y.to(x.dtype), f"{path}.post")

    def _convolved(self, x: Tensor, path: str) -> Tensor:
        part = self.part
        y = self._linear(self._norm(x, f"{path}.pre_layer_norm", part.eps), f"{path}.linear_start")
        y = pad(torch.nn.functional.glu(y).T, (part.kernel - 1, 0))
        y = torch.nn.functional.conv1d(y, self._loaded[f"{path}.depthwise_conv1d.weight"], groups=part.hidden).T
        y = self._norm(self._limited(y), f"{path}.conv_norm", part.eps)
        return x + self._linear(ACTIVATIONS[part.act](y), f"{path}.linear_end")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        if not self.part.clipped:
            return linear(x, self._loaded[f"{name}.linear.weight"])
        least, most, low, high = (self._loaded[f"{name}.{limit}"] for limit in CLIPPED)
        return linear(x.clamp(least, most), self._loaded[f"{name}.linear.weight"]).clamp(low, high)

    def _limited(self, x: Tensor) -> Tensor:
        limit = min(self.part.limit, torch.finfo(x.dtype).max)
        return x.clamp(-limit, limit)

    def _norm(self, x: Tensor, name: str, eps: float = 1e-6) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (normed * self._loaded[f"{name}.weight"].float()).to(x.dtype)
