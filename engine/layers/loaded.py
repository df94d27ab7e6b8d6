"""Loaded weights of a program, by name."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from engine.api.errors import ConfigError
from engine.distributed.world import World, share
from engine.layers.audio import AudioLayer
from engine.layers.linear import ExpertStack, LinearLayer, Read, StackSlice, Target
from engine.layers.local_attention import distance_waves
from engine.layers.norm import HeadNorm, NormLayer, ProjectionNorm
from engine.layers.vocabulary import EncoderEmbedding, TokenRows, Vocabulary
from engine.lowering.operations import (
    ActivationNumbers,
    AlibiSlopes,
    Attend,
    AudioWeights,
    BlockMatrices,
    Bounds,
    Correction,
    DistanceBias,
    ExpertLinear,
    ExpertScales,
    ForeignWeights,
    HeadMatrices,
    LocalWeights,
    Matrix,
    Multiplier,
    NormVector,
    QKNormVectors,
    RecurrentParameter,
    SinkLogits,
    SlopedDistances,
    Tables,
    TokenTable,
    Weight,
)
from engine.lowering.program import Program
from engine.models.parts import Attention, DistanceTable, Experts, RelativeBias
from engine.models.ranks import row_runs
from engine.models.sources import XIELU_NUMBERS, join
from engine.weights.slot import fused, slots
from kernels.activation import xielu_numbers
from kernels.cpu.packing import Packed
from kernels.experts.routes import Routing


class Sinks:
    """The learned logits of an attention's heads, [heads] fp32 of this rank."""

    logits: Tensor

    def __init__(self, part: Attention, path: str, world: World) -> None:
        self.path = join(path, part.sinks_name)
        self.first, self.heads = share(part.heads, world, "heads")

    def load(self, read: Read, target: Target) -> None:
        self.logits = read(self.path)[self.first : self.first + self.heads].to(target.device, torch.float32, copy=True)


class ExpertCorrection:
    """A number for each expert."""

    values: Tensor

    def __init__(self, weight: Correction | ExpertScales) -> None:
        self.path = weight.name

    def load(self, read: Read, target: Target) -> None:
        self.values = read(self.path).flatten().to(target.device, torch.float32, copy=True)


class ActivationLayer:
    """Numbers of xIELU as kernels/activation.py takes them, [4] fp32 on every rank."""

    numbers: Tensor

    def __init__(self, weight: ActivationNumbers) -> None:
        self.path = weight.name

    def load(self, read: Read, target: Target) -> None:
        numbers = [read(join(self.path, name)).to(torch.float32).reshape(()) for name in XIELU_NUMBERS]
        self.numbers = xielu_numbers(*numbers).to(target.device)


class BoundsLayer:
    """The least and the largest number of inputs or outputs of a projection, [2] fp32."""

    limits: Tensor

    def __init__(self, weight: Bounds) -> None:
        self.names = tuple(join(weight.path, f"{weight.side}_{end}") for end in ("min", "max"))

    def load(self, read: Read, target: Target) -> None:
        self.limits = torch.stack([read(name).reshape(()).float() for name in self.names]).to(target.device)


class Slopes:
    """The ALiBi slopes of this rank's heads, [heads] fp32."""

    slopes: Tensor

    def __init__(self, weight: AlibiSlopes, world: World) -> None:
        first, heads = share(weight.heads, world, "heads")
        self.own = weight.alibi.slopes(weight.heads)[first : first + heads]

    def load(self, read: Read, target: Target) -> None:
        self.slopes = torch.tensor(self.own, dtype=torch.float32, device=target.device)


class BiasLayer:
    """The biases of this rank's heads for the distances -max_distance … max_distance, [heads, width] fp32."""

    biases: Tensor

    def __init__(self, weight: DistanceBias, world: World) -> None:
        self.relative, self.path = weight.relative, f"{weight.name}.weight"
        self.first, self.heads = share(weight.heads, world, "heads")

    def load(self, read: Read, target: Target) -> None:
        rows = read(self.path)[distance_buckets(self.relative), self.first : self.first + self.heads]
        self.biases = rows.T.to(target.device, torch.float32).contiguous()


