"""Token embedding and logits. Ranks share the vocabulary; a tied head uses the same rows as the embedding."""

from dataclasses import replace

import torch
from torch import Tensor

from engine.api.errors import ConfigError
from engine.distributed.world import World
from engine.layers.linear import Read, Target
from engine.models.parts import Embedding, Head, LayerInputs, Lookup, Model
from engine.models.sources import join
from engine.weights.slot import Slot, Slots
from kernels.block_weights import PlaneWeight, SegmentedWeight
from kernels.cpu.packing import Packed, Segments, restore_blocks
from kernels.embedding import embedding, scaled
from kernels.fp8 import Fp8Weight
from kernels.ggml_blocks import BlockWeight, to_int6
from kernels.ggml_layout import LAYOUTS
from kernels.integers import IntegerWeight


class Vocabulary:
    """Rows [first, last) of the embedding and of the head.

    On a CPU the embedding stays a view of the checkpoint file, in the stored type: it is only looked up, so a tied head
    can be packed without a second copy of the largest matrix in memory. Compiled kernels look up the rows of all ranks,
    which saves an all-reduce.

    A head for drafts shares the tables that belong to the model that it drafts for.
    """

    table: Tensor  # [rows, hidden], or the bytes of `blocks`
    blocks: BlockWeight | None = None  # the table in blocks, of the checkpoint or quantized at load
    positions: Tensor | None = None  # [positions, hidden]
    segments: Tensor | None = None  # [segments, hidden]
    head: Tensor | Packed | IntegerWeight | PlaneWeight | None = None  # [rows, hidden], packed; None: a pooling model
    target: Target  # for which the head was packed
    bias: Tensor | None = None

    def __init__(self, model: Model, world: World, shared: "Vocabulary | None" = None) -> None:
        """shared: loaded tables of the model that this one drafts for; only for a single rank."""
        self.part, self.out, self.world = model.embed, model.head, world
        self.shared_table = shared if model.shares_embedding else None
        self.shared_head = shared if model.shares_head else None
        self.root, self.name = model.root, f"{join(model.root, model.embed.name)}.weight"
        self.first = world.rank * self.part.vocab // world.size
        self.last = (world.rank + 1) * self.part.vocab // world.size
        self.most = -(-self.part.vocab // world.size)

    def load(self, read: Read, target: Target) -> None:
        self.target = target
        if self.shared_table is not None:
            self.table, self.blocks = self.shared_table.table, self.shared_table.blocks
            self._load_own_head(read)
            return
        mine, on_cpu = slice(self.first, self.last), target.device.type == "cpu"
        path = self.name.removesuffix(".weight")
        looked_up = slice(None) if target.team is not None else mine
        if target.quantized is not None and not self.part.is_sum:
            self.blocks = target.quantized.block_table(path, target.executor)
        if self.blocks is not None:
            self._keep(self.blocks, looked_up, target)
            self._load_added(read, target)
            return
        rows = read(self.name)[looked_up]
        if target.embedding == "int6":
            _check_blocks(self.part.row_width)
            self._keep(to_int6(rows), slice(None), target)
            self._load_added(read, target)
            return
        # Looked up in the stored type, except float64, which no kernel reads.
        restored = target.quantized is not None and target.quantized.restores(path)
        in_file = on_cpu and rows.dtype != torch.float64 and not restored
        self.table = rows if in_file else rows.to(target.device, target.dtype)
        self._load_added(read, target)

    def _keep(self, blocks: BlockWeight, rows: slice, target: Target) -> None:
        """Keep these rows, and no memory of the others or of the host."""
        self.table = blocks.blocks[rows].to(target.device)
        self.blocks = replace(blocks, blocks=self.table)

    def _load_added(self, read: Read, target: Target) -> None:
        """Load the tables of positions and segments, and the head."""
        added = self.part.positions, self.part.segments
        self.positions, self.segments = (added_rows(read, self.root, one, self.part.hidden, target) for one in added)
        self._load_own_head(read)

    @property
    def num_logits(self) -> int:
        """Number of logits of a row, of all ranks."""
        return (0 if self.out is None else self.out.rows) or self.part.vocab

    def _load_own_head(self, read: Read) -> None:
        if self.shared_head is not None:
            self.head, self.bias = self.shared_head.head, self.shared_head.bias
        elif self.out is not None:
            self._load_head(read, self.out)

    def _load_head(self, read: Read, out: Head) -> None:
        first, last = (0, out.rows) if out.rows else (self.first, self.last)
        target, mine = self.target, slice(first, last)
        path = self.name.removesuffix(".weight")
        rounded = replace(target, bits=target.head, group=target.head_group)
        count = last - first
        share = Slot(path if out.tied else out.name, first, count, 0)
        matrix = Slots((share,), count, 0, self.part.row_width)
        packed = None if out.unit_rows else target.native("", matrix, "head")
        if packed is None:
            source = self._tied_rows(read, mine) if out.tied else read(f"{out.name}.weight")[mine]
            source = torch.nn.functional.normalize(source.float()).to(source.dtype) if out.unit_rows else source
            packed = rounded.pack(out.name, source)
        assert not isinstance(packed, Fp8Weight | Segments | SegmentedWeight), (
            "the head has one source, and is never in fp8"
        )
        self.head = packed
        if out.bias or out.added:
            row = read(out.added or f"{out.name}.bias").flatten()
            self.bias = row[mine].to(target.device, target.dtype)

    def _tied_rows(self, read: Read, mine: slice) -> Tensor:
        """Return the rows of the embedding for the head, which are not rounded as those for looking up."""
        if self.blocks is not None:
            return read(self.name)[mine]
        return self.table[mine] if self.target.team is not None else self.table

    def embed(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """[tokens] → [tokens, hidden]."""
        if self.world.size == 1 or self.target.team is not None:  # the table has all rows
            return self._rows(ids, dtype)
        mine = (ids >= self.first) & (ids < self.last)
        rows = self._rows(torch.where(mine, ids - self.first, 0), dtype)
        return self.world.all_reduce(rows.masked_fill_(~mine.unsqueeze(1), 0))

    def _rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return these rows of the table, times the scale."""
        if self.blocks is None:
            return embedding(ids, self.table, dtype, self.part.scale)
        rows = replace(self.blocks, blocks=self.table[ids])
        team = self.target.team
        restored = rows.restored() if team is None else restore_blocks(rows, team.variant)
        return scaled(restored.to(dtype), self.part.scale)

    def summed(self, ids: Tensor, positions: Tensor, segments: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return the sum of token, position and segment rows, [tokens, hidden]. Arguments: [tokens] integers."""
        x = self.embed(ids, dtype)
        if not self.part.is_sum:
            return x
        if self.position_rows is not None:
            x = x.add_(embedding(positions, self.position_rows, dtype))
        if self.segments is not None:
            x = x.add_(embedding(torch.zeros_like(ids) if segments is None else segments, self.segments, dtype))
        return x

    @property
    def position_rows(self) -> Tensor | None:
        """[positions, hidden], starting with the row of position 0."""
        part = self.part.positions
        return None if self.positions is None or part is None else self.positions[part.offset :]

    def position(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the rows of positions alone, [tokens, hidden]."""
        assert self.position_rows is not None, "the model has rows of positions"
        return embedding(positions, self.position_rows, dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] → [rows, vocab] fp32."""
        assert self.out is not None, "a pooling model has no logits"
        y = self.products(hidden)
        if self.out.scale != 1.0:
            y = y.mul_(self.out.scale)
        cap = self.out.softcap
        return y if cap is None else y.div_(cap).tanh_().mul_(cap)

    def products(self, hidden: Tensor) -> Tensor:
        """Return the logits before they are scaled and capped."""
        return self.joined(self.own_products(hidden))

    def own_products(self, hidden: Tensor) -> Tensor:
        """Return the columns of `products` that this rank computes, from `first` on."""
        assert isinstance(self.head, Tensor | IntegerWeight | PlaneWeight), (
            "a compiled model multiplies by packed weights itself"
        )
        return self.target.multiply_fp32(hidden, self.head, self.bias)

    def joined(self, y: Tensor) -> Tensor:
        """Gather the columns of all ranks. Shares may differ by one column, so they are padded."""
        if self.world.size == 1:
            return y
        padded = torch.nn.functional.pad(y, (0, self.most - y.shape[1]))
        size, vocab = self.world.size, self.part.vocab
        widths = [(rank + 1) * vocab // size - rank * vocab // size for rank in range(size)]
        return torch.cat(
            [piece[:, :width] for piece, width in zip(self.world.all_gather(padded), widths, strict=True)], 1
        )


def _check_blocks(width: int) -> None:
    """Raise ConfigError if blocks cannot have rows of this width."""
    size = LAYOUTS["INT6"].inputs
    if width % size:
        raise ConfigError(f"quantization.embedding=int6: rows of {width} numbers; must be a multiple of {size}")


class EncoderEmbedding:
    """Embedding of the encoder of an encoder-decoder model: the decoder's token table with separate positions and
    norm."""

    positions: Tensor | None = None  # [positions, hidden]
    segments: Tensor | None = None  # encoders of encoder-decoders have none

    def __init__(self, part: Embedding, root: str, vocabulary: Vocabulary) -> None:
        self.part, self.root, self.vocabulary = part, root, vocabulary

    def load(self, read: Read, target: Target) -> None:
        self.positions = added_rows(read, self.root, self.part.positions, self.part.hidden, target)

    @property
    def position_rows(self) -> Tensor | None:
        """[positions, hidden], starting with the row of position 0."""
        part = self.part.positions
        return None if self.positions is None or part is None else self.positions[part.offset :]

    def summed(self, ids: Tensor, positions: Tensor, segments: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return the sum of the rows of tokens and positions, [tokens, hidden]. Arguments: [tokens] integers."""
        x = self.vocabulary.embed(ids, dtype)
        if self.position_rows is not None:
            x = x.add_(embedding(positions, self.position_rows, dtype))
        return x


class TokenRows:
    """Rows of tokens with a vector for each layer. On a CPU they stay in the mapped file."""

    table: Tensor  # [vocab, layers · width]

    def __init__(self, part: LayerInputs, path: str) -> None:
        self.part, self.path = part, path

    def load(self, read: Read, target: Target) -> None:
        rows = read(f"{self.path}.weight")
        in_file = target.device.type == "cpu" and rows.dtype != torch.float64
        self.table = rows if in_file else rows.to(target.device, target.dtype)

    def look_up(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """[tokens] → [tokens, layers · width]. Tokens that the table lacks have its first row."""
        known = torch.where(ids < self.part.vocab, ids, 0)
        return embedding(known, self.table, dtype, self.part.scale)


def added_rows(read: Read, root: str, part: Lookup | None, hidden: int, target: Target) -> Tensor | None:
    """Return a position or segment table, [rows, hidden]: computed, or from the checkpoint (mapped on a CPU)."""
    if part is None:
        return None
    if part.period is not None:
        return sines(part.count, hidden, part.period).to(target.device, target.dtype)
    rows, on_cpu = read(f"{join(root, part.name)}.weight"), target.device.type == "cpu"
    in_file = on_cpu and rows.dtype != torch.float64
    return rows if in_file else rows.to(target.device, target.dtype)


def sines(count: int, hidden: int, period: int) -> Tensor:
    """[count, hidden] fp64: see `engine.models.parts.Lookup`."""
    half = hidden // 2
    angles = torch.arange(count, dtype=torch.float64)[:, None] * 10000.0 ** (
        -torch.arange(half, dtype=torch.float64) / period
    )
    return torch.cat((angles.sin(), angles.cos()), 1)
