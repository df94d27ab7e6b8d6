"""Keys and values as whole numbers in pages: 8 bits with a scale for each head and token, or 4 bits in groups of dims.

The last axis of such pages has the bytes of one key or value: its codes, then its scales.

    int8   x / scale, where scale = max |x| / 127; then the scale as the 4 bytes of a float32
    uint8  (x - minimum) / scale of each group of GROUP dims, where minimum = min x and scale = (max x - min x) / 15,
           both rounded to float16. A byte has dim 2i in its low and dim 2i + 1 in its high half; then the scales of all
           groups, then their minima. Elements are limited to ±32768, so that no result is outside of float16.

The number of dims of 4-bit pages is a multiple of 4.
"""

import torch
from torch import Tensor

SCALE_BYTES = 4  # of a key or value of 8 bits, and of each group of 4 bits
GROUP = 32
LIMIT = 32768.0  # of the absolute value of an element with 4 bits


def is_coded(dtype: torch.dtype) -> bool:
    """Return whether pages of this type hold codes and scales."""
    return dtype in (torch.int8, torch.uint8)


def vector_bytes(dim: int, dtype: torch.dtype) -> int:
    """Return the size of the last axis of pages for a head dimension."""
    if dtype == torch.uint8:
        return dim // 2 + SCALE_BYTES * -(-dim // GROUP)
    return dim + (SCALE_BYTES if dtype == torch.int8 else 0)


def head_dim(pages: Tensor) -> int:
    """Return the head dimension of pages."""
    size = int(pages.shape[-1])
    if pages.dtype == torch.uint8:
        return 2 * (size - SCALE_BYTES * -(-size // (GROUP // 2 + SCALE_BYTES)))
    return size - (SCALE_BYTES if pages.dtype == torch.int8 else 0)


def encode(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x: [.., dim] → [.., bytes] int8 or uint8. NaN and infinity become 0."""
    x = torch.nan_to_num(x.float(), 0.0, 0.0, 0.0)
    return _encode_4(x) if dtype == torch.uint8 else _encode_8(x)


def decode(pages: Tensor) -> Tensor:
    """Return the elements of int8 or uint8 pages, [.., dim] fp32."""
    dim = head_dim(pages)
    if pages.dtype == torch.int8:
        return pages[..., :dim].float() * pages[..., dim:].contiguous().view(torch.float32)
    factors = pages[..., dim // 2 :].contiguous().view(torch.float16).float()
    scales, minima = (one.repeat_interleave(GROUP, -1)[..., :dim] for one in factors.chunk(2, -1))
    codes = torch.stack((pages[..., : dim // 2] & 15, pages[..., : dim // 2] >> 4), -1).flatten(-2)
    return codes.float() * scales + minima


def _encode_8(x: Tensor) -> Tensor:
    most = x.abs().amax(-1, keepdim=True)
    scales = torch.where(most < 1e-30, 0.0, most / 127)
    codes = torch.where(scales > 0, x / scales, 0.0).round().clamp(-127, 127)
    return torch.cat((codes.to(torch.int8), scales.contiguous().view(torch.int8)), -1)


def _encode_4(x: Tensor) -> Tensor:
    x, dim = x.clamp(-LIMIT, LIMIT), x.shape[-1]
    groups = x.split(GROUP, -1)
    minima = torch.stack([group.amin(-1) for group in groups], -1)
    scales = ((torch.stack([group.amax(-1) for group in groups], -1) - minima) / 15).half()
    minima = minima.half()
    scale, minimum = (one.float().repeat_interleave(GROUP, -1)[..., :dim] for one in (scales, minima))
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    codes = ((x - minimum) * inverse).round().clamp(0, 15).to(torch.uint8)
    packed = codes[..., ::2] | codes[..., 1::2] << 4
    return torch.cat((packed, torch.cat((scales, minima), -1).contiguous().view(torch.uint8)), -1)
