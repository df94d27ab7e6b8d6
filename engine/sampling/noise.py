"""Gumbel noise that is a pure function of (seed, position, token): counter-based and stateless.

(seed, position) is mixed to 64 bits by splitmix64 on the host. These two 32-bit words and a hash of the token id pass
through the finaliser of MurmurHash3 on the device, in wrapping int32 arithmetic, which is the same on all devices.
argmax(logit + noise) is distributed as softmax(logits): Gumbel-max, Maddison et al. 2014.
"""

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.program import Team

_PAD = 64  # a multiple of the vector width: an element is computed by the same instruction in any batch
# Elements of noise per chunk. On a CPU a chunk fits into the cache: 16 rows of 152k at once take 3 times as long per
# row.
_CPU_ELEMENTS, _DEVICE_ELEMENTS = 1 << 17, 1 << 26


def _mix64(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def row_keys(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return row keys: [rows] uint64 seeds, [rows] positions -> [rows, 2] int32."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    keys = _mix64(_mix64(seeds + golden) + (positions.astype(np.uint64) + np.uint64(1)) * golden)
    return keys.view(np.int32).reshape(-1, 2)


def _finalise(h: Tensor) -> Tensor:
    """MurmurHash3's fmix32 of int32, in place. The masks make the shifts logical."""
    h ^= (h >> 16) & 0xFFFF
    h *= -2048144789  # 0x85EBCA6B
    h ^= (h >> 13) & 0x7FFFF
    h *= -1028477387  # 0xC2B2AE35
    h ^= (h >> 16) & 0xFFFF
    return h


class Noise:
    """Noise for a vocabulary on a device. `team`: compiled kernels, which compute the same noise while they search the
    best token."""

    def __init__(self, vocab: int, device: torch.device, team: Team | None = None) -> None:
        self.vocab, self.team = vocab, team
        padded = -(-vocab // _PAD) * _PAD
        self._tokens = _finalise(torch.arange(1, padded + 1, dtype=torch.int32, device=device))

    def all_tokens(self, keys: Tensor) -> Tensor:
        """[rows, 2] keys -> float32 [rows, vocab]."""
        return _gumbel(self._tokens ^ keys[:, :1], keys[:, 1:])[:, : self.vocab]

    def some_tokens(self, keys: Tensor, ids: Tensor) -> Tensor:
        """[rows, 2] keys, [rows, n] ids -> float32 [rows, n]."""
        return _gumbel(self._tokens[ids] ^ keys[:, :1], keys[:, 1:])

    def rows_at_once(self, device: torch.device) -> int:
        return max(1, (_CPU_ELEMENTS if device.type == "cpu" else _DEVICE_ELEMENTS) // self.vocab)


def _gumbel(h: Tensor, key: Tensor) -> Tensor:
    """Return -log(-log(1 - u)) of hashed bits; `h` is overwritten. u = (31 bits + 1/2) / 2^31 has the finest resolution
    near 0, where the largest noise comes from, so that rare tokens of a large vocabulary have exact probabilities."""
    u = _finalise(_finalise(h).bitwise_xor_(key)).bitwise_and_(0x7FFFFFFF).to(torch.float32)
    u.add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)  # float32 rounds the upper end to 1
    return u.neg_().log1p_().neg_().log_().neg_()