class SlopedBiases:
    """ALiBi in both directions: biases of this rank's heads for the distances -reach … reach, [heads, width] fp32."""

    biases: Tensor

    def __init__(self, weight: SlopedDistances, world: World) -> None:
        first, heads = share(weight.heads, world, "heads")
        self.slopes, self.reach = weight.alibi.slopes(weight.heads)[first : first + heads], weight.reach

    def load(self, read: Read, target: Target) -> None:
        distance = torch.arange(-self.reach, self.reach + 1, dtype=torch.float32).abs()
        slopes = torch.tensor(self.slopes, dtype=torch.float32).unsqueeze(1)
        self.biases = (-slopes * distance).to(target.device)


class LocalLayer:
    """Weights of a local attention. factors: of the queries, [head_dim] fp32; distances: [window, heads, head_dim]
    fp32, the farthest first."""

    factors: Tensor
    distances: Tensor

    def __init__(self, weight: LocalWeights) -> None:
        self.part, self.path = weight.part, weight.path

    def load(self, read: Read, target: Target) -> None:
        part = self.part
        scales, projection = (
            read(join(self.path, name)).to(target.device, torch.float32)
            for name in (part.scales, f"{part.distances}.weight")
        )
        self.factors = softplus(scales) * (part.head_dim**-0.5 / math.log(2))
        projected = distance_waves(part.window, part.hidden).to(target.device) @ projection.T
        self.distances = projected.unflatten(1, (part.heads, part.head_dim))


def distance_buckets(part: RelativeBias | DistanceTable) -> Tensor:
    """Return the bucket of each distance -max_distance … max_distance, int64.

    The logarithm is in float32, as in the model's training code: the last digit decides at the limits of buckets."""
    distance = torch.arange(-part.max_distance, part.max_distance + 1)
    if isinstance(part, DistanceTable):
        nearest = distance.clamp(1 - part.max_distance if part.symmetric else -part.max_distance, part.max_distance - 1)
        return nearest.abs() if part.symmetric else nearest + part.max_distance
    if part.bidirectional:
        count, apart = part.buckets // 2, distance.abs()
        after = (distance > 0).long() * count
    else:
        count, apart = part.buckets, -distance.clamp(max=0)
        after = torch.zeros_like(distance)
    ratio = torch.log(apart.float() / part.exact) / math.log(part.max_distance / part.exact)
    large = part.exact + (ratio * (count - part.exact)).nan_to_num(neginf=0).long()
    return after + torch.where(apart < part.exact, apart, large.clamp(max=count - 1))


class ParameterLayer:
    """A small parameter of a recurrent part, [rows of this rank · repeat] or [rows, inner] fp32. The weights of a
    convolution are [channels, conv], and [conv, channels] for compiled kernels."""

    tensor: Tensor

    def __init__(self, weight: RecurrentParameter, world: World) -> None:
        self.parameter, self.path, self.world = weight.parameter, weight.path, world

    def load(self, read: Read, target: Target) -> None:
        if self.parameter.values is not None:
            stored = {self.parameter.rows[0].source: -torch.tensor(self.parameter.values)}
        else:
            stored = {piece.source: read(join(self.path, piece.source)) for piece in self.parameter.rows}
        if self.parameter.stored:
            stored = {name: tensor.flatten() for name, tensor in stored.items()}
        pieces = []
        for piece in self.parameter.rows:
            first, units = share(piece.units, self.world, "heads") if self.parameter.divided else (0, piece.units)
            pieces += [stored[piece.source].narrow(0, start, rows) for start, rows in row_runs(piece, first, units)]
        tensor = torch.cat(pieces).to(target.device, torch.float32).repeat_interleave(self.parameter.repeat, 0)
        if self.parameter.inner:
            tensor = tensor.flatten(1)
        if self.parameter.taps and target.team is not None:
            tensor = tensor.T.contiguous()
        self.tensor = -tensor.exp() if self.parameter.negative_exp else tensor


