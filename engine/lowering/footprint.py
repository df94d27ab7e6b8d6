"""Exact weight memory of one rank in bytes: every tensor with its share, quantization and padding.

Computed from the weights of the lowered program and the headers alone, without torch. Engines load the same weights
(engine/layers/loaded.py), and packed weights are padded as in kernels/cpu/packing.py. Tests compare both with the
allocated tensors, byte by byte.

Two properties are not in the headers: whether all symmetric zero points of a gptq checkpoint are the midpoint (assumed
true), and whether the groups of an act-order checkpoint are contiguous (assumed false).
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol, cast

from engine.api.config import Dtype, EmbeddingBits, HeadBits, WeightBits
from engine.formats.load_time import LOAD_FORMATS, SCALE_SIZE
from engine.formats.native import Executor, GgmlBlocks, Native, Places, Role, Segmented, runs
from engine.lowering.lower import lower, state_projection
from engine.lowering.operations import (
    ActivationNumbers,
    AlibiSlopes,
    AudioWeights,
    BlockMatrices,
    Bounds,
    Correction,
    DistanceBias,
    ExpertScales,
    ForeignWeights,
    HeadMatrices,
    LocalWeights,
    Matrix,
    Multiplier,
    NormVector,
    Part,
    QKNormVectors,
    RecurrentParameter,
    SinkLogits,
    SlopedDistances,
    Tables,
    TokenTable,
)
from engine.lowering.tower import lower_tower
from engine.models.headers import ELEMENT_BYTES, TensorInfo
from engine.models.media import media_tensors, unlowered_tensors
from engine.models.parts import (
    Attention,
    Dense,
    Embedding,
    LayerNorm,
    Linear,
    Media,
    Model,
    Norm,
    Parameter,
    PooledNorm,
    Pooler,
    TokenLogits,
)
from engine.models.quantized import Quantization
from engine.models.ranks import row_runs, rows_of, share_of
from engine.models.sources import XIELU_NUMBERS, audio_sources, join, qk_norms
from kernels.ggml_layout import row_bytes

PARTS: tuple[Part, ...] = (
    "embedding",
    "attention",
    "recurrent",
    "mlp",
    "experts",
    "norms",
    "head",
    "model",
    "adapters",
    "tower",
    "draft",
)
DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
HEADER_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
# Numbers of inputs that share a scale in weights quantized at load time.
SMALL_GROUP = 32  # 4 bits, and 8 bits of pooling models, whose vectors need the accuracy
LARGE_GROUP = 64


class Tiling(Protocol):
    """Tile sizes of the compiled kernels (kernels/cpu/library.py)."""

    @property
    def width(self) -> int: ...
    @property
    def matrix(self) -> bool: ...
    @property
    def bf16(self) -> bool: ...


@dataclass(frozen=True)
class Holder:
    """Target for which weights are loaded."""

    dtype: Dtype
    device: Literal["cpu", "cuda"] = "cpu"
    tiling: Tiling | None = None  # of the compiled kernels; None: torch or Triton multiplies
    bits: WeightBits = "stored"
    group: int = 0  # inputs that share a scale of quantized weights; 0: `quantization_group`
    head: HeadBits = "auto"
    embedding: EmbeddingBits = "stored"
    rank: int = 0
    ranks: int = 1
    shares_tables: bool = False  # a head that drafts uses the embedding and the head of the target's memory
    triton: bool = False  # Triton kernels multiply, and keep the formats that they have products for

    @property
    def executor(self) -> Executor:
        return "compiled" if self.tiling is not None else "triton" if self.triton else "torch"

    @property
    def element_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]


def quantization_group(bits: WeightBits, model: Model) -> int:
    """Return the number of inputs that share a scale if the manifest does not set it."""
    format = LOAD_FORMATS.get(bits)
    if format is not None and format.group is not None:
        return format.group
    return SMALL_GROUP if (format is not None and format.small_groups) or model.head is None else LARGE_GROUP


def head_bits(bits: WeightBits, head: HeadBits) -> WeightBits:
    """Return the format to which the head is quantized."""
    if head != "auto":
        return head
    format = LOAD_FORMATS.get(bits)
    return "stored" if format is None else cast(WeightBits, format.head)


class Holding(NamedTuple):
    """A piece of memory, with the size as a product of `factors`."""

    part: Part
    name: str
    what: str  # data type, for people
    factors: tuple[int, ...]  # the last one is a number of bytes
    mapped: bool = False  # used directly in the mapped checkpoint file (page cache)
    temporary: int = 0  # additional bytes while it is loaded
    read: int = 0  # bytes of the checkpoint's files that are resident meanwhile
    weight: str = ""  # name of the weight in the program

    @property
    def bytes(self) -> int:
        return math.prod(self.factors)


def weight_bytes(
    model: Model, tensors: Mapping[str, TensorInfo], quantization: Quantization | None, holder: Holder
) -> int:
    """Return the bytes of all weights that one rank allocates."""
    return sum(part_bytes(footprint(model, tensors, quantization, holder)).values())


def part_bytes(holdings: tuple[Holding, ...]) -> dict[str, int]:
    """Return the allocated bytes of each part that the model has."""
    found: dict[Part, int] = {}
    for one in holdings:
        found[one.part] = found.get(one.part, 0) + (0 if one.mapped else one.bytes)
    return {part: found[part] for part in PARTS if part in found}


def mapped_bytes(holdings: tuple[Holding, ...]) -> int:
    return sum(one.bytes for one in holdings if one.mapped)


def loading_bytes(holdings: tuple[Holding, ...]) -> int:
    """Return the peak memory of loading: everything loaded so far plus the temporary memory of the next matrix."""
    most = held = 0
    for one in holdings:
        held += 0 if one.mapped else one.bytes
        most = max(most, held + one.temporary + one.read)
    return most


def temporary_bytes(holdings: tuple[Holding, ...]) -> int:
    """Return the largest additional memory for loading one matrix; on a GPU this is host memory."""
    return max((one.temporary for one in holdings), default=0)


def footprint(
    model: Model, tensors: Mapping[str, TensorInfo], quantization: Quantization | None, holder: Holder
) -> tuple[Holding, ...]:
    """Return all memory of one rank, in loading order. Raises ConfigError if the model's heads or rows cannot be
    divided among the ranks."""
    return tuple(_Footprint(model, tensors, quantization, holder).holdings())


class _Footprint:
    def __init__(
        self, model: Model, tensors: Mapping[str, TensorInfo], quantization: Quantization | None, holder: Holder
    ) -> None:
        self.model, self.tensors, self.to = model, tensors, holder
        self.quantization = quantization
        self._experts: dict[tuple[object, ...], tuple[Matrix, tuple[Holding, ...]]] = {}

    def holdings(self) -> Iterator[Holding]:
        model = self.model
        names = [join(model.root, model.embed.name), *([] if model.head is None else [model.head.name])]
        read = sum(map(self._file_bytes, names))
        projection = state_projection(model)
        of_projection = () if projection is None else projection.weights
        for weight in (*lower(model, self.to.ranks).weights, *of_projection):
            match weight:
                case Tables(own_tokens=True):
                    found: Iterable[Holding] = (one._replace(read=read) for one in self._vocabulary())
                case Tables(embed=embed):
                    found = self._added(embed)
                case Matrix():
                    found = self._linear(weight)
                case NormVector(norm=norm, path=path):
                    found = self._norm(norm, path)
                case QKNormVectors(attention=part, path=path):
                    found = self._qk_norm(part, path)
                case SinkLogits(attention=part, path=path):
                    found = (Holding("attention", weight.name, "float32", (self._share(part.heads), 4)),)
                case Correction(experts=experts) | ExpertScales(experts=experts):
                    found = (Holding("experts", weight.name, "float32", (experts.routed, 4)),)
                case ActivationNumbers():
                    found = (Holding("mlp", weight.name, "float32", (len(XIELU_NUMBERS), 4)),)
                case RecurrentParameter(parameter=parameter):
                    found = (self._parameter(parameter, weight.name),)
                case HeadMatrices():
                    found = self._head_matrices(weight)
                case BlockMatrices():
                    found = (self._block_matrices(weight),)
                case TokenTable(part=inputs):
                    found = (self._lookup(weight.name, inputs.vocab, inputs.layers * inputs.width),)
                case Multiplier(size=size):
                    found = (Holding("norms", weight.name, "float32", (size, 4)),)
                case ForeignWeights():
                    found = self._foreign(weight)
                case AudioWeights():
                    found = (
                        Holding("embedding", name, self.to.dtype, (math.prod(shape), self.to.element_bytes))
                        for name, shape in audio_sources(weight.embed, weight.root).items()
                    )
                case Bounds() | LocalWeights():
                    raise ValueError(f"{weight.name}: no memory is planned for it outside of a tower")
                case AlibiSlopes(heads=heads):
                    found = (Holding("attention", weight.name, "float32", (self._share(heads), 4)),)
                case DistanceBias(heads=heads, width=width) | SlopedDistances(heads=heads, width=width):
                    found = (Holding("attention", weight.name, "float32", (self._share(heads), width, 4)),)
            yield from (one._replace(weight=weight.name) for one in found)
        if model.head is not None and model.head.ids:
            yield Holding("head", model.head.ids, "int64", (model.head.rows, 8))
        if model.pooler is not None:
            yield from self._pooler(model.pooler)
        if model.media is not None:
            for media in model.media.towers:
                yield from self._tower(media)

    # Parts

    def _tower(self, media: Media) -> Iterator[Holding]:
        """Yield the tower and the projectors, which every rank has completely and in the type of the activations."""
        stored, to = media_tensors(media), self.to
        infos = {name: self.tensors[one.name] for name, one in stored.items() if one.name in self.tensors}
        alone = replace(to, bits="stored", rank=0, ranks=1, triton=False)
        inner = _Footprint(self.model, infos, None, alone)
        for name in unlowered_tensors(media):
            yield Holding("tower", name, to.dtype, (math.prod(stored[name].shape), to.element_bytes))
        for program in lower_tower(media).programs:
            for weight in program.weights:
                match weight:
                    case Matrix():
                        found: Iterable[Holding] = inner._linear(weight)
                    case NormVector(norm=norm, path=path):
                        found = inner._norm(norm, path)
                    case QKNormVectors(attention=part, path=path):
                        found = inner._qk_norm(part, path)
                    case Bounds():
                        found = (Holding("norms", weight.name, "float32", (2, 4)),)
                    case DistanceBias(heads=heads, width=width):
                        found = (Holding("attention", weight.name, "float32", (heads, width, 4)),)
                    case LocalWeights(part=local):
                        sizes = local.head_dim + local.window * local.hidden
                        found = (Holding("attention", weight.name, "float32", (sizes, 4)),)
                    case RecurrentParameter(parameter=parameter):
                        found = (inner._parameter(parameter, weight.name),)
                    case _:
                        raise ValueError(f"{weight.name}: no memory is planned for it in a tower")
                yield from (one._replace(part="tower", weight=weight.name) for one in found)

    def _foreign(self, weight: ForeignWeights) -> Iterator[Holding]:
        """Yield the tensors of the checkpoint, which transformers loads in the type of the activations."""
        for name, info in self.tensors.items():
            copied = info.bytes if self._stored(name) != HEADER_NAMES[self.to.dtype] else 0
            yield Holding(
                "model", name, self.to.dtype, (math.prod(info.shape), self.to.element_bytes), temporary=copied
            )

    def _pooler(self, pooler: Pooler) -> Iterator[Holding]:
        """Yield the pooler, which every rank has completely and in float32."""
        for stage in pooler.stages:
            match stage:
                case Dense(linear=linear, path=path):
                    name, rows = join(path, linear.rows[0].source), linear.rows[0].units
                    yield Holding("head", name, "float32", (rows, linear.inputs, 4))
                    if linear.bias:
                        yield Holding("head", f"{name} (bias)", "float32", (rows, 4))
                case TokenLogits(tokens=tokens, source=source, hidden=hidden):
                    yield Holding("head", f"{source} (some rows)", "float32", (len(tokens), hidden, 4))
                case PooledNorm(norm=norm, path=path):
                    name = join(path, norm.name)
                    yield Holding("head", name, "float32", (norm.size, 4))
                    if isinstance(norm, LayerNorm) and norm.bias:
                        yield Holding(
                            "head", f"{name} (bias)", "float32", (norm.size, 4), self._in_file(f"{name}.bias")
                        )

    def _parameter(self, parameter: Parameter, name: str) -> Holding:
        units = (self._share(one.units) if parameter.divided else one.units for one in parameter.rows)
        rows = sum(count * one.width for count, one in zip(units, parameter.rows, strict=True))
        return Holding("recurrent", name, "float32", (rows, *parameter.inner, parameter.repeat, 4))

    def _qk_norm(self, part: Attention, path: str) -> Iterator[Holding]:
        heads, kv_heads = self._share(part.heads), 0 if part.shared_kv else self._share(part.kv_heads)
        name = join(path, "+".join(norm.name for norm, _ in qk_norms(part)))
        yield Holding("norms", name, "float32", (heads + kv_heads, part.head_dim, 4))
        if isinstance(part.qk_norm, LayerNorm) and part.qk_norm.bias:
            yield Holding("norms", f"{name} (bias)", "float32", (heads + kv_heads, part.head_dim, 4))

    def _norm(self, norm: Norm, path: str) -> Iterator[Holding]:
        name = join(path, norm.name)
        yield Holding("norms", name, "float32", (norm.size, 4))
        if isinstance(norm, LayerNorm) and norm.bias:
            yield Holding("norms", f"{name} (bias)", "float32", (norm.size, 4), self._in_file(f"{name}.bias"))

    def _in_file(self, name: str) -> bool:
        """Return whether a float32 tensor is used in the mapped file; a misaligned one is copied."""
        info = self.tensors.get(name)
        return self.to.device == "cpu" and self._stored(name) == "F32" and (info is None or info.offset % 4 == 0)

    def _vocabulary(self) -> Iterator[Holding]:
        """Yield embedding and head. On a CPU the embedding is used in the mapped file, unless no kernel reads its type.
        Compiled kernels look up the rows of all ranks. An unmodified tied head shares the embedding's memory."""
        embed, head, to = self.model.embed, self.model.head, self.to
        path = join(self.model.root, embed.name)
        first, rows = rows_of(embed.vocab, to.rank, to.ranks)
        stored, restored = self._stored(f"{path}.weight"), self._restored(path)
        in_file = to.device == "cpu" and stored != "F64" and not restored
        kept = stored if in_file else HEADER_NAMES[to.dtype]
        size = ELEMENT_BYTES[kept]
        info = self.tensors.get(f"{path}.weight")
        copied = info is not None and info.offset % size > 0  # a view must start at a multiple of its type
        looked_up = rows if to.tiling is None else embed.vocab
        temporary = 0 if in_file else looked_up * embed.row_width * 4
        blocks = None if embed.is_sum else self._native_of([path], "head")
        if not (to.shares_tables and self.model.shares_embedding):
            factors: tuple[int, ...] = (looked_up, embed.row_width, size)
            mapped = in_file and not copied
            type = _spelled(kept)
            if isinstance(blocks, GgmlBlocks):
                type, factors = blocks.type, (looked_up, row_bytes(blocks.type, embed.row_width))
                mapped = to.device == "cpu"
                temporary = 0
            elif to.embedding == "int6":
                type, factors, mapped = "int6", (looked_up, row_bytes("INT6", embed.row_width)), False
                temporary = LOAD_FORMATS["int6"].loading_bytes(looked_up, embed.row_width, size)
            yield Holding("embedding", path, type, factors, mapped, temporary)
            yield from self._added(embed)
        if head is None or (to.shares_tables and self.model.shares_head):
            return
        if head.rows:
            first, rows = 0, head.rows
        source = path if head.tied else head.name
        name = f"{head.name} (of {embed.name})" if head.tied else head.name
        native = None if head.unit_rows else self._native_of([source], "head")
        if native is not None:
            yield from self._native("head", name, native, [source], rows, embed.row_width, [(first, 0)])
        else:
            quantized = to.embedding != "stored"  # the head then reads the checkpoint
            there = (
                (stored if quantized else kept)
                if head.tied
                else ("F32" if self._restored(source) else self._stored(f"{source}.weight"))
            )
            held_there = in_file if head.tied and not quantized else to.device == "cpu" and not self._restored(source)
            held_there = held_there and not head.unit_rows
            yield from self._head(name, rows, embed.row_width, there, held_there, tied=head.tied)
        if head.bias or head.added:
            bias = head.added or f"{head.name}.bias"
            in_file = to.device == "cpu" and self._stored(bias) == HEADER_NAMES[to.dtype]
            yield Holding("head", f"{head.name} (bias)", to.dtype, (rows, to.element_bytes), mapped=in_file)

    def _added(self, embed: Embedding) -> Iterator[Holding]:
        """Yield the position and segment tables."""
        for table in (embed.positions, embed.segments):
            if table is not None and table.period is not None:
                factors = table.count, embed.hidden, self.to.element_bytes
                yield Holding("embedding", "positions (computed)", self.to.dtype, factors)
            elif table is not None:
                yield self._lookup(join(self.model.root, table.name), table.count, embed.hidden)

    def _lookup(self, path: str, count: int, hidden: int) -> Holding:
        """Return a table that every rank has completely."""
        to, stored = self.to, self._stored(f"{path}.weight")
        in_file = to.device == "cpu" and stored != "F64"
        kept = stored if in_file else HEADER_NAMES[to.dtype]
        size, info = ELEMENT_BYTES[kept], self.tensors.get(f"{path}.weight")
        copied = info is not None and info.offset % size > 0
        return Holding("embedding", path, _spelled(kept), (count, hidden, size), in_file and not copied)

    def _head(self, name: str, rows: int, inputs: int, stored: str, in_file: bool, *, tied: bool) -> Iterator[Holding]:
        to = self.to
        bits = head_bits(to.bits, to.head)
        format = LOAD_FORMATS.get(bits)
        if format is not None and "head" in format.roles(to.executor):
            yield from self._quantized("head", name, bits, rows, inputs, stored)
            return
        if to.tiling is not None:
            yield from self._packed("head", name, rows, inputs, stored)
            return
        transposed = to.device == "cpu" and to.dtype == "float32"
        if stored == HEADER_NAMES[to.dtype] and not transposed and (in_file or tied):
            if tied:
                yield Holding("head", name, "the embedding's own memory", (0,))
            else:
                yield Holding("head", name, to.dtype, (rows, inputs, to.element_bytes), mapped=True)
            return
        temporary = rows * inputs * 4 if transposed and stored != "F32" else 0
        yield Holding("head", name, to.dtype, (rows, inputs, to.element_bytes), temporary=temporary)

    # Matrices

    def _linear(self, weight: Matrix) -> Iterator[Holding]:
        """Yield a matrix. The experts of a layer, up to 18,000 in a model, are of a few kinds, each computed once."""
        linear, path = weight.linear, weight.path
        sources = list(dict.fromkeys(join(path, one.source) for one in linear.rows))
        if weight.expert is None or self.quantization is not None:
            yield from self._read(weight, sources)
            return
        key = linear, *(self._stored(f"{source}.weight") for source in sources)
        if key not in self._experts:
            self._experts[key] = weight, tuple(self._read(weight, sources))
        first, holdings = self._experts[key]
        yield from (one._replace(name=weight.name + one.name.removeprefix(first.name)) for one in holdings)

    def _read(self, weight: Matrix, sources: list[str]) -> Iterator[Holding]:
        read = sum(map(self._file_bytes, sources))
        stacked = weight.expert is not None
        matrix = self._matrix(
            weight.part,
            weight.linear,
            weight.path,
            rounded=weight.quantized,
            stacked=stacked,
            wide=0 if self.to.tiling is None else weight.wide_rows,
        )
        yield from (one._replace(read=read) for one in matrix)

    def _head_matrices(self, weight: HeadMatrices) -> Iterator[Holding]:
        """Yield the matrices of the heads: one tensor, or a packed one for each head and product."""
        part, source, to = weight.attention, weight.name, self.to
        heads, nope, value, rank = self._share(part.heads), part.qk_nope_head_dim, part.v_head_dim, part.kv_lora_rank
        restoring = RESTORING_BYTES * heads * (nope + value) * rank if self._restored(source) else 0
        read = self._file_bytes(source)
        if to.tiling is None:
            shape = heads, nope + value, rank, to.element_bytes
            yield Holding("attention", source, to.dtype, shape, temporary=restoring, read=read)
            return
        stored = self._stored_type([source])
        whole = heads * (nope + value) * rank * ELEMENT_BYTES[stored] + restoring
        for name, outputs, inputs in (("keys", rank, nope), ("values", value, rank)):
            factors, what = self._packed_factors(outputs, inputs, stored, exact=True)
            temporary = whole + 3 * math.prod(factors)
            yield Holding("attention", f"{source} ({name})", what, (heads, *factors), temporary=temporary, read=read)

    def _block_matrices(self, weight: BlockMatrices) -> Holding:
        to, heads, size = self.to, self._share(weight.heads), weight.size
        if to.tiling is None:
            return Holding("recurrent", weight.name, to.dtype, (heads, size, size, to.element_bytes))
        stored = self._stored(weight.name)
        factors, what = self._packed_factors(size, size, stored, exact=True)
        temporary = heads * size**2 * ELEMENT_BYTES[stored] + 3 * math.prod(factors)
        return Holding("recurrent", weight.name, what, (heads, *factors), temporary=temporary)

    def _file_bytes(self, path: str) -> int:
        """Return the size of a projection's matrix in the checkpoint's files, without scales and zero points."""
        format = None if self.quantization is None else self.quantization.formats.get(path)
        info = self.tensors.get(f"{path}.{'weight' if format is None else format.matrix}")
        return 0 if info is None else info.bytes

    def _matrix(
        self, part: Part, linear: Linear, path: str, *, rounded: bool, stacked: bool, wide: int
    ) -> Iterator[Holding]:
        """Yield one matrix. stacked: of a routed expert, which is part of a stacked tensor on a GPU. wide: last outputs
        that stay in bfloat16 if the others are quantized."""
        to, cut = self.to, linear.split == "rows"
        rows = sum((self._share(one.units) if cut else one.units) * one.width for one in linear.rows)
        inputs = self._share(linear.inputs) if linear.split == "inputs" else linear.inputs
        names = list(dict.fromkeys(one.source for one in linear.rows))
        sources, name = [join(path, one) for one in names], join(path, "+".join(names))
        role: Role = "expert" if stacked else "projection" if rounded else "exact"
        native = self._native_of(sources, role)
        restoring = RESTORING_BYTES * rows * inputs if any(map(self._restored, sources)) else 0
        format = LOAD_FORMATS.get(to.bits) if rounded else None
        if format is not None and role not in format.roles(to.executor):
            format = None
        if isinstance(native, Segmented):
            yield from self._segments(part, path, linear, inputs)
        elif native is not None:
            yield from self._native(part, name, native, sources, rows, inputs, tuple(self._places(linear)))
        elif format is not None:
            yield from self._quantized(part, name, to.bits, rows - wide, inputs, self._stored_type(sources), restoring)
            if wide:
                yield from self._packed(part, f"{name} (values)", wide, inputs, "BF16", rows * inputs * 2 + restoring)
        elif to.tiling is None:
            transposed = rows * inputs * 4 if to.device == "cpu" and to.dtype == "float32" else 0
            factors = rows, inputs, to.element_bytes
            yield Holding(part, name, to.dtype, factors, temporary=transposed + restoring)
        else:
            stored = self._stored_type(sources)
            yield from self._packed(part, name, rows, inputs, stored, restoring, exact=not rounded)
        if linear.bias:
            yield Holding(part, f"{name} (bias)", to.dtype, (rows, to.element_bytes))

    def _segments(self, part: Part, path: str, linear: Linear, inputs: int) -> Iterator[Holding]:
        """Yield the segments of a matrix whose sources have several products."""
        cut, pieces = linear.split == "rows", linear.rows
        natives = [self._native_of([join(path, one.source)], "projection") for one in pieces]
        for run in runs([one for one in natives if one is not None]):
            names = list(dict.fromkeys(one.source for one in pieces[run]))
            sources = [join(path, one) for one in names]
            native = self._native_of(sources, "projection")
            assert native is not None, "segments have products"
            rows = sum((self._share(one.units) if cut else one.units) * one.width for one in pieces[run])
            yield from self._native(part, join(path, "+".join(names)), native, sources, rows, inputs, ())

    def _places(self, linear: Linear) -> Iterator[tuple[int, int]]:
        """Yield the start of each piece of a rank's matrix, in its source and in the matrix."""
        at = 0
        for piece in linear.rows:
            first, units = (0, piece.units)
            if linear.split == "rows":
                first, units = share_of(piece.units, self.to.rank, self.to.ranks) or (0, piece.units)
            for start, rows in row_runs(piece, first, units):
                yield start, at
                at += rows

    def _quantized(
        self, part: Part, name: str, bits: WeightBits, rows: int, inputs: int, stored: str, restoring: int = 0
    ) -> Iterator[Holding]:
        """Yield a matrix that is quantized at load time."""
        format, width = LOAD_FORMATS[bits], 0 if self.to.tiling is None else self.to.tiling.width
        native = format.native(self.to.group or quantization_group(bits, self.model))
        temporary = format.loading_bytes(rows, inputs, ELEMENT_BYTES.get(stored, 4)) + restoring
        for piece in native.pieces(rows, inputs, width, SCALE_SIZE, ()):
            yield Holding(part, name + piece.suffix, piece.what, piece.factors, temporary=temporary)
            temporary = 0

    def _packed(
        self, part: Part, name: str, rows: int, inputs: int, stored: str, restoring: int = 0, *, exact: bool = False
    ) -> Iterator[Holding]:
        """Yield a packed matrix that is not quantized. exact: it is exempt from bf16 arithmetic."""
        factors, what = self._packed_factors(rows, inputs, stored, exact=exact)
        yield Holding(part, name, what, factors, temporary=3 * math.prod(factors) + restoring)

    def _packed_factors(self, rows: int, inputs: int, stored: str, *, exact: bool) -> tuple[tuple[int, int, int], str]:
        """Return the size of a packed matrix that is not quantized, as factors, and its type."""
        assert self.to.tiling is not None, "only compiled kernels pack"
        tiling = self.to.tiling
        pairs = tiling.bf16 and not exact
        if stored == "BF16" or pairs:
            side, word = (16, 32) if tiling.matrix or pairs else (2 * tiling.width, 1)
            return (_up(rows, side), _up(inputs, word), 2), "bfloat16"
        return (_up(rows, 2 * tiling.width), inputs, 4), "float32"

    def _native(
        self, part: Part, name: str, native: Native, sources: list[str], rows: int, inputs: int, places: Places
    ) -> Iterator[Holding]:
        """Yield a matrix of the checkpoint's own numbers. places: start of each piece, in its source and in the
        matrix."""
        width = 0 if self.to.tiling is None else self.to.tiling.width
        for piece in native.pieces(rows, inputs, width, self._scale_bytes(sources), places):
            yield Holding(part, name + piece.suffix, piece.what, piece.factors, temporary=piece.temporary)

    # Types in the checkpoint

    def _stored(self, name: str) -> str:
        info = self.tensors.get(name)
        return "F32" if info is None or info.dtype not in ELEMENT_BYTES else info.dtype

    def _stored_type(self, sources: list[str]) -> str:
        """Return the type in which the checkpoint stores all of these weights; F32 if they differ or are
        dequantized."""
        kinds = {"F32" if self._restored(source) else self._stored(f"{source}.weight") for source in sources}
        return kinds.pop() if len(kinds) == 1 else "F32"

    def _restored(self, path: str) -> bool:
        """Return whether a weight is dequantized when it is read."""
        return self.quantization is not None and self.quantization.restores(path)

    def _native_of(self, sources: list[str], role: Role) -> Native | None:
        """Return the executor's product for a matrix of these sources, or None if they are dequantized."""
        native = None if self.quantization is None else self.quantization.native(tuple(sources), self.to.executor)
        return None if native is None or role not in native.roles(self.to.executor) else native

    def _scale_bytes(self, sources: list[str]) -> int:
        """Return the size of a group's scale in the type that all sources share, else in float32."""
        kinds = set()
        for source in sources:
            format = None if self.quantization is None else self.quantization.formats.get(source)
            info = self.tensors.get(f"{source}.{format.scale}") if format is not None and format.scale else None
            kept = "" if format is None else format.scale_type
            kinds.add(kept or ("F16" if info is None else info.dtype))
        return ELEMENT_BYTES[kinds.pop()] if len(kinds) == 1 else 4

    def _share(self, units: int) -> int:
        found = share_of(units, self.to.rank, self.to.ranks)
        if found is None:
            raise ValueError(f"{self.to.ranks} ranks cannot share {units}")
        return found[1]


RESTORING_BYTES = 16  # per element: numbers, scales and zero points in float32, and their product


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _spelled(header: str) -> str:
    return {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}[header]
