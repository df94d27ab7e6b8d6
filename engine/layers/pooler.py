"""Pooling of the hidden states of a prompt: one vector, or one for each token, through the declared stages.

Everything is computed in float32 and for each prompt separately, so that no prompt depends on others in the batch. The
states may come in several steps: sums are sequential and in float64, so that on a CPU the result does not depend on the
split.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import normalize

from engine.api.messages import Pooling
from engine.layers.linear import Read, Target
from engine.layers.norm import NormLayer
from engine.models.parts import Dense, Difference, PooledNorm, Pooler, Stage, TokenLogits
from engine.models.sources import join
from kernels.activation import ACTIVATIONS

ACTS: dict[str, Callable[[Tensor], Tensor]] = {
    **ACTIVATIONS,
    "none": lambda x: x,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}
ENDS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "normalize": lambda x: normalize(x, dim=-1),
    "softmax": lambda x: x.softmax(-1),
    "sigmoid": torch.sigmoid,
}
OF_EACH_TOKEN = ("token_embed", "token_classify")


@dataclass
class PoolingState:
    """State of a partially computed prompt."""

    tokens: int = 0
    vector: Tensor | None = None  # [hidden], partial result of the pooling
    each: list[Tensor] = field(default_factory=list)  # [tokens, hidden] pieces, for tasks that return every token
    of_item: Tensor | None = None  # [width], vector of an image, which replaces pooling and stages


class DenseLayer:
    weight: Tensor  # [outputs, inputs] float32
    target: Target  # multiplies by the weight
    bias: Tensor | None = None

    def __init__(self, part: Dense | TokenLogits) -> None:
        self.part, self.act = part, ACTS[part.act if isinstance(part, Dense) else "none"]

    def load(self, read: Read, target: Target) -> None:
        self.target = target
        match self.part:
            case TokenLogits(tokens=tokens, source=source):
                rows = read(f"{source}.weight")[list(tokens)]
            case Dense(linear=declared, path=path):
                (piece,) = declared.rows
                name = join(path, piece.source)
                rows = read(f"{name}.weight")
                if declared.bias:
                    self.bias = read(f"{name}.bias").to(target.device, torch.float32, copy=True)
        self.weight = rows.to(target.device, torch.float32, copy=True)

    @property
    def tensors(self) -> list[Tensor]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    def __call__(self, x: Tensor) -> Tensor:
        return self.act(self.target.multiply(x, self.weight, self.bias))


class DifferenceLayer:
    tensors: tuple[Tensor, ...] = ()

    def load(self, read: Read, target: Target) -> None:
        """Do nothing: the stage has no weights."""

    def __call__(self, x: Tensor) -> Tensor:
        return x[..., :1] - x[..., 1:]


class PooledNormLayer(NormLayer):
    @property
    def tensors(self) -> list[Tensor]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]


StageLayer = DenseLayer | DifferenceLayer | PooledNormLayer


class PoolerLayer:
    def __init__(self, part: Pooler) -> None:
        self.part = part
        self.stages = [_layer(stage) for stage in part.stages]

    def load(self, read: Read, target: Target) -> None:
        for stage in self.stages:
            stage.load(read, target)

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for stage in self.stages for tensor in stage.tensors]

    def gather(self, gathered: PoolingState, hidden: Tensor, pooling: Pooling) -> None:
        """Add the next tokens of a prompt. hidden: [tokens, hidden]."""
        x = hidden.float()
        gathered.tokens += len(x)
        if pooling.task in OF_EACH_TOKEN:
            gathered.each.append(x.clone())
            return
        before = gathered.vector
        match self.part.pool:
            case "first":
                gathered.vector = x[0].clone() if before is None else before
            case "last":
                gathered.vector = x[-1].clone()
            case "max":
                most = x.amax(0)
                gathered.vector = most if before is None else torch.maximum(before, most)
            case "mean":
                rows = x.double() if before is None else torch.cat((before.unsqueeze(0), x.double()))
                gathered.vector = rows.cumsum(0)[-1]

    def finish(self, gathered: PoolingState, pooling: Pooling) -> Tensor:
        """Return [width], or [tokens, width] for tasks that return every token, truncated to `dimensions`."""
        if gathered.of_item is not None:
            return self.end(gathered.of_item.float().unsqueeze(0), pooling)[0]
        if pooling.task in OF_EACH_TOKEN:
            y = torch.cat(gathered.each)
        else:
            assert gathered.vector is not None, "a prompt has a token"
            vector = gathered.vector / gathered.tokens if self.part.pool == "mean" else gathered.vector
            y = vector.float().unsqueeze(0)
        for stage in self.stages:
            y = stage(y)
        y = self.end(y, pooling)
        return y if pooling.task in OF_EACH_TOKEN else y[0]

    def end(self, y: Tensor, pooling: Pooling) -> Tensor:
        """Truncate and activate vectors, [rows, width]."""
        y = y[:, : pooling.dimensions]
        return y if pooling.activate is False else ENDS[self.part.activation](y)


def _layer(stage: Stage) -> StageLayer:
    match stage:
        case Dense() | TokenLogits():
            return DenseLayer(stage)
        case Difference():
            return DifferenceLayer()
        case PooledNorm(norm=norm, path=path):
            return PooledNormLayer(norm, path)