class MultiplierLayer:
    """A single number, [1] fp32."""

    tensor: Tensor

    def __init__(self, weight: Multiplier) -> None:
        self.name = weight.name

    def load(self, read: Read, target: Target) -> None:
        self.tensor = read(self.name).to(target.device, torch.float32, copy=True)


class HeadWeights:
    """W_UK and W_UV of this rank's heads of a latent attention.

    whole: [heads, qk_nope_head_dim + v_head_dim, kv_lora_rank] of the activations' type, W_UK before W_UV. Compiled
    kernels have instead a packed matrix of each head for each of the two products."""

    whole: Tensor | None = None
    absorbing: tuple[Packed, ...] = ()  # W_UK transposed, [kv_lora_rank, qk_nope_head_dim]
    expanding: tuple[Packed, ...] = ()  # W_UV, [v_head_dim, kv_lora_rank]

    def __init__(self, weight: HeadMatrices, world: World) -> None:
        self.part, self.path = weight.attention, weight.path
        self.slots = slots(weight.linear, world)

    def load(self, read: Read, target: Target) -> None:
        dtype, nope = target.dtype, self.part.qk_nope_head_dim
        if target.team is not None and target.stored_dtype(read, self.path, self.slots) == torch.bfloat16:
            dtype = torch.bfloat16
        rows = fused(read, self.path, "weight", self.slots, dtype, target.device)
        heads = rows.unflatten(0, (-1, nope + self.part.v_head_dim))
        if target.team is None:
            self.whole = heads
            return
        self.absorbing = tuple(target.pack_exact(head[:nope].t().contiguous()) for head in heads)
        self.expanding = tuple(target.pack_exact(head[nope:]) for head in heads)

    @property
    def keys(self) -> Tensor:
        """W_UK, [heads, qk_nope_head_dim, kv_lora_rank]."""
        assert self.whole is not None, "a compiled model multiplies by packed weights itself"
        return self.whole[:, : self.part.qk_nope_head_dim]

    @property
    def values(self) -> Tensor:
        """W_UV, [heads, v_head_dim, kv_lora_rank]."""
        assert self.whole is not None, "a compiled model multiplies by packed weights itself"
        return self.whole[:, self.part.qk_nope_head_dim :]


class BlockWeights:
    """Square matrices of this rank's heads of an RG-LRU.

    whole: [heads, outputs, inputs] of the activations' type. Compiled kernels have a packed matrix of each head."""

    whole: Tensor | None = None
    packed: tuple[Packed, ...] = ()

    def __init__(self, weight: BlockMatrices, world: World) -> None:
        self.path = weight.name
        self.first, self.heads = share(weight.heads, world, "heads")

    def load(self, read: Read, target: Target) -> None:
        stored = read(self.path)[self.first : self.first + self.heads].transpose(1, 2)
        # Compiled kernels widen bf16 as they read it.
        dtype = torch.bfloat16 if target.team is not None and stored.dtype == torch.bfloat16 else target.dtype
        blocks = torch.empty(stored.shape, dtype=dtype, device=target.device).copy_(stored)
        if target.team is None:
            self.whole = blocks
            return
        self.packed = tuple(map(target.pack_exact, blocks))

    @property
    def blocks(self) -> Tensor:
        assert self.whole is not None, "a compiled model multiplies by packed weights itself"
        return self.whole


Loadable = (
    LinearLayer
    | NormLayer
    | HeadNorm
    | ProjectionNorm
    | Sinks
    | Slopes
    | BiasLayer
    | SlopedBiases
    | HeadWeights
    | BlockWeights
    | ExpertCorrection
    | ActivationLayer
    | ParameterLayer
    | Vocabulary
    | EncoderEmbedding
    | TokenRows
    | MultiplierLayer
    | AudioLayer
    | BoundsLayer
    | LocalLayer
)


