"""Memory of the recurrent state of sequences, and its division into layers."""

import math

import torch
from torch import Tensor

from engine.kv.states import StateLayout
from kernels.cpu.memory import region

LayerStates = tuple[tuple[Tensor, ...], ...]
"""For each recurrent layer, its states: [slots, ...] fp32, contiguous within a slot."""


def make_states(layout: StateLayout, slots: int, device: torch.device) -> Tensor:
    """Allocate state slots, [slots, elements] fp32. A sequence begins with a state of zeros, whatever its slot
    contains."""
    shape = slots, layout.slot_elements
    if device.type != "cpu" or not math.prod(shape):
        return torch.zeros(shape, dtype=torch.float32, device=device)
    size = 4 * math.prod(shape)  # anonymous memory is not allocated until it is written
    return region(size)[:size].view(torch.float32).view(shape)


def layer_states(layout: StateLayout, slots: Tensor) -> LayerStates:
    """Divide state slots into the states of the layers. slots: [slots, elements]."""
    found, at = [], 0
    for shapes in layout.layers:
        states = []
        for shape in shapes:
            size = math.prod(shape)
            states.append(slots[:, at : at + size].unflatten(1, shape))
            at += size
        found.append(tuple(states))
    return tuple(found)
