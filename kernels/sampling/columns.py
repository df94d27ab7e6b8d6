"""Sampling parameters on the device, by slot of the request table: written when a request enters, read by every step.

One int32 tensor stores them, with a line for each field, so that a step stages the values of its new requests in one
upload. The lines of floats contain their bits. 64-bit numbers take two lines: the seed, and the float64 values of top_p
and log(min_p).
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True)
class DeviceColumns:
    """One element for each slot. temperature 0 is greedy; top_k 0, top_p 1 and log_min_p -inf are off."""

    temperature: Tensor  # fp32, 0 or at least 0.01
    top_k: Tensor  # int32, below the vocabulary
    top_p_low: Tensor  # int32, the bits of a float64
    top_p_high: Tensor
    log_min_p_low: Tensor  # int32, the bits of a float64
    log_min_p_high: Tensor
    seed_low: Tensor  # int32
    seed_high: Tensor  # int32
    repetition: Tensor  # fp32
    frequency: Tensor  # fp32
    presence: Tensor  # fp32
    prompt_tokens: Tensor  # int32

    @classmethod
    def of(cls, table: Tensor) -> "DeviceColumns":
        """Return the columns as views of a table, [FIELDS, slots] int32."""
        lines = zip(fields(cls), table, strict=True)
        return cls(*(line.view(torch.float32) if field.name in FRACTIONS else line for field, line in lines))


FRACTIONS = {"temperature", "repetition", "frequency", "presence"}
FIELDS = tuple(field.name for field in fields(DeviceColumns))


def split_float64(values: Tensor) -> tuple[Tensor, Tensor]:
    """Split 64-bit numbers into two int32 words, the lower first."""
    low, high = values.contiguous().view(torch.int32).view(-1, 2).unbind(1)
    return low.contiguous(), high.contiguous()


def join_float64(low: Tensor, high: Tensor) -> Tensor:
    """Join two int32 words to a float64."""
    return torch.stack((low, high), 1).view(torch.float64)[:, 0]
