"""Gumbel noise that is a function of (seed, position, token) and of nothing else: counter-based, without state.

splitmix64 mixes (seed, position) to 64 bits. Its two 32-bit words and a hash of the token pass through the finaliser of
MurmurHash3, in wrapping 32-bit arithmetic that is the same on every device. h is the lowest 31 bits:

    u = (h + ½) / 2³¹ ≤ 1 - 2⁻²⁴;   noise = -log(-log(1 - u))

argmax(logit + noise) is distributed as softmax(logits): Gumbel-max, Maddison et al. 2014.
"""

import torch
from torch import Tensor

from kernels.jit import jit, tl

_GOLDEN = 0x9E3779B97F4A7C15


@jit
def _mixed(x):
    """splitmix64's finaliser of uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@jit
def noise_key(seed_low, seed_high, position):
    """Two int32 words of a seed and an int32 position -> two uint32 words."""
    seed = (seed_high.to(tl.uint32).to(tl.uint64) << 32) | seed_low.to(tl.uint32).to(tl.uint64)
    key = _mixed(_mixed(seed + 0x9E3779B97F4A7C15) + (position.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15)
    return key.to(tl.uint32), (key >> 32).to(tl.uint32)


@jit
def _finalised(h):
    h ^= h >> 16
    h *= 0x85EBCA6B
    h ^= h >> 13
    h *= 0xC2B2AE35
    return h ^ (h >> 16)


@jit
def noise_bits(token, low, high):
    """int32 tokens -> h: the less, the more noise."""
    return _finalised(_finalised(_finalised((token + 1).to(tl.uint32)) ^ low) ^ high) & 0x7FFFFFFF


@jit
def noise_from(bits):
    """h -> fp32. 1 - u is rounded; a first-order correction compensates for the rounding error. It is exact near 0, the
    origin of the largest noise."""
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 4.656612873077393e-10, 0.9999999403953552)
    left = 1.0 - u
    lost = (1.0 - left) - u
    return -tl.log(-(tl.log(left) + lost / left))


def noise_of(seed_low: Tensor, seed_high: Tensor, position: Tensor, vocab: int) -> Tensor:
    """Compute the noise with torch, for rows of int32 words and positions -> [rows, vocab] fp32."""
    seed = (seed_high.long() << 32) | (seed_low.long() & 0xFFFFFFFF)
    key = _mixed_torch(_mixed_torch(seed + _signed(_GOLDEN)) + (position.long() + 1) * _signed(_GOLDEN))
    low, high = (key & 0xFFFFFFFF)[:, None], _right(key, 32)[:, None]
    h = _finalised_torch(torch.arange(1, vocab + 1, device=seed.device))
    h = _finalised_torch(_finalised_torch(h ^ low) ^ high) & 0x7FFFFFFF
    u = h.float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return u.neg_().log1p_().neg_().log_().neg_()


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def _right(x: Tensor, count: int) -> Tensor:
    """Shift a 64-bit integer right logically."""
    return (x >> count) & ((1 << (64 - count)) - 1)


def _mixed_torch(x: Tensor) -> Tensor:
    x = (x ^ _right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _right(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _right(x, 31)


def _finalised_torch(h: Tensor) -> Tensor:
    """Finalise 32-bit numbers that are stored in int64; products keep their lower half."""
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return h ^ (h >> 16)
