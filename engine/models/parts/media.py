"""Towers and projectors of images, videos and audio."""

from typing import Literal

from engine.api.media import Modality
from engine.models.declared import declared
from engine.models.parts.audio import AudioEmbedding, ChunkedAudio, NormedAudio, SubsampledAudio
from engine.models.parts.blocks import Block
from engine.models.parts.linear import Linear, Rows, StoredTensor
from engine.models.parts.mlp import MLP
from engine.models.parts.norms import LayerNorm, Norm
from engine.models.parts.positions import GridPositions, GridRope, PatchPositions

# Towers: encoders of images and videos.


@declared(frozen=True, kw_only=True)
class Patches:
    """Projection of the pixels of each patch: channel by channel, of each frame by frame, row by row."""

    source: str
    hidden: int
    size: int  # pixels of a side
    channels: int = 3
    frames: int = 1  # consecutive frames in a patch
    bias: bool = True
    flat: bool = False  # `pixel_values` has a row for each patch (Qwen2-VL); else it has images
    strip: bool = False  # with `flat`: patches are side by side in one image (MiniCPM-V)
    factor: float = 1.0  # pixels are multiplied by it first, and `offset` is added
    offset: float = 0.0
    dimensions: Literal[0, 2, 3] = 2  # of the convolution as which the weight is stored; 0: of a matrix
    norm: Norm | None = None

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
        square = (self.size, self.size)
        inner = {0: (self.pixels,), 2: (self.channels, *square), 3: (self.channels, self.frames, *square)}
        return self.hidden, *inner[self.dimensions]


@declared(frozen=True, kw_only=True)
class Tower:
    """features = the outputs of the blocks `taken`, side by side."""

    patches: Patches | AudioEmbedding | ChunkedAudio | SubsampledAudio | NormedAudio
    """Embedding of the inputs; the parts below about grids are for patches."""
    blocks: tuple[Block, ...]
    taken: tuple[int, ...]  # numbers of blocks computed before a feature is taken; `norm` applies to all of them
    layers: str  # path of the blocks
    root: str = ""
    positions: PatchPositions | None = None
    class_token: str = ""  # name of a vector that is a further token
    class_shape: tuple[int, ...] = ()  # its shape in the checkpoint, if it is not [hidden]
    class_last: bool = False  # it follows the patches; else it precedes them
    rope: GridRope | None = None
    before: Norm | None = None  # of the patches with their positions
    norm: Norm | None = None
    side: int = 1  # patches are in order of squares of side · side patches
    window: int = 0  # side of the windows of attention in patches; 0: attention is among all patches of a frame
    whole: tuple[int, ...] = ()  # blocks with attention among all patches of a frame, if there are windows
    scales: tuple[tuple[str, str], ...] = ()  # (matrix, vector that multiplies its outputs), names within a block
    keeps_class: bool = False  # features include the class token
    halved: tuple[str, ...] = ()  # tensors within a block with heads whose halves are rotated by themselves (Gemma 4)
    standard: tuple[str, str] | None = None  # names of b and s; features are replaced by (factor · x - b) · s (Gemma 4)
    factor: float = 1.0  # of `standard`
    completed: int = 0
    """Side of squares of patches, for images with masks of their patches; 0: images have no masks. The unmasked part is
    completed to whole squares. The added patches attend to unmasked patches, and no patch attends to them (Phi-4)."""
    clip_window: int = 0
    """Positions of a clip that see one another; zeros fill the last of several windows. 0: all of them do."""
    renamed: tuple[tuple[str, StoredTensor], ...] = ()
    """Tensors of other shapes in the checkpoint, by the names that layers read, both within a block."""
    unread: tuple[str, ...] = ()

    @property
    def hidden(self) -> int:
        return self.patches.hidden

    @property
    def width(self) -> int:
        """Columns of the features."""
        return self.hidden * len(self.taken)


@declared(frozen=True, kw_only=True)
class Merge:
    """Join the features of squares of side · side patches: the first row, then the next rows."""

    side: int
    by_channel: bool = False  # instead, channel by channel (Mistral 3)


@declared(frozen=True, kw_only=True)
class AveragePool:
    """Mean of squares of side · side patches."""

    side: int


@declared(frozen=True, kw_only=True)
class AverageRows:
    """Mean of `count` consecutive rows of an item; rows beyond the last whole group are left out."""

    count: int


@declared(frozen=True, kw_only=True)
class JoinRows:
    """Join `count` consecutive rows of a frame side by side."""

    count: int


@declared(frozen=True, kw_only=True)
class JoinTiles:
    """Put the tiles of an image in their places, with a vector after each row, then another vector, then the first
    tile, which is the scaled-down image, also with the vector after each row (Phi-4)."""

    width: int  # of the vectors
    row_end: str  # name of a vector
    between: str


@declared(frozen=True, kw_only=True)
class ClassRow:
    """The row of the class token of each frame, which precedes the others."""

    rows: int  # rows of an image


@declared(frozen=True, kw_only=True)
class AttentionPool:
    """y = p + mlp(norm(p)), where p is the attention of a learned query, `probe`, to all rows of a frame (SigLIP).
    Every rank computes it completely."""

    hidden: int
    heads: int
    norm: LayerNorm
    mlp: MLP
    rows: int  # rows of an image of the usual size
    name: str = "head"


