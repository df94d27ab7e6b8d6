"""Token embedding and logits. Ranks share the vocabulary; where the head is tied, both use the same rows."""

import torch
from torch import Tensor

from engine.distributed.world import World
from engine.layers.linear import Read
from engine.models.parts import Model
from engine.models.sources import join
from kernels.embedding import embedding
from kernels.linear import linear, pack


class Vocabulary:
    """Rows [first, last) of the embedding and of the head.

    On a CPU the embedding stays a view of the checkpoint file, in its type: it is looked up, never multiplied, and so a
    tied head can be packed for products without a second copy of the largest matrix in memory.
    """

    table: Tensor  # [rows, hidden]
    head: Tensor  # [rows, hidden], packed
    bias: Tensor | None = None

    def __init__(self, model: Model, world: World) -> None:
        self.part, self.out, self.world = model.embed, model.head, world
        self.name = f"{join(model.root, model.embed.name)}.weight"
        self.first = world.rank * self.part.vocab // world.size
        self.last = (world.rank + 1) * self.part.vocab // world.size
        self.most = -(-self.part.vocab // world.size)

    def load(self, read: Read, dtype: torch.dtype, device: torch.device) -> int:
        mine = slice(self.first, self.last)
        rows = read(self.name)[mine]
        self.table = rows if device.type == "cpu" else rows.to(device, dtype)
        held = 0 if device.type == "cpu" else self.table.nbytes
        source = self.table if self.out.tied else read(f"{self.out.name}.weight")[mine]
        self.head = pack(source.to(device, dtype))
        if self.out.bias:
            self.bias = read(f"{self.out.name}.bias")[mine].to(device, dtype)
        shared = self.out.tied and device.type != "cpu"
        return held + (0 if shared else source.shape.numel() * dtype.itemsize)

    def embed(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """[tokens] → [tokens, hidden]."""
        if self.world.size == 1:
            return embedding(ids, self.table, dtype, self.part.scale)
        mine = (ids >= self.first) & (ids < self.last)
        rows = embedding(torch.where(mine, ids - self.first, 0), self.table, dtype, self.part.scale)
        return self.world.all_reduce(rows.masked_fill_(~mine.unsqueeze(1), 0))

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] → [rows, vocab] fp32."""
        y = linear(hidden, self.head, self.bias)
        if self.world.size > 1:
            y = self._joined(y)
        y = y.float()
        if self.out.scale != 1.0:
            y = y.mul_(self.out.scale)
        cap = self.out.softcap
        return y if cap is None else y.div_(cap).tanh_().mul_(cap)

    def _joined(self, y: Tensor) -> Tensor:
        """Columns of all ranks. Shares that differ by a row are padded to be gathered."""
        padded = torch.nn.functional.pad(y, (0, self.most - y.shape[1]))
        size, vocab = self.world.size, self.part.vocab
        widths = [(rank + 1) * vocab // size - rank * vocab // size for rank in range(size)]
        return torch.cat(
            [piece[:, :width] for piece, width in zip(self.world.all_gather(padded), widths, strict=True)], 1
        )
