"""Layout of the recurrent state of sequences: one slot per sequence, with the state of all recurrent layers in float32.

A state slot is `[layer][state]`, contiguous. The slot of a running request has the number of its slot in the request
table. Snapshots (`engine.kv.snapshots`) are slots of the same layout in a second tensor, from which states are copied
as a whole. Independent of torch; also used by the planner.
"""

import math
from dataclasses import dataclass
from functools import cached_property

from engine.models.parts import Model, recurrents
from engine.models.parts.recurrent.mixer import Shape
from engine.models.ranks import shared_units

ELEMENT_BYTES = 4  # float32: a state is a sum over the whole sequence
LEAST_SNAPSHOTS = 16


@dataclass(frozen=True)
class StateLayout:
    """State of one sequence on one rank."""

    layers: tuple[tuple[Shape, ...], ...]  # shapes of the states of each recurrent layer

    @cached_property
    def slot_elements(self) -> int:
        return sum(math.prod(shape) for shapes in self.layers for shape in shapes)

    @property
    def slot_bytes(self) -> int:
        return self.slot_elements * ELEMENT_BYTES


def state_layout(model: Model, ranks: int = 1) -> StateLayout:
    """Return the layout of a model's recurrent state; without layers if it has none."""

    def own(units: int, what: str) -> int:
        return shared_units(units, 0, ranks, what)[1]

    return StateLayout(tuple(part.state_shapes(own) for part in recurrents(model)))


def num_snapshots(layout: StateLayout, slots: int, *, prefix_cache: bool) -> int | None:
    """Return the number of snapshots beside `slots` running requests: one for each, but at least LEAST_SNAPSHOTS. 0
    without prefix cache, None for a model without recurrent state."""
    if not layout.layers:
        return None
    return max(slots, LEAST_SNAPSHOTS) if prefix_cache else 0
