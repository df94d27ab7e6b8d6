"""Writes of keys and values, or latents, of a step's tokens to their pages.

Pages are [blocks, layers, 2, block_tokens, kv_heads, head_dim]. In the flat view [.., kv_heads · head_dim], each token
of each layer has one row for its key and one for its value, and a write is one indexed copy. Pages of latents have one
plane in place of two. Pages of 8 and 4 bits have the bytes of kernels/page_codes.py in place of head_dim.
"""

import torch
from torch import Tensor

from kernels.page_codes import decode, encode, is_coded


def write_rows(slot_mapping: Tensor, layers: int, block_tokens: int, planes: int = 2) -> Tensor:
    """Return rows of the flat view for all layers, [layers, planes, tokens]. slot_mapping: [tokens], block ·
    block_tokens + offset."""
    block, offset = slot_mapping // block_tokens, slot_mapping % block_tokens
    plane = torch.arange(planes * layers, device=slot_mapping.device).view(layers, planes, 1)
    return (block * (planes * layers) + plane) * block_tokens + offset


def write_kv(pages: Tensor, rows: Tensor, k: Tensor, v: Tensor) -> None:
    """Write keys and values. rows: [2, tokens] of one layer; k, v: [tokens, kv_heads, head_dim], cast to the pages'
    type.

    Values that are not finite are written as 0: a later owner of the block reads the rest of its old contents with
    weight 0, and 0 · NaN would corrupt its result. The request that produced them stays NaN through its residual and is
    detected there.
    """
    flat = pages.view(-1, pages.shape[-2] * pages.shape[-1])
    for at, x in ((rows[0], k), (rows[1], v)):
        kept = encode(x, pages.dtype) if is_coded(pages.dtype) else stored(x, pages.dtype)
        flat.index_copy_(0, at, kept.flatten(1))


def write_latents(pages: Tensor, rows: Tensor, latents: Tensor) -> None:
    """Write latents as `write_kv` writes keys. rows: [1, tokens] of one layer; latents: [tokens, dim]."""
    pages.view(-1, pages.shape[-1]).index_copy_(0, rows[0], stored(latents, pages.dtype))


def stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return keys or values in the type of the pages: rounded to nearest, ties to even. NaN and infinity become 0."""
    return torch.nan_to_num(x.to(dtype), 0.0, 0.0, 0.0)


def read(pages: Tensor, dtype: torch.dtype) -> Tensor:
    """Return keys, values or latents of pages in the type of the activations."""
    return (decode(pages) if is_coded(pages.dtype) else pages).to(dtype)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return keys or values [.., dim] as pages of this type return them, in the type of x."""
    return read(encode(x, dtype) if is_coded(dtype) else stored(x, dtype), x.dtype)