@declared(frozen=True, kw_only=True)
class Resampler:
    """The first queries of a table, after attention to all rows of a frame (Aria). Their number depends on that of the
    patches of a square image, whose side is the longer one of the frame. Every rank computes it completely."""

    hidden: int
    heads: int
    eps: float  # of the norms of queries and rows
    queries: tuple[tuple[int, int], ...]  # (patches of a square image, number of queries), in ascending order


@declared(frozen=True, kw_only=True)
class QFormer:
    """Outputs of learned queries. In each block of a BERT they attend to one another, and in every `every`-th block,
    the first included, to all rows of a frame (BLIP-2). Every rank computes it completely."""

    hidden: int
    inputs: int  # width of the rows
    layers: int
    heads: int
    intermediate_size: int
    act: str
    eps: float
    every: int
    queries: int
    rows: int  # rows of an image of the usual size


@declared(frozen=True, kw_only=True)
class Perceiver:
    """Outputs of learned queries, which in each block attend to all rows of a frame and to one another (Idefics2).
    Every rank computes it completely."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    act: str  # of the MLPs, which are four times as wide
    eps: float
    queries: int
    rows: int  # rows of an image of the usual size


@declared(frozen=True, kw_only=True)
class WindowMerge:
    """y = mean(z) + W₂ gelu_tanh(W₁ norm(z)), where z = x + attention(norm(x)) are the rows of a square of side · side
    patches, side by side in the norm, which attend to one another (MiniCPM-V). Every rank computes it completely."""

    hidden: int
    heads: int
    intermediate_size: int  # outputs of W₁
    eps: float
    side: int
    name: str

    @property
    def rows(self) -> int:
        """Rows of a square."""
        return self.side**2


@declared(frozen=True, kw_only=True)
class Blocks:
    """Further blocks of a tower. All rows of a frame attend to one another."""

    hidden: int
    blocks: tuple[Block, ...]
    layers: str  # path of the blocks
    first: int  # number of the first of them in the checkpoint


@declared(frozen=True, kw_only=True)
class Project:
    """y = act(x W^T (+ b))."""

    linear: Linear
    act: str = "none"


@declared(frozen=True, kw_only=True)
class Activate:
    """y = act(x)."""

    act: str


Querying = AttentionPool | Resampler | QFormer | Perceiver | WindowMerge
"""Steps with attention that have fewer rows after it: of learned queries to the rows of a frame, or within squares."""
RowStep = Merge | AveragePool | AverageRows | JoinRows | JoinTiles | ClassRow | Querying
"""Steps after which there is another number of rows."""
ProjectorStep = RowStep | Blocks | Project | Activate | Norm | MLP


@declared(frozen=True, kw_only=True)
class Projector:
    """Applies `steps` in order to the features, or to one of them."""

    steps: tuple[ProjectorStep, ...]
    root: str = ""
    feature: int | None = None  # number of the feature that it reads; None for all of them, side by side
    renamed: tuple[tuple[str, StoredTensor], ...] = ()
    """Tensors under other names in the checkpoint, by the names that layers read, both relative to `root`."""


@declared(frozen=True, kw_only=True)
class Tiles:
    """Embeddings of an image that was cut into tiles: first the scaled-down image, then the tiles in their places,
    without the padding and with `newline` after each row (LLaVA-NeXT)."""

    sizes: tuple[tuple[int, int], ...]  # (height, width) to which images may be padded
    size: int  # pixels of a tile's side
    newline: str  # name of a vector
    width: int  # of the vector
    most: int = 0  # most tiles; beyond, embeddings are interpolated (OneVision); 0: no limit


@declared(frozen=True, kw_only=True)
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
    windowed_items: bool = False  # with attention `item`: bidirectional in layers with a window only (Gemma 4)
    layer_token: int = 0  # token whose rows in the table of `LayerInputs` the tokens of media have
    deepstack: tuple[int, ...] = ()
    """Columns of an embedding beyond the first `hidden` are, in order, added to the hidden states of the token after
    these blocks of the text model (Qwen3-VL)."""
    positions: GridPositions | None = None
    tiles: Tiles | None = None
    audio: "Media | None" = None  # tower for audio clips, if this one is for images and videos
    beside_images: bool = False
    """The second projector is for the clips of prompts with images, and the first one for others (Phi-4)."""
    is_vector: bool = False
    """An item is a prompt of its own, of one token, and its only embedding is the vector of the prompt. The text model
    does not read it (CLIP)."""
    is_loaded: bool = True  # False: there is no tower, and items have their embeddings

    @property
    def modalities(self) -> tuple[Modality, ...]:
        """Modalities of the items that the tower reads."""
        if not isinstance(self.tower.patches, Patches):
            return ("audio",)
        visual: tuple[Modality, ...] = ("image",) if self.video_token is None else ("image", "video")
        return visual if self.audio is None else (*visual, "audio")

    @property
    def towers(self) -> tuple["Media", ...]:
        """All towers that are loaded: this one, and the one for audio clips."""
        return tuple(one for one in (self, self.audio) if one is not None and one.is_loaded)

    @property
    def width(self) -> int:
        """Columns of an embedding."""
        return self.hidden * (1 + len(self.deepstack))

    def step_embeddings(self, step_tokens: int) -> int:
        """Return the number of embeddings that the tower computes in a step with this many tokens of media. The vector
        of an image counts as all of its patches."""
        if not self.is_vector:
            return step_tokens
        steps = (step for one in self.projectors for step in one.steps)
        return max(1, step_tokens // max(step.rows for step in steps if isinstance(step, ClassRow | AttentionPool)))
