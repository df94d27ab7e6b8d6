"""Declaration of the tower and the projectors that compute embeddings of images and videos, as frozen data independent
of torch.

A tower is an encoder over patches: its blocks are those of text models (`engine.models.parts`), with bidirectional
attention among the patches of a frame. Projectors turn its features into embeddings of the text model's width. Names
are those of the checkpoint.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from engine.models.parts import MLP, Block, Linear, Norm, Rope, Rows
from engine.models.sources import Shapes, branch_sources, join, linear_sources, mlp_linears, norm_sources


@dataclass(frozen=True, kw_only=True)
class Patches:
    """Projection of the pixels of each patch: channel by channel, of each frame by frame, row by row."""

    source: str
    hidden: int
    size: int  # pixels of a side
    channels: int = 3
    frames: int = 1  # consecutive frames in a patch
    bias: bool = True
    flat: bool = False  # `pixel_values` has a row for each patch (Qwen2-VL); else it has images
    convolution: bool = True  # stored as the weight of a convolution

    @property
    def pixels(self) -> int:
        return self.channels * self.frames * self.size**2

    @property
    def linear(self) -> Linear:
        """The projection, which every rank has."""
        rows = (Rows(source=self.source, units=self.hidden),)
        return Linear(rows=rows, inputs=self.pixels, split=None, bias=self.bias)

    @property
    def stored(self) -> tuple[int, ...]:
        """Shape of the weight in the checkpoint."""
        depth = (self.frames,) if self.flat else ()
        inner = (self.channels, *depth, self.size, self.size) if self.convolution else (self.pixels,)
        return self.hidden, *inner


@dataclass(frozen=True, kw_only=True)
class PatchPositions:
    """Learned table for a square grid of patches, whose rows are added to the patches.

    `fit` says how the table fits other grids:

    none      it does not: all images have the size of the table
    corners   bilinear interpolation, with the corners of the grid at the corners of the table (Qwen3-VL)
    bicubic   bicubic interpolation between the centres of patches
    nearest   the row of the table whose share of the side has the patch's begin (Idefics3)
    """

    name: str
    side: int
    fit: Literal["none", "corners", "bicubic", "nearest"] = "none"
    class_row: bool = False  # the table has a row for the class token, in the place of the token
    stored: tuple[int, ...] = ()  # shape in the checkpoint, if it is not [rows, hidden]

    @property
    def rows(self) -> int:
        return self.side**2 + self.class_row


@dataclass(frozen=True, kw_only=True)
class GridRope:
    """Rotary positions of patches. Pair i of a head is rotated by p · theta^-exponents[i], where p is the patch's row
    (axes[i] = 0) or column (axes[i] = 1), counted from `first`."""

    rope: Rope  # of the attention, for its dimensions and pairs
    axes: tuple[int, ...]
    exponents: tuple[float, ...]
    first: int = 0


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor of the checkpoint that layers read under another name, shape or scale."""

    name: str
    shape: tuple[int, ...]
    transposed: bool = False
    scale: str = ""  # name of a vector, by whose elements the rows are multiplied


@dataclass(frozen=True, kw_only=True)
class Tower:
    """features = the outputs of the blocks `taken`, side by side."""

    patches: Patches
    blocks: tuple[Block, ...]
    taken: tuple[int, ...]  # numbers of blocks computed before a feature is taken; `norm` applies to all of them
    layers: str  # path of the blocks
    root: str = ""
    positions: PatchPositions | None = None
    class_token: str = ""  # name of a vector that is a further token
    class_shape: tuple[int, ...] = ()  # its shape in the checkpoint, if it is not [hidden]
    class_last: bool = False  # it follows the patches; else it precedes them
    rope: GridRope | None = None
    before: Norm | None = None  # of the embedded patches
    norm: Norm | None = None
    side: int = 1  # patches are in order of squares of side · side patches
    window: int = 0  # side of the windows of attention in patches; 0: attention is among all patches of a frame
    whole: tuple[int, ...] = ()  # blocks with attention among all patches of a frame, if there are windows
    scales: tuple[tuple[str, str], ...] = ()  # (matrix, vector that multiplies its outputs), names within a block
    keeps_class: bool = False  # features include the class token
    unread: tuple[str, ...] = ()

    @property
    def hidden(self) -> int:
        return self.patches.hidden

    @property
    def width(self) -> int:
        """Columns of the features."""
        return self.hidden * len(self.taken)


@dataclass(frozen=True, kw_only=True)
class Merge:
    """Join the features of squares of side · side patches: those of the first row, then of the next ones."""

    side: int
    by_channel: bool = False  # instead, channel by channel (Mistral 3)


@dataclass(frozen=True, kw_only=True)
class AveragePool:
    """Mean of squares of side · side patches."""

    side: int


@dataclass(frozen=True, kw_only=True)
class Project:
    """y = act(x W^T (+ b))."""

    linear: Linear
    act: str = "none"


Step = Merge | AveragePool | Project | Norm | MLP


