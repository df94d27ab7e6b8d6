"""Sampling parameters on the device, by slot of the request table: written when a request enters, read by every step.

They lie in one int32 tensor of a line a field, so that a step stages the values of its new requests in one upload; the
lines of fractions hold their bits. Where float64 decides (the mass that top_p asks for, the border of min_p), a number
is the sum of two fractions.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True)
class DeviceColumns:
    """One element a slot. temperature 0 is greedy; top_k 0, top_p 1 and log_min_p -inf are off; `_rest` is added."""

    temperature: Tensor  # fp32, 0 or at least 0.01
    top_k: Tensor  # int32, below the vocabulary
    top_p: Tensor  # fp32
    top_p_rest: Tensor  # fp32
    log_min_p: Tensor  # fp32
    log_min_p_rest: Tensor  # fp32
    seed_low: Tensor  # int32
    seed_high: Tensor  # int32
    repetition: Tensor  # fp32
    frequency: Tensor  # fp32
    presence: Tensor  # fp32
    prompt_tokens: Tensor  # int32

    @classmethod
    def of(cls, table: Tensor) -> "DeviceColumns":
        """table: [FIELDS, slots] int32, which the columns are views of."""
        whole = {"top_k", "seed_low", "seed_high", "prompt_tokens"}
        lines = zip(fields(cls), table, strict=True)
        return cls(*(line if field.name in whole else line.view(torch.float32) for field, line in lines))


FIELDS = tuple(field.name for field in fields(DeviceColumns))
