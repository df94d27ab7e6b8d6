"""A runnable tower: tensors of images, videos or audio in, embeddings for the text model out."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.api.media import BESIDE_IMAGES
from engine.distributed.world import World
from engine.layers.audio import AudioInput, audio_layer
from engine.layers.linear import Read, Target
from engine.layers.loaded import Loadable
from engine.layers.patches import (
    VIDEO,
    Grid,
    averaged,
    completed_positions,
    grid_angles,
    grid_positions,
    in_windows,
    joined,
    masked_rows,
    pixel_rows,
    position_rows,
    unmasked,
    windows,
)
from engine.layers.querying import query_counts, squares
from engine.layers.step import NO_ROWS, TowerRows
from engine.layers.tiles import arranged, joined_tiles, pooled_frames, tile_layout
from engine.layers.tower_executors import executor
from engine.layers.tower_triton import TritonExecutor
from engine.lowering.measures import attends
from engine.lowering.program import Program
from engine.lowering.querying import QueryProgram
from engine.lowering.tower import ProjectorProgram, lower_tower
from engine.models.media import (
    AveragePool,
    AverageRows,
    ClassRow,
    JoinRows,
    JoinTiles,
    Media,
    Merge,
    Patches,
    Querying,
    Resampler,
    Tiles,
    WindowMerge,
    media_tensors,
    pooling_heads,
    query_table,
    tile_vectors,
)
from engine.models.parts import Rope
from engine.models.sources import join


@dataclass(frozen=True)
class _Read:
    """An item's patches, or the embeddings of its spectrogram."""

    rows: Tensor
    grids: tuple[Grid, ...]
    kept: tuple[Grid, ...] = ()  # grids of unmasked patches, if the item has masks
    layout: tuple[int, int] = (0, 0)  # rows and columns of its tiles, if it has masks


