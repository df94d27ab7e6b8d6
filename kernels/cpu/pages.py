"""Pages in the order of the compiled kernels (pages.h): a KV head's keys as [dim, token], its values as [token, dim].

The tensor has the usual shape, [blocks, layers, 2, block_tokens, kv_heads, dim], and the usual number of bytes. Only
these kernels know the order within a plane [block_tokens, kv_heads, dim] of it. In pages of 8 and 4 bits
(kernels/page_codes.py) the codes of a head come first, in bytes instead of dims, and its scales follow: of 8 bits one
for each token, of 4 bits [factor, token] for keys and [token, factor] for values.
"""

import torch
from torch import Tensor

from kernels.page_codes import head_dim


def _code_size(pages: Tensor) -> int:
    """Return the elements of the last axis that hold codes, not scales."""
    dim = head_dim(pages)
    return dim // 2 if pages.dtype == torch.uint8 else dim


def _factor_type(pages: Tensor) -> torch.dtype:
    return torch.float16 if pages.dtype == torch.uint8 else torch.float32


def to_native(pages: Tensor) -> Tensor:
    """Copy pages from the order of their shape to the order of the compiled kernels."""
    out = torch.empty_like(pages)
    size = _code_size(pages)
    for value in (0, 1):
        by_head = pages[:, :, value].transpose(2, 3)  # [blocks, layers, kv_heads, block_tokens, bytes or dim]
        parts = [_turned(by_head[..., :size], value)]
        if by_head.shape[-1] > size:
            factors = _copied(by_head[..., size:]).view(_factor_type(pages))
            parts.append(_copied(_turned(factors, value)).view(pages.dtype))
        out[:, :, value] = torch.cat([part.flatten(3) for part in parts], 3).reshape(out[:, :, value].shape)
    return out


def from_native(pages: Tensor) -> Tensor:
    """The way back."""
    out = torch.empty_like(pages)
    size, (blocks, layers, _, tokens, heads, width) = _code_size(pages), pages.shape
    for value in (0, 1):
        parts = pages[:, :, value].reshape(blocks, layers, heads, -1)
        shape = (tokens, size) if value else (size, tokens)
        found = [_turned(parts[..., : tokens * size].unflatten(3, shape), value)]
        if width > size:
            factors = _copied(parts[..., tokens * size :]).view(_factor_type(pages))
            shape = (tokens, -1) if value else (-1, tokens)
            found.append(_copied(_turned(factors.unflatten(3, shape), value)).view(pages.dtype))
        out[:, :, value] = torch.cat(found, 4).transpose(2, 3)
    return out


def _turned(x: Tensor, value: int) -> Tensor:
    """Exchange tokens and dims of keys."""
    return x if value else x.transpose(3, 4)


def _copied(x: Tensor) -> Tensor:
    """Copy to rows of adjacent elements, also where an axis of size 1 has another stride."""
    return x.clone(memory_format=torch.contiguous_format)