@dataclass(frozen=True)
class LoadedWeights:
    """Weights of a program on one rank. They have no tensors before their `load`."""

    by_name: Mapping[str, Loadable]  # in the order of loading
    stacks: Mapping[str, ExpertStack]  # matrices of routed experts that are stacked, by ExpertLinear.stack

    def matrix(self, weight: Matrix) -> LinearLayer:
        found = self.by_name[weight.name]
        assert isinstance(found, LinearLayer), f"{weight.name} is a matrix"
        return found

    def norm(self, weight: NormVector) -> NormLayer:
        found = self.by_name[weight.name]
        assert isinstance(found, NormLayer), f"{weight.name} is a norm"
        return found

    def qk_norm(self, weight: QKNormVectors) -> HeadNorm | ProjectionNorm:
        found = self.by_name[weight.name]
        assert isinstance(found, HeadNorm | ProjectionNorm), f"{weight.name} is a norm of queries and keys"
        return found

    def sinks(self, weight: SinkLogits | None) -> Tensor | None:
        """Return [heads] fp32, or None for an attention without sinks."""
        if weight is None:
            return None
        found = self.by_name[weight.name]
        assert isinstance(found, Sinks), f"{weight.name} are logits"
        return found.logits

    def heads(self, weight: HeadMatrices) -> HeadWeights:
        found = self.by_name[weight.name]
        assert isinstance(found, HeadWeights), f"{weight.name} are matrices of heads"
        return found

    def blocks(self, weight: BlockMatrices) -> BlockWeights:
        found = self.by_name[weight.name]
        assert isinstance(found, BlockWeights), f"{weight.name} are matrices of heads"
        return found

    def correction(self, weight: Correction | ExpertScales | None) -> Tensor | None:
        """Return [num_experts] fp32, or None."""
        if weight is None:
            return None
        found = self.by_name[weight.name]
        assert isinstance(found, ExpertCorrection), f"{weight.name} are numbers of experts"
        return found.values

    def activation(self, weight: ActivationNumbers | None) -> Tensor | None:
        """Return [4] fp32, or None for an activation without numbers."""
        if weight is None:
            return None
        found = self.by_name[weight.name]
        assert isinstance(found, ActivationLayer), f"{weight.name} are numbers of an activation"
        return found.numbers

    def slopes(self, weight: AlibiSlopes | None) -> Tensor | None:
        """Return [heads] fp32, or None for an attention without ALiBi."""
        if weight is None:
            return None
        found = self.by_name[weight.name]
        assert isinstance(found, Slopes), f"{weight.name} are slopes"
        return found.slopes

    def bias(self, weight: DistanceBias | SlopedDistances | None) -> Tensor | None:
        """Return [heads, distances] fp32, or None for an attention without biases."""
        if weight is None:
            return None
        found = self.by_name[weight.name]
        assert isinstance(found, BiasLayer | SlopedBiases), f"{weight.name} are biases"
        return found.biases

    def parameter(self, weight: RecurrentParameter) -> Tensor:
        """Return the tensor of `ParameterLayer`."""
        found = self.by_name[weight.name]
        assert isinstance(found, ParameterLayer), f"{weight.name} is a parameter of a recurrent part"
        return found.tensor

    def token_rows(self, weight: TokenTable) -> TokenRows:
        found = self.by_name[weight.name]
        assert isinstance(found, TokenRows), f"{weight.name} are rows of tokens"
        return found

    def multiplier(self, weight: Multiplier) -> Tensor:
        """Return [1] fp32."""
        found = self.by_name[weight.name]
        assert isinstance(found, MultiplierLayer), f"{weight.name} is a number"
        return found.tensor

    def tables(self, weight: Tables) -> Vocabulary | EncoderEmbedding:
        found = self.by_name[weight.name]
        assert isinstance(found, Vocabulary | EncoderEmbedding), f"{weight.name} is an embedding"
        return found

    def bounds(self, weight: Bounds) -> tuple[Tensor, Tensor]:
        """Return the least and the largest number."""
        found = self.by_name[weight.name]
        assert isinstance(found, BoundsLayer), f"{weight.name} is a bound"
        low, high = found.limits
        return low, high

    def local(self, weight: LocalWeights) -> LocalLayer:
        found = self.by_name[weight.name]
        assert isinstance(found, LocalLayer), f"{weight.name} are weights of a local attention"
        return found

    def audio(self, weight: AudioWeights) -> AudioLayer:
        found = self.by_name[weight.name]
        assert isinstance(found, AudioLayer), f"{weight.name} embeds spectrograms"
        return found


