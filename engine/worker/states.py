"""Memory of the recurrent state of running requests, of snapshots, and of copies from before drafts."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from engine.core.plan import StepPlan
from engine.kv.states import StateLayout
from engine.layers.states import LayerStates, layer_states, make_states


@dataclass(frozen=True)
class States:
    """Recurrent state. Without recurrent layers, all tensors are empty and plans copy nothing."""

    layout: StateLayout
    slots: Tensor  # [request slots, elements] fp32
    snapshots: Tensor  # [snapshots + 1, elements] fp32; number 0 is not used
    kept: Tensor  # [request slots, elements] fp32, states before drafts; no slots without speculative decoding

    @cached_property
    def layers(self) -> LayerStates:
        return layer_states(self.layout, self.slots)

    @property
    def nbytes(self) -> int:
        return self.slots.nbytes + self.snapshots.nbytes + self.kept.nbytes

    def restore(self, plan: StepPlan) -> None:
        """Copy snapshots to the slots of requests that start, and copies to and from slots with drafts. Called before
        the step."""
        for snapshot, slot in plan.restored:
            self.slots[slot].copy_(self.snapshots[snapshot])
        for slot in plan.kept:
            self.kept[slot].copy_(self.slots[slot])
        for slot in plan.returned:
            self.slots[slot].copy_(self.kept[slot])

    def save(self, plan: StepPlan) -> None:
        """Copy states of requests to snapshots. Called after the step."""
        for slot, snapshot in plan.saved:
            self.snapshots[snapshot].copy_(self.slots[slot])


def allocate_states(layout: StateLayout, slots: int, snapshots: int, device: torch.device, *, drafts: bool) -> States:
    """Allocate the states. drafts: requests may have drafts, before which their states are kept."""
    sizes = slots, snapshots + 1, slots if drafts else 0
    return States(layout, *(make_states(layout, size, device) for size in sizes))
