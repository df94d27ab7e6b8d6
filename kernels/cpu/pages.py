"""Pages in the order of the compiled kernels (pages.h): a KV head's keys as [dim, token], its values as [token, dim].

The tensor has the usual shape, [blocks, layers, 2, block_tokens, kv_heads, dim], and the usual number of bytes. Only
these kernels know the order within a plane [block_tokens, kv_heads, dim] of it. Pages of 8 bits are int8 with dim + 4
bytes for each key and each value: x / scale to the nearest integer, and its scale, largest |x| / 127, as 4 bytes of a
float32, which follow the [dim, token] or [token, dim] of their head.
"""

import torch
from torch import Tensor

SCALE_BYTES = 4  # of each key and each value in pages of 8 bits


def head_dim(pages: Tensor) -> int:
    """Return the head dimension of pages in either order."""
    return int(pages.shape[-1]) - (SCALE_BYTES if pages.dtype == torch.int8 else 0)


def to_native(pages: Tensor) -> Tensor:
    """Copy pages from the order of their shape to the order of the compiled kernels. In 8-bit pages each key and each
    value ends with its scale."""
    out = torch.empty_like(pages)
    dim = head_dim(pages)
    for value in (0, 1):
        by_head = pages[:, :, value].transpose(2, 3)  # [blocks, layers, kv_heads, block_tokens, dim]
        data = by_head[..., :dim] if value else by_head[..., :dim].transpose(3, 4)
        parts = torch.cat((data.flatten(3), by_head[..., dim:].flatten(3)), 3)
        out[:, :, value] = parts.reshape(out[:, :, value].shape)
    return out


def from_native(pages: Tensor) -> Tensor:
    """The way back."""
    out = torch.empty_like(pages)
    dim, (blocks, layers, _, tokens, heads, _) = head_dim(pages), pages.shape
    for value in (0, 1):
        parts = pages[:, :, value].reshape(blocks, layers, heads, -1)
        data = parts[..., : tokens * dim].unflatten(3, (tokens, dim) if value else (dim, tokens))
        data = data if value else data.transpose(3, 4)
        scales = (
            parts[..., tokens * dim :].unflatten(3, (tokens, -1)) if parts.shape[3] > tokens * dim else data[..., :0]
        )
        out[:, :, value] = torch.cat((data, scales), 4).transpose(2, 3)
    return out


def quantized_pages(pages: Tensor) -> Tensor:
    """Quantize pages of finite numbers in the order of their shape to 8 bits."""
    scales = pages.abs().amax(-1, keepdim=True).float() / 127
    whole = torch.where(scales > 0, pages / scales, 0.0).round().clamp(-127, 127)
    return torch.cat((whole.to(torch.int8), scales.contiguous().view(torch.int8)), -1)


def dequantized_pages(pages: Tensor) -> Tensor:
    """Dequantize 8-bit pages in the order of their shape to float32."""
    dim = head_dim(pages)
    scales = pages[..., dim:].contiguous().view(torch.float32)
    return pages[..., :dim].float() * scales