@dataclass(frozen=True, kw_only=True)
class Projector:
    """Applies `steps` in order to the features, or to one of them."""

    steps: tuple[Step, ...]
    root: str = ""
    feature: int | None = None  # None: all of them, side by side
    renamed: tuple[tuple[str, StoredTensor], ...] = ()
    """Tensors under other names in the checkpoint, by the names that layers read, both relative to `root`."""


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Embeddings of an image that was cut into tiles: those of the scaled-down image, then those of the tiles in their
    places, without the padding and with `newline` after each row (LLaVA-NeXT)."""

    sizes: tuple[tuple[int, int], ...]  # (height, width) to which images may be padded
    size: int  # pixels of a tile's side
    newline: str  # name of a vector
    width: int  # of the vector
    most: int = 0  # most tiles; beyond, embeddings are interpolated (OneVision); 0: no limit


@dataclass(frozen=True, kw_only=True)
class GridPositions:
    """M-RoPE (arXiv:2409.12191): a token of an item has a position in time, height and width, and each pair of a head
    is rotated by one of them. The next text token continues after the largest position."""

    sections: tuple[int, ...]  # numbers of pairs for time, height and width
    interleaved: bool  # pairs alternate between the three; else they are in three runs
    side: int  # patches of a token's side
    time: Literal["frames", "seconds", "separate"]
    """Position in time of a video's frame: its number; its time in units of 1 / tokens_per_second (Qwen2.5-VL); or 0,
    as each frame is an item of its own between text tokens (Qwen3-VL)."""
    tokens_per_second: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Media:
    """Items of a request have `token` (or `video_token`) as placeholders in the prompt, whose embeddings are replaced
    by those of the item, in order."""

    tower: Tower
    projectors: tuple[Projector, ...]  # their outputs are side by side
    hidden: int  # of the text model
    token: int
    video_token: int | None = None
    attention: Literal["causal", "item", "prefix"] = "causal"
    """Attention of the text model: causal; bidirectional among the tokens of an item (Gemma 3); or bidirectional in the
    whole prompt (PaliGemma)."""
    deepstack: tuple[int, ...] = ()
    """Columns of an embedding beyond the first `hidden` are, in order, added to the hidden states of the token after
    these blocks of the text model (Qwen3-VL)."""
    positions: GridPositions | None = None
    tiles: Tiles | None = None

    @property
    def width(self) -> int:
        """Columns of an embedding."""
        return self.hidden * (1 + len(self.deepstack))


def block_path(tower: Tower, index: int) -> str:
    return join(tower.root, tower.layers, str(index))


def media_tensors(media: Media) -> dict[str, StoredTensor]:
    """Return what layers read, by name, in the order of the computation."""
    tower = media.tower
    found = dict(_tower_tensors(tower))
    for projector in media.projectors:
        found |= projector_tensors(projector)
    if media.tiles is not None:
        found[media.tiles.newline] = StoredTensor(name=media.tiles.newline, shape=(media.tiles.width,))
    return found


def projector_tensors(projector: Projector) -> dict[str, StoredTensor]:
    """Return what the layers of a projector read, by name."""
    shapes: Shapes = {}
    for step in projector.steps:
        shapes |= _step_sources(step, projector.root)
    found = {name: StoredTensor(name=name, shape=shape) for name, shape in shapes.items()}
    for name, stored in projector.renamed:
        found[join(projector.root, name)] = replace(stored, name=join(projector.root, stored.name))
    return found


def unlowered_tensors(media: Media) -> tuple[str, ...]:
    """Return the names of the tensors that are not weights of the tower's programs."""
    tower, tiles = media.tower, media.tiles
    patches = join(tower.root, tower.patches.source)
    found = [f"{patches}.weight", *([f"{patches}.bias"] if tower.patches.bias else [])]
    found += [] if tower.positions is None else [join(tower.root, tower.positions.name)]
    found += [join(tower.root, tower.class_token)] if tower.class_token else []
    return (*found, *(() if tiles is None else (tiles.newline,)))


def media_sources(media: Media) -> Shapes:
    """Return every tensor that a checkpoint must have for the tower and the projectors: name and shape."""
    found: Shapes = {}
    for stored in media_tensors(media).values():
        found[stored.name] = stored.shape
        if stored.scale:
            found[stored.scale] = stored.shape[:1]
    return found


def _tower_tensors(tower: Tower) -> Iterator[tuple[str, StoredTensor]]:
    shapes: Shapes = {}
    weight = join(tower.root, tower.patches.source, "weight")
    shapes[weight] = tower.patches.stored
    if tower.patches.bias:
        shapes[join(tower.root, tower.patches.source, "bias")] = (tower.hidden,)
    if tower.class_token:
        shapes[join(tower.root, tower.class_token)] = tower.class_shape or (tower.hidden,)
    if tower.positions is not None:
        stored = tower.positions.stored or (tower.positions.rows, tower.hidden)
        shapes[join(tower.root, tower.positions.name)] = stored
    for norm in (tower.before, tower.norm):
        if norm is not None:
            shapes |= norm_sources(norm, tower.root, (norm.size,))
    scales: dict[str, str] = {}
    for index, block in enumerate(tower.blocks):
        path = block_path(tower, index)
        for branch in block:
            shapes |= branch_sources(branch, path)
        for matrix, vector in tower.scales:
            scales |= {join(path, matrix, last): join(path, vector) for last in ("weight", "bias")}
    for name, shape in shapes.items():
        yield name, StoredTensor(name=name, shape=shape, scale=scales.get(name, ""))


def _step_sources(step: Step, root: str) -> Shapes:
    match step:
        case Merge() | AveragePool():
            return {}
        case Project(linear=linear):
            return linear_sources(linear, root)
        case MLP():
            found: Shapes = {}
            for linear in mlp_linears(step):
                found |= linear_sources(linear, join(root, step.name))
            return found
        case norm:
            return norm_sources(norm, root, (norm.size,))