class TowerModel:
    """A tower and its projectors on one rank. Immutable after `load`."""

    audio: AudioInput | None = None
    positions: Tensor | None = None  # [rows, hidden]
    class_token: Tensor | None = None  # [hidden]
    newline: Tensor | None = None  # [hidden of the text model]
    standard: tuple[Tensor, ...] = ()  # `Tower.standard`, [hidden] each
    queries: dict[Querying, Tensor]  # learned queries of each step that has some, [queries, hidden]
    ends: dict[JoinTiles, tuple[Tensor, Tensor]]  # the vectors of each step that joins tiles, [width] each

    def __init__(self, media: Media, world: World, target: Target, *, triton: bool = False) -> None:
        """target: where the weights are kept; they are not quantized. triton: use Triton kernels. Raises ConfigError if
        the world's ranks cannot divide the heads."""
        target = replace(target, bits="stored", known=None)
        self.media, self.target = media, target
        self.program = lower_tower(media, world.size)
        self.tensors = media_tensors(media)
        if not isinstance(media.tower.patches, Patches):
            self.audio = audio_layer(media.tower.patches, media.tower.root)
        self.ends = {}
        self.queries = {}
        masked = self.program.tower if media.tower.completed else None
        self._executors = {
            id(one): executor(one, world, target, masked=one is masked, triton=triton) for one in self.program.programs
        }

    @property
    def layers(self) -> Iterator[Loadable]:
        """Yield the loaded layers of all programs."""
        for one in self._executors.values():
            yield from one.weights.by_name.values()

    @torch.inference_mode()
    def load(self, read: Read) -> None:
        """Load every weight. read: returns a tensor of the checkpoint by its name."""
        tower = self.media.tower

        def stored(name: str) -> Tensor:
            found = self.tensors[name]
            tensor = read(found.name)
            if found.scale:
                factors = read(found.scale).float()
                tensor = tensor.float() * (factors if tensor.ndim == 1 else factors.unsqueeze(1))
            if found.added:
                tensor = tensor.float() + torch.cat([read(one.name).float().flatten() for one in found.added])
            if found.half:
                heads = tensor.unflatten(0, (-1, 2, 2, found.half // 2))
                return heads.transpose(1, 2).flatten(0, 3)
            if found.transposed:
                return tensor.T
            return tensor.flatten(1) if tensor.ndim > 2 else tensor  # of a convolution

        def kept(name: str) -> Tensor:
            return stored(name).to(self.target.device, self.target.dtype, copy=True)

        if self.audio is not None:
            self.audio.load(lambda name: read(self.tensors[name].name), self.target)
        if tower.positions is not None:
            self.positions = kept(join(tower.root, tower.positions.name)).view(-1, tower.hidden)
        if tower.class_token:
            self.class_token = kept(join(tower.root, tower.class_token)).flatten()
        self.standard = tuple(kept(join(tower.root, name)) for name in tower.standard or ())
        for one in self._executors.values():
            one.load(stored)
        tables = ((part, query_table(part, path)) for part, path in pooling_heads(self.media))
        self.queries = {part: kept(name).view(-1, part.hidden) for part, name in tables if name}
        self.ends = {
            step: (kept(join(path, step.row_end)).flatten(), kept(join(path, step.between)).flatten())
            for step, path in tile_vectors(self.media)
        }
        if self.media.tiles is not None:
            self.newline = kept(self.media.tiles.newline)

    def warm(self) -> None:
        """Compile Triton's kernels of all programs."""
        for one in self._executors.values():
            if isinstance(one, TritonExecutor):
                one.warm()

    @torch.inference_mode()
    def encode(self, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """Return the embeddings of each item, [tokens, width]. items: tensors by the names of transformers' processors.
        Raises ValueError for tensors that the tower does not read."""
        if not items:
            return []
        read = [self._rows(one) for one in items]
        grids = [one.grids for one in read]
        every = tuple(grid for of in grids for grid in of)
        pixels = torch.cat([one.rows for one in read]).to(self.target.device, self.target.dtype)
        features = self._features(pixels, every, tuple(grid for one in read for grid in one.kept))
        layouts = [one.layout for one in read]
        parts = [self._projected(one, features, every, layouts) for one in self.program.projectors]
        sizes = parts[0][1]
        counts = iter(self._tokens(grid) for grid in sizes)
        lengths = [sum(next(counts) for _ in (of[:1] if self.ends else of)) for of in grids]
        if self.media.beside_images:
            both = zip(*(torch.split(part, lengths) for part, _ in parts), strict=True)
            return [two[BESIDE_IMAGES in item] for two, item in zip(both, items, strict=True)]
        whole = torch.split(torch.cat([part for part, _ in parts], 1), lengths)
        if self.media.tiles is None:
            return list(whole)
        sides = iter(sizes)
        return [
            self._arranged(self.media.tiles, one, [next(sides) for _ in of], item)
            for one, of, item in zip(whole, grids, items, strict=True)
        ]

    def _arranged(self, tiles: Tiles, x: Tensor, grids: Sequence[Grid], item: Mapping[str, Tensor]) -> Tensor:
        """Return the embeddings of an image of tiles, or of the frames of a video."""
        assert self.newline is not None, "tiles have a vector at the end of a row"
        if VIDEO in item:
            return pooled_frames(x, grids, self.newline)
        return arranged(tiles, x, grids, item["image_sizes"], self.newline)

    def _rows(self, item: Mapping[str, Tensor]) -> "_Read":
        """Return the pixels of an item's patches, or the embeddings of its spectrogram, and its grids."""
        tower = self.media.tower
        if self.audio is not None:
            return _Read(*self.audio.rows(item, self.target.dtype))
        if tower.completed:
            rows, grids, kept = masked_rows(tower, item)
            return _Read(rows, grids, kept, tile_layout(item, len(grids)))
        patches = tower.patches
        assert isinstance(patches, Patches), "other towers have a layer for audio"
        rows, grids = pixel_rows(tower, item, cropped=self.media.tiles is None)
        return _Read(rows if patches.factor == 1.0 else rows * patches.factor + patches.offset, grids)

    def _tokens(self, grid: Grid) -> int:
        """Return the number of embeddings of a grid."""
        return grid[0] * grid[1] * grid[2] + (grid[0] if self._adds_class else 0)

    @property
    def _adds_class(self) -> bool:
        """Embeddings of a grid include that of the class token."""
        return self.media.tower.keeps_class and not self.media.is_vector and not pooling_heads(self.media)

    def _features(self, pixels: Tensor, grids: Sequence[Grid], kept: Sequence[Grid]) -> Tensor:
        """Return the features of the patches, [patches, width of the features]. kept: grids of unmasked patches;
        empty without masks."""
        tower, device = self.media.tower, self.target.device
        patches = self.program.patches
        x = pixels if patches is None else self._executors[id(patches)].run(pixels)
        count = tuple(high * wide for frames, high, wide in grids for _ in range(frames))
        keys: Tensor | None = None
        if kept:
            assert tower.positions is not None, "towers with masks have a table of positions"
            pairs = list(zip(grids, kept, strict=True))
            table = self._patch_table()
            x = x + torch.cat([completed_positions(tower.positions, table, *both) for both in pairs])
            keys = torch.cat([unmasked(*both) for both in pairs]).to(device)
        elif tower.positions is not None:
            x = x + torch.cat([position_rows(tower.positions, self._patch_table(), one, tower.side) for one in grids])
        if self.class_token is not None:
            x, count = self._with_class(x, count), tuple(one + 1 for one in count)
        angles: dict[Rope, tuple[Tensor, Tensor]] = {}
        order: Tensor | None = None
        counts: tuple[int, ...] = ()
        if tower.rope is not None:
            places = [grid_positions(one, tower.side) for one in grids]
            if self.class_token is not None:
                places = [place for one in places for place in self._with_origin(one, tower.rope.first)]
            angles[tower.rope.rope] = grid_angles(tower.rope, torch.cat(places).to(device))
        padded: Tensor | None = None
        if tower.clip_window:
            x, count, padded = in_windows(x, count, tower.clip_window)
        if tower.window:
            order, counts = self._windows(grids)
            x = x[order]
            angles = {rope: (cos[order], sin[order]) for rope, (cos, sin) in angles.items()}
        features = self._executors[id(self.program.tower)].run(x, TowerRows(count, counts, angles, keys=keys))
        if order is not None:
            features = features[order.argsort()]
        if padded is not None:
            features = features[~padded]
        if self.standard:
            bias, scale = (one.float() for one in self.standard)
            features = ((features.float() * tower.factor - bias) * scale).to(features.dtype)
        return features if self.class_token is None or tower.keeps_class else self._without_class(features, count)

    def _patch_table(self) -> Tensor:
        """Return the rows of the table that are for patches."""
        part = self.media.tower.positions
        assert part is not None and self.positions is not None, "this tower has a table of positions"
        if not part.class_row:
            return self.positions
        return self.positions[:-1] if self.media.tower.class_last else self.positions[1:]

    def _with_class(self, x: Tensor, count: Sequence[int]) -> Tensor:
        """Insert the class token into each frame."""
        tower, token = self.media.tower, self.class_token
        assert token is not None, "this tower has a class token"
        if tower.positions is not None and tower.positions.class_row:
            assert self.positions is not None, "this tower has a table of positions"
            token = token + self.positions[-1 if tower.class_last else 0]
        row = token.unsqueeze(0)
        ends = ((piece, row) if tower.class_last else (row, piece) for piece in torch.split(x, list(count)))
        return torch.cat([piece for both in ends for piece in both])

    def _with_origin(self, places: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Return the places of an image's patches, and that of the class token, which does not rotate, in order."""
        origin = torch.full((1, 2), -first)
        return (places, origin) if self.media.tower.class_last else (origin, places)

    def _without_class(self, x: Tensor, count: Sequence[int]) -> Tensor:
        kept = slice(None, -1) if self.media.tower.class_last else slice(1, None)
        return torch.cat([piece[kept] for piece in torch.split(x, list(count))])

    def _windows(self, grids: Sequence[Grid]) -> tuple[Tensor, tuple[int, ...]]:
        """Return the order of all patches by window, and the patches of each window."""
        tower, orders, counts, first = self.media.tower, list[Tensor](), list[int](), 0
        for grid in grids:
            order, own = windows(grid, tower.side, tower.window)
            orders.append(order + first)
            counts += own
            first += len(order)
        return torch.cat(orders).to(self.target.device), tuple(counts)

    def _queried(self, stage: QueryProgram, x: Tensor, grids: tuple[Grid, ...]) -> tuple[Tensor, tuple[Grid, ...]]:
        """Return the rows of learned queries of each frame, or of merged squares."""
        context, program, part = self._executors[id(stage.context)], self._executors[id(stage.program)], stage.part
        if isinstance(part, WindowMerge):
            rows = squares(x, grids, part.side)
            rows = context.run(rows, TowerRows((part.rows,) * (len(rows) // part.rows))).unflatten(0, (-1, part.rows))
            merged = tuple((frames, high // part.side, wide // part.side) for frames, high, wide in grids)
            return program.run(rows.flatten(1)) + rows.mean(1), merged
        counts, more, table = query_counts(part, grids), int(self.media.tower.keeps_class), self.queries[part]
        frames_of = tuple(high * wide + more for frames, high, wide in grids for _ in range(frames))
        queries = torch.cat([table[:number] for number in counts])
        found = program.run(queries, TowerRows(tuple(counts), context=context.run(x), context_rows=frames_of))
        if isinstance(part, Resampler):
            return found, tuple((1, 1, number) for number in counts)
        return found, tuple((frames, 1, counts[0]) for frames, _, _ in grids)

    def _projected(
        self, part: ProjectorProgram, features: Tensor, grids: tuple[Grid, ...], layouts: Sequence[tuple[int, int]]
    ) -> tuple[Tensor, tuple[Grid, ...]]:
        """Return the output of a projector, and the grids of its embeddings. layouts: rows and columns of the tiles of
        each item, if they are joined."""
        x, is_ordered = features[:, part.first : part.first + part.width], self.media.tower.side
        for stage in part.stages:
            match stage:
                case Merge(side=side, by_channel=by_channel):
                    squares, grids = joined(x, grids, side, is_ordered == side)
                    x = (squares.transpose(1, 2) if by_channel else squares).flatten(1)
                case AveragePool(side=side):
                    squares, grids = joined(x, grids, side, is_ordered == side)
                    x = squares.mean(1)
                case AverageRows(count=size):
                    x, grids = averaged(x, grids, size)
                case JoinRows(count=size):
                    x, grids = x.reshape(-1, size * x.shape[1]), tuple((n, 1, rows // size) for n, _, rows in grids)
                case JoinTiles():
                    x, grids = joined_tiles(x, grids, layouts, *self.ends[stage])
                case ClassRow():
                    frames = torch.split(x, [high * wide + 1 for count, high, wide in grids for _ in range(count)])
                    x, grids = torch.stack([frame[0] for frame in frames]), tuple((of[0], 1, 1) for of in grids)
                case QueryProgram():
                    x, grids = self._queried(stage, x, grids)
                case Program():
                    frames_of = tuple(high * wide for count, high, wide in grids for _ in range(count))
                    x = self._executors[id(stage)].run(x, TowerRows(frames_of) if attends(stage.ops) else NO_ROWS)
        return x, grids
