"""Place of each attention layer's keys and values in the pages."""

from dataclasses import dataclass

from engine.kv.layout import Layout


@dataclass(frozen=True)
class KVLayer:
    """Storage of an attention layer's keys and values: group of the layout, and index within the group's blocks."""

    group: int
    layer: int


def kv_layers(layout: Layout) -> list[KVLayer]:
    """Return the KV layer of each attention layer of the model, in order."""
    found = {
        layer: KVLayer(number, at)
        for number, group in enumerate(layout.groups)
        for at, layer in enumerate(group.layers)
    }
    return [found[index] for index in range(len(found))]
