"""How the KV pool is divided: groups of layers, tokens per block, bytes per block. Torch-free; the planner uses it too.

One pool holds equal blocks for all groups. A block belongs to one group at a time and holds `block_tokens` tokens of all
its layers in one contiguous range, `[layer][k, v][token][kv head][dim]`, so that a block is one transfer. Groups have
the same number of layers; where a kind of layers does not fill its last group, that group's spare layers stay unused.
"""

from collections.abc import Callable
from dataclasses import dataclass

from engine.models.parts import Attention, Model, attentions

NULL_BLOCK = 0  # never given to a request; a released position of a block table points to it


def full() -> Callable[[int], int]:
    """Position n reads everything before it."""
    return lambda n: 0


def window(size: int) -> Callable[[int], int]:
    """Position n reads itself and the size - 1 positions before it."""
    return lambda n: max(0, n - size + 1)


@dataclass(frozen=True)
class Group:
    """Layers (indexes into the model's attention layers) that share block tables. `needed_from(n)` is the first position
    that position n still reads."""

    name: str
    layers: tuple[int, ...]
    window: int | None

    def needed_from(self, n: int) -> int:
        return 0 if self.window is None else max(0, n - self.window + 1)


@dataclass(frozen=True)
class Layout:
    """`layers_per_block` layers fit in a block, `kv_heads` are the heads of one rank."""

    groups: tuple[Group, ...]
    block_tokens: int
    layers_per_block: int
    kv_heads: int
    head_dim: int
    element_bytes: int

    @property
    def page_bytes(self) -> int:
        """Bytes of one block in one layer, keys and values together."""
        return 2 * self.block_tokens * self.kv_heads * self.head_dim * self.element_bytes

    @property
    def block_bytes(self) -> int:
        return self.layers_per_block * self.page_bytes

    def blocks(self, pool_bytes: int) -> int:
        """Blocks that fit in the pool, the null block among them."""
        return pool_bytes // self.block_bytes

    def blocks_for(self, tokens: int) -> int:
        """Blocks that one request of this many tokens holds at most, over all groups."""
        total = 0
        for group in self.groups:
            reach = tokens if group.window is None else min(tokens, group.window + self.block_tokens)
            total += -(-reach // self.block_tokens)
        return total


def layout(model: Model, *, block_tokens: int, element_bytes: int, ranks: int = 1) -> Layout:
    """Groups the model's attention layers by what they keep, and cuts each kind into groups of equal layer count.

    The count is the one that wastes the fewest bytes of spare layers; of equals, the one with the fewest groups.
    """
    parts = attentions(model)
    kinds: dict[int | None, list[int]] = {}
    for index, part in enumerate(parts):
        kinds.setdefault(part.window, []).append(index)
    heads = {(part.kv_heads, part.head_dim) for part in parts}
    assert len(heads) == 1, "layers with different KV heads or head sizes need a pool with unequal pages"
    size = min(range(1, max(map(len, kinds.values())) + 1), key=lambda n: _waste(n, kinds.values()))
    groups = []
    for span, members in sorted(kinds.items(), key=lambda item: item[0] or 0):
        name = "full" if span is None else f"window{span}"
        chunks = [tuple(members[at : at + size]) for at in range(0, len(members), size)]
        groups += [Group(f"{name}.{i}", chunk, span) for i, chunk in enumerate(chunks)]
    kv_heads, head_dim = heads.pop()
    return Layout(tuple(groups), block_tokens, size, max(1, kv_heads // ranks), head_dim, element_bytes)


def _waste(size: int, kinds) -> tuple[int, int]:  # type: ignore[no-untyped-def]
    groups = [-(-len(members) // size) for members in kinds]
    return sum(groups) * size - sum(map(len, kinds)), sum(groups)


__all__ = ["NULL_BLOCK", "Attention", "Group", "Layout", "full", "layout", "window"]