def routing(part: Experts) -> Routing:
    return Routing(
        top_k=part.top_k,
        scores=part.scores,
        groups=part.groups,
        groups_kept=part.groups_kept,
        group_score=part.group_score,
        normalized=part.normalized,
        scale=part.weight_scale,
        jitter=part.jitter,
    )


def unloaded(program: Program, vocabulary: Vocabulary | None, world: World) -> LoadedWeights:
    """Return the weights of a program, to be loaded. vocabulary: the tables of the decoder, if there is one. Raises
    ConfigError for chunks and scaled queries outside of causal self-attention, and ALiBi and relative biases outside
    of self-attention, which no executor supports."""
    for op in (*program.encoder, *program.ops):
        if isinstance(op, Attend) and op.part.alibi is not None and op.cross:
            raise ConfigError("ALiBi requires self-attention; remove it from this model's declaration")
        if isinstance(op, Attend) and op.part.relative is not None and (op.cross or op.part.alibi is not None):
            raise ConfigError("relative biases require self-attention without ALiBi; change this model's declaration")
        if isinstance(op, Attend) and not op.part.supported_limits:
            raise ConfigError(
                "chunks and scaled queries require causal self-attention, and chunks exclude a window; change this "
                "model's declaration"
            )
    stacks: dict[str, ExpertStack] = {}
    slices: dict[str, StackSlice] = {}
    for op in program.ops:
        if isinstance(op, ExpertLinear):
            stack = stacks[op.stack] = ExpertStack(len(op.matrices))
            slices |= {matrix.name: StackSlice(stack, number) for number, matrix in enumerate(op.matrices)}

    def made(weight: Weight) -> Loadable:
        match weight:
            case Matrix(linear=linear, path=path):
                place = slices.get(weight.name)
                return LinearLayer(
                    linear, path, world, rounded=weight.quantized, stack_slice=place, wide_rows=weight.wide_rows
                )
            case NormVector(norm=norm, path=path):
                return NormLayer(norm, path)
            case QKNormVectors(attention=part, path=path):
                return (ProjectionNorm if part.qk_norm_span == "all" else HeadNorm)(part, path, world)
            case SinkLogits(attention=part, path=path):
                return Sinks(part, path, world)
            case HeadMatrices():
                return HeadWeights(weight, world)
            case BlockMatrices():
                return BlockWeights(weight, world)
            case Correction() | ExpertScales():
                return ExpertCorrection(weight)
            case ActivationNumbers():
                return ActivationLayer(weight)
            case AlibiSlopes():
                return Slopes(weight, world)
            case DistanceBias():
                return BiasLayer(weight, world)
            case SlopedDistances():
                return SlopedBiases(weight, world)
            case RecurrentParameter():
                return ParameterLayer(weight, world)
            case TokenTable():
                return TokenRows(weight.part, weight.name)
            case Multiplier():
                return MultiplierLayer(weight)
            case AudioWeights(embed=audio, root=root):
                return AudioLayer(audio, root)
            case Bounds():
                return BoundsLayer(weight)
            case LocalWeights():
                return LocalLayer(weight)
            case ForeignWeights():
                raise ValueError("engine.layers.foreign loads the models of transformers")
            case Tables(own_tokens=True):
                assert vocabulary is not None, "a program with tables has a vocabulary"
                return vocabulary
            case Tables(embed=embed, root=root):
                assert vocabulary is not None, "a program with tables has a vocabulary"
                return EncoderEmbedding(embed, root, vocabulary)

    return LoadedWeights({weight.name: made(weight) for weight in program.weights}, stacks)
