"""Place of each attention layer's keys and values in the pages."""

from dataclasses import dataclass

from torch import Tensor

from engine.kv.layout import Layout


@dataclass(frozen=True)
class KVLayer:
    """Storage of an attention layer's keys and values: group of the layout, and index within the group's blocks."""

    group: int
    layer: int


def group_pages(layout: Layout, pages: Tensor) -> tuple[Tensor, ...]:
    """Return the pages in the shape of each group, [blocks, layers, planes, block_tokens, kv_heads, head_dim]. All are
    views of the same memory."""

    def viewed(layers: int, kv_heads: int, head_dim: int) -> Tensor:
        return pages.view(len(pages), layers, layout.planes, layout.block_tokens, kv_heads, head_dim)

    return tuple(pages if group.shape is None else viewed(*group.shape) for group in layout.groups)


def kv_layers(layout: Layout) -> list[KVLayer]:
    """Return the KV layer of each attention layer of the model, in order."""
    found = {
        layer: KVLayer(number, at)
        for number, group in enumerate(layout.groups)
        for at, layer in enumerate(group.layers)
    }
    return [found[index] for index in range(len(found))]
