"""The towers of a model: for images and videos, for audio clips, or both. Ranks divide the items of a step (data
parallel): each has the complete towers, computes its items, and gathers the embeddings of all.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.api.media import EMBEDDINGS
from engine.distributed.world import SINGLE, World, least
from engine.layers.audio import SPECTROGRAMS
from engine.layers.linear import Read, Target
from engine.layers.tower import TowerModel
from engine.models.media import Media


class Towers:
    """The towers of a model. Every rank has them completely; ranks divide the items of a step."""

    def __init__(self, media: Media, world: World, target: Target, *, triton: bool = False) -> None:
        """triton: use Triton kernels."""
        self.media = media
        self.towers = tuple(TowerModel(one, SINGLE, target, triton=triton) for one in media.towers)
        self.width, self.world, self.target = media.width, world, target

    def load(self, read: Read) -> None:
        for tower in self.towers:
            tower.load(read)

    def warm(self) -> None:
        """Compile Triton's kernels of all towers."""
        for tower in self.towers:
            tower.warm()

    def encode(self, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """Return the embeddings of each item. All ranks must call this with the same items. Raises ValueError for
        tensors that no tower reads."""
        if self.world.size == 1 or len(items) < 2:
            return self.encode_alone(items)
        return encode_divided(self, items)

    def encode_alone(self, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """Compute all items on this rank. Embeddings of audio are padded with zeros to the width of those of images,
        whose further columns the text model adds to its hidden states. Raises ValueError as `encode`."""
        chosen = [self._tower(item) for item in items]
        found = {
            tower: iter(tower.encode([item for item, own in zip(items, chosen, strict=True) if own is tower]))
            for tower in self.towers
        }
        embeddings = (
            self._given(item[EMBEDDINGS]) if tower is None else next(found[tower])
            for item, tower in zip(items, chosen, strict=True)
        )
        return [one if one.shape[1] == self.width else pad(one, (0, self.width - one.shape[1])) for one in embeddings]

    def _tower(self, item: Mapping[str, Tensor]) -> TowerModel | None:
        """Return the tower that reads an item, or None if the item has its embeddings. Raises ValueError."""
        if EMBEDDINGS in item:
            return None
        hears = any(name in item for name in SPECTROGRAMS) and self.media.audio is not None
        own = self.media.audio if hears else self.media
        tower = next((one for one in self.towers if one.media is own), None)
        if tower is None:
            raise ValueError("an item of media has no embeddings, and its tower is not loaded")
        return tower

    def _given(self, embeddings: Tensor) -> Tensor:
        """Return the embeddings of an item that has them. Raises ValueError for another width, and for numbers that the
        type of the activations does not have."""
        if embeddings.ndim != 2 or embeddings.shape[1] != self.width:
            raise ValueError(f"embeddings have shape {list(embeddings.shape)}; a row must have {self.width} numbers")
        found = embeddings.to(self.target.device, self.target.dtype)
        if not found.isfinite().all():
            raise ValueError(f"embeddings have numbers beyond the range of {str(found.dtype).removeprefix('torch.')}")
        return found


def encode_divided(towers: Towers, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
    """Compute a part of the items on each rank, and return the embeddings of all items. Raises ValueError on all ranks
    for tensors that no tower reads."""
    world, device = towers.world, towers.target.device
    owners = divided([sum(tensor.numel() for tensor in item.values()) for item in items], world.size)
    mine = [number for number, owner in enumerate(owners) if owner == world.rank]
    own: list[Tensor] | None
    try:
        own = towers.encode_alone([items[number] for number in mine])
    except ValueError:
        own = None
    if not least(world, int(own is not None), device) or own is None:
        return towers.encode_alone(items)  # raises the error on every rank
    counts = torch.zeros(len(items), dtype=torch.int64, device=device)
    for number, one in zip(mine, own, strict=True):
        counts[number] = len(one)
    sizes = world.all_gather(counts).sum(0).tolist()
    totals = [
        sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(world.size)
    ]
    rows = torch.zeros(max(totals), towers.width, dtype=towers.target.dtype, device=device)
    if own:
        rows[: totals[world.rank]] = torch.cat(own)
    every, begins, found = world.all_gather(rows), [0] * world.size, []
    for size, owner in zip(sizes, owners, strict=True):
        found.append(every[owner, begins[owner] : begins[owner] + size])
        begins[owner] += size
    return found


def divided(costs: Sequence[int], ranks: int) -> list[int]:
    """Return the rank of each item: the most expensive items first, each to the rank with the least cost so far."""
    totals, owners = [0] * ranks, [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda number: -costs[number]):
        owners[number] = totals.index(min(totals))
        totals[owners[number]] += costs[number]
    return owners
