"""Layout of the KV pool: groups of layers, tokens and bytes per block. Independent of torch; also used by the planner.

The pool has blocks of equal size for all groups. A block belongs to one group at a time and contains `block_tokens`
tokens of all its layers in one contiguous range, `[layer][plane][token][kv head][dim]`, so that a block is a single
transfer. Planes are keys and values, or the single plane of latent attention, whose only head is a token's latent and
shared key, or its key of an indexer. Groups have the same number of layers; if a kind of layers does not fill its last
group, space is unused.

Layers may have pages of several shapes (numbers and sizes of KV heads). A block then has as many layers of a shape as
fill it exactly: twice as many with pages of half the size.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypedDict

from engine.api.errors import ConfigError
from engine.models.parts import Indexer, LatentAttention, Model, PageWriter, page_writers

NULL_BLOCK = 0  # never given to a request; a released position of a block table points to it


class PageSizes(TypedDict):
    """Sizes of the numbers of a KV cache, arguments of `layout`."""

    element_bytes: int
    numbers: int  # in an element
    scale_bytes: int  # of the scales of a group of numbers
    scale_group: int  # dims of a head in a group; 0: all of them


_PAGE_SIZES: dict[str, PageSizes] = {
    "float32": {"element_bytes": 4, "numbers": 1, "scale_bytes": 0, "scale_group": 0},
    "bfloat16": {"element_bytes": 2, "numbers": 1, "scale_bytes": 0, "scale_group": 0},
    "float16": {"element_bytes": 2, "numbers": 1, "scale_bytes": 0, "scale_group": 0},
    "fp8": {"element_bytes": 1, "numbers": 1, "scale_bytes": 0, "scale_group": 0},
    # kernels/page_codes.py: a float32 scale of each key and value; a float16 scale and minimum of each group
    "int8": {"element_bytes": 1, "numbers": 1, "scale_bytes": 4, "scale_group": 0},
    "int4": {"element_bytes": 1, "numbers": 2, "scale_bytes": 4, "scale_group": 32},
}
CODED = ("int8", "int4")  # whole numbers with scales of their own
# Maximum share of spare layers. They allow fewer groups, and each group needs separate block tables.
MAX_SPARE = 0.1


def page_sizes(kv_cache: str) -> PageSizes:
    """Return the sizes of a number format of the KV cache."""
    return _PAGE_SIZES[kv_cache]


def cpu_kv_dtype(checkpoint: str, *, quantized: bool, float16_scales: bool) -> str:
    """Return the default type of the pages beside float32 activations on a CPU: the checkpoint's own type.

    checkpoint: type of its plain weights. quantized: kernels multiply by weights of 4 to 8 bits. float16_scales: the
    weights are quantized, with scales in float16. Both get pages in float16, which rounds 8 times as finely as
    bfloat16.
    """
    return "float16" if quantized or float16_scales else checkpoint


def blocks_of(tokens: int, block_tokens: int) -> int:
    """Return the number of blocks for this many tokens."""
    return -(-tokens // block_tokens)


def whole_blocks(tokens: int, rows: int, block_tokens: int = 16) -> int:
    """Return the maximum number of blocks of a step with this many tokens, where each row begins in a new block."""
    return (tokens + (block_tokens - 1) * min(rows, tokens)) // block_tokens


class Shape(NamedTuple):
    """Shape of the pages of a block in the layers of a group."""

    layers: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Group:
    """Attention layers that share block tables."""

    name: str
    layers: tuple[int, ...]  # indexes into the model's parts that write pages
    window: int | None = None
    chunk: int | None = None  # of chunked attention, which excludes a window
    shape: Shape | None = None  # of a layout with pages of several shapes

    @property
    def reach(self) -> int | None:
        """Maximum number of keys of a position, its own included. None: no limit."""
        return self.window or self.chunk

    def needed_from(self, n: int) -> int:
        """Return the first position that position n or a later one attends to."""
        if self.chunk is not None:
            return n // self.chunk * self.chunk
        return 0 if self.window is None else max(0, n - self.window + 1)

    def released_at(self, end: int) -> int | None:
        """Return the first position from which on no position before `end` is needed, or None."""
        if self.chunk is not None:
            return -(-end // self.chunk) * self.chunk
        return None if self.window is None else end + self.window - 1


@dataclass(frozen=True)
class Layout:
    """Division of the pool into blocks."""

    groups: tuple[Group, ...]  # empty: no KV cache and no blocks
    block_tokens: int
    layers_per_block: int
    kv_heads: int  # of one rank
    head_dim: int
    element_bytes: int
    scale_bytes: int = 0  # size of the scales that are stored with each group of dims of a key or value
    planes: int = 2  # keys and values; 1: latents
    draft_bytes: int = 0  # bytes that a draft model keeps for each block, in pages of its own
    numbers: int = 1  # in an element
    scale_group: int = 0  # dims in a group; 0: all of a head

    def shape(self, group: Group) -> Shape:
        return group.shape or Shape(self.layers_per_block, self.kv_heads, self.head_dim)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The shape of each group."""
        return tuple(map(self.shape, self.groups))

    def layer_bytes(self, group: Group) -> int:
        """Return the bytes of one token in one layer of a group."""
        shape = self.shape(group)
        return self.planes * shape.kv_heads * self._bytes_of(shape.head_dim)

    @property
    def vector_bytes(self) -> int:
        """Bytes of the key, value or latent of one head."""
        return self._bytes_of(self.head_dim)

    def _bytes_of(self, head_dim: int) -> int:
        groups = -(-head_dim // self.scale_group) if self.scale_group else 1
        return head_dim // self.numbers * self.element_bytes + groups * self.scale_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one block in one layer, all planes together."""
        return self.planes * self.block_tokens * self.kv_heads * self.vector_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers."""
        return sum(len(group.layers) * self.layer_bytes(group) for group in self.groups)

    @property
    def block_bytes(self) -> int:
        return self.layers_per_block * self.page_bytes + self.draft_bytes

    def blocks_of(self, tokens: int) -> int:
        """Return the blocks for this many tokens in all groups, ignoring windows."""
        return len(self.groups) * blocks_of(tokens, self.block_tokens)

    def blocks(self, pool_bytes: int) -> int:
        """Return the number of blocks in the pool, including the null block."""
        if not self.groups:
            return 1
        return pool_bytes // self.block_bytes

    def blocks_for(self, tokens: int, step_tokens: int = 1) -> int:
        """Return the maximum number of blocks of one request with this many tokens, over all groups, if a step computes
        at most `step_tokens` of it. A window or a chunk needs its reach before the step's first position, and the step
        itself."""
        total = 0
        for group in self.groups:
            most = blocks_of(tokens, self.block_tokens)
            if group.reach is not None:
                reach = group.reach - 1 + min(step_tokens, tokens)
                # Positions may begin anywhere in a block: the first of them may be the last of its block.
                most = min(most, blocks_of(reach - 1, self.block_tokens) + 1)
            total += most
        return total

    def tokens_in(self, blocks: int, step_tokens: int = 1) -> int:
        """Return the length of the longest request that fits into this many blocks (without the null block). If every
        group has a window or chunks and fits, the result is 2**31 - 1."""
        low, high = 0, 2**31 - 1
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.blocks_for(middle, step_tokens) <= blocks else (low, middle - 1)
        return low


def with_drafts(own: Layout, drafts: Sequence[Layout]) -> Layout:
    """Return the layout with the bytes of draft models in each block: a page for each group of their layers."""
    return replace(own, draft_bytes=sum(len(draft.groups) * draft.block_bytes for draft in drafts))


def shared_group(target: Sequence[Group], draft: Sequence[Group]) -> int:
    """Return the number of a group of the target whose block tables a draft model can use. Raises ConfigError if there
    is none.

    It keeps all positions that any layer of the draft model attends to."""
    reaches = [group.reach for group in draft]
    for number, group in enumerate(target):
        if group.reach is None:
            return number
        if group.window is not None and all(reach is not None and reach <= group.window for reach in reaches):
            return number
    raise ConfigError(
        "the draft model attends to more tokens than the target keeps; set speculation.model to one with the target's "
        "attention window"
    )


Kind = tuple[int | None, int | None, int, int, int]  # window, chunk; planes, KV heads and head dimension of a page


def layout(
    model: Model,
    *,
    block_tokens: int,
    element_bytes: int,
    numbers: int = 1,
    scale_bytes: int = 0,
    scale_group: int = 0,
    ranks: int = 1,
) -> Layout:
    """Divide the model's causal attention layers into groups by window or chunk, and by the shape of their pages, with
    an equal number of layers per group if all pages have the same shape.

    The number is the largest that leaves at most a tenth of all layers spare (22 window + 4 full: 4 per block, 7
    groups, 2 spare). Among numbers with equally few groups, it is the one with the fewest spare layers. Raises
    ConfigError for scales in pages of several shapes or of latents, and for sizes of heads that 4 bits do not divide.
    """
    parts = page_writers(model)
    if not parts:
        return Layout((), block_tokens, 0, 0, 0, element_bytes)
    kinds: dict[Kind, list[int]] = {}
    for index, part in enumerate(parts):
        planes, kv_heads, head_dim = page_shape(part)
        kinds.setdefault((part.window, part.chunk, planes, max(1, kv_heads // ranks), head_dim), []).append(index)
    pages = {kind[2:] for kind in kinds}
    assert len({planes for planes, _, _ in pages}) == 1, "a model has either keys and values, or latents"
    if scale_bytes and (len(pages) > 1 or any(planes == 1 for planes, _, _ in pages)):
        raise ConfigError(
            "pages of several shapes and pages of latents cannot have scales; set quantization.kv_cache to another type"
        )
    if any(dim % (2 * numbers) for _, _, dim in pages if numbers > 1):
        raise ConfigError("pages of 4 bits need heads of a multiple of 4 elements; set quantization.kv_cache to int8")
    planes, kv_heads, head_dim = max(pages, key=lambda page: (page[1] * page[2], page))
    unit = math.lcm(*(heads * dim for _, heads, dim in pages))  # the least elements that each shape fills exactly
    each = {kind: unit // (kind[3] * kind[4]) for kind in kinds}  # layers that fill them
    size = _units_per_block([(len(members), each[kind]) for kind, members in kinds.items()])
    groups = []
    for kind, members in sorted(kinds.items(), key=lambda item: tuple(size or 0 for size in item[0])):
        window, chunk, _, heads, dim = kind
        name = f"window{window}" if window is not None else "full" if chunk is None else f"chunk{chunk}"
        shape = Shape(size * each[kind], heads, dim)
        if len([one for one in kinds if one[:2] == kind[:2]]) > 1:
            name += f".{heads}x{dim}"
        divided = [tuple(members[at : at + shape.layers]) for at in range(0, len(members), shape.layers)]
        own = shape if len(pages) > 1 else None
        groups += [Group(f"{name}.{i}", layers, window, chunk, own) for i, layers in enumerate(divided)]
    layers = size * unit // (kv_heads * head_dim)
    return Layout(
        tuple(groups),
        block_tokens,
        layers,
        kv_heads,
        head_dim,
        element_bytes,
        scale_bytes,
        planes,
        numbers=numbers,
        scale_group=scale_group,
    )


def page_shape(part: PageWriter) -> tuple[int, int, int]:
    """Return planes, KV heads and head dimension of a part's pages. Latents and keys of an indexer have a single head,
    and every rank has them whole."""
    match part:
        case LatentAttention():
            return 1, 1, part.state_dim
        case Indexer():
            return 1, 1, part.head_dim
    return 2, part.kv_heads, part.head_dim


def _units_per_block(kinds: Sequence[tuple[int, int]]) -> int:
    """Return the size of a block in units. kinds: for each kind of layers, their number, and how many fill a unit. If
    every size wastes more than MAX_SPARE, the result is the size with the least waste."""
    total = sum(count / each for count, each in kinds)
    best: tuple[bool, int, float, int] | None = None
    for size in range(1, max(blocks_of(*kind) for kind in kinds) + 1):
        groups = sum(blocks_of(count, size * each) for count, each in kinds)
        spare = groups * size - total
        wasteful = spare > MAX_SPARE * total + 1e-9
        found = wasteful, groups if not wasteful else 0, spare, size
        if best is None or found[:3] < best[:3]:
            best = found
    assert best is not None, "there is at least one kind of layers"
    return best[3]
