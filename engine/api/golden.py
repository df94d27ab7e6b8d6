"""Golden prompts: fixed token ids with reference outputs, which detect changes of an engine's outputs.

For each reply token, a fingerprint of the logits it was sampled from is stored:

- `bits`, a checksum of all logits. Two engines with the same arithmetic must agree in it.
- The log-sum-exp, the largest logits, and sums of all logits under fixed random signs (the magnitude of such
  a sum of differences estimates the norm of the difference, Alon, Matias, Szegedy 1999). Two engines with different
  arithmetic must agree in these within a tolerance band.

Differences are relative to the spread (standard deviation) of the logits. This module does not import torch;
engine/worker/logit_fingerprint.py computes the numbers.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import msgspec

REPLY_TOKENS = 4
ROOM_TOKENS = 96  # maximum length of prompt and reply; the engine reserves blocks for it
SHORT = 5

# Tolerance relative to the spread if the arithmetic differs: a safe multiple of the values in docs/operations.md.
BANDS = {"float32": 0.001, "half": 0.1, "rounded": 0.2}
Against = Literal["lock", "itself"]

TEXTS = {
    "prose": "The keel is laid in spring, and by autumn the ship leaves the slipway.",
    "code": "def total(prices):\n    return sum(price * 1.19 for price in prices)\n",
}


class Arithmetic(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that an engine's outputs depend on besides the weights."""

    device: str
    kernels: str
    dtype: str
    kv_dtype: str
    weights: str
    ranks: int = 1
    precision: str = "highest"
    library: str = ""
    release: str = ""
    exact: bool = False  # outputs are bit-identical for any split into steps and any batch

    @property
    def coarseness(self) -> str:
        """The coarsest number format, a key of BANDS."""
        if self.weights != "stored" or self.kv_dtype in ("int8", "int4", "fp8"):
            return "rounded"
        wide = (self.dtype, self.kv_dtype) == ("float32", "float32") and self.precision != "bfloat16"
        return "float32" if wide else "half"


class LogitFingerprint(msgspec.Struct, frozen=True, array_like=True):
    """Summary of the logits at one position."""

    bits: str  # checksum of the bits of all logits
    logsumexp: float
    spread: float  # standard deviation
    ids: tuple[int, ...]  # tokens with the largest logits, in descending order
    values: tuple[float, ...]  # their logits
    sign_sums: tuple[float, ...]  # sums under random signs, divided by the square root of the vocabulary size


class Prompt(msgspec.Struct, frozen=True, omit_defaults=True):
    """A golden prompt."""

    name: str
    ids: tuple[int, ...]
    source: int = 0  # number of leading tokens that the encoder of an encoder-decoder model reads


class Golden(msgspec.Struct, frozen=True, rename={"fingerprints": "digests"}):
    """Outputs of an engine for a golden prompt."""

    prompt: Prompt
    reply: tuple[int, ...]  # greedy
    fingerprints: tuple[LogitFingerprint, ...]  # one for each reply token

    @property
    def finite(self) -> bool:
        return all(math.isfinite(number) for one in self.fingerprints for number in (one.logsumexp, *one.sign_sums))


class Recorded(msgspec.Struct, frozen=True):
    """Golden prompts and outputs of one engine."""

    arithmetic: Arithmetic
    goldens: tuple[Golden, ...]


# -- selection --------------------------------------------------------------------------------------------------------


def prompts(
    count: int, *, vocab: int, block_tokens: int, longest: int, texts: tuple[Prompt, ...], encoder_decoder: bool = False
) -> list[Prompt]:
    """Return `count` prompts of at most `longest` tokens.

    The first is short and the second fills more than a block; both have ids from the entire vocabulary. Then come
    `texts`, then more prompts like the first two with other ids. `encoder_decoder`: all but the last token of each
    prompt are encoder input."""
    longest = min(longest, ROOM_TOKENS) - REPLY_TOKENS
    if longest < 1 + encoder_decoder:
        return []
    lengths = (min(SHORT, longest), min(2 * block_tokens + 3, longest))
    kinds = zip(_KINDS, lengths, strict=True)
    found = [Prompt(name, _spread_ids(at, length, vocab)) for at, (name, length) in enumerate(kinds)]
    found += [Prompt(text.name, text.ids[:longest]) for text in texts if text.ids]
    for number in range(count - len(found)):
        kind = number % 2
        name = f"{_KINDS[kind]}-{number // 2 + 2}"
        found.append(Prompt(name, _spread_ids(len(_KINDS) + number, lengths[kind], vocab)))
    if encoder_decoder:
        found = [Prompt(one.name, one.ids, len(one.ids) - 1) for one in found if len(one.ids) > 1]
    return found[:count]


_KINDS = ("short", "long")
_STEP = 2654435761  # 2**32 / golden ratio: its multiples are evenly distributed (Knuth, TAOCP 3, 6.4)


def _spread_ids(series: int, count: int, vocab: int) -> tuple[int, ...]:
    return tuple(((series * ROOM_TOKENS + i + 1) * _STEP % 2**32) * vocab >> 32 for i in range(count))


# -- comparison -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Band:
    """Allowed difference between two results."""

    width: float  # relative to the spread; 0: bit-identical
    why: str  # short reason

    def __str__(self) -> str:
        return "bit for bit" if self.width == 0 else f"within {100 * self.width:g} %"


def band_between(one: Arithmetic, other: Arithmetic, tolerance: float | None = None) -> Band | None:
    """Return the band for results of two engines, or None if they cannot be compared because their weights were
    quantized differently. `tolerance` replaces the width of a band that is not bit-identical."""
    if one.weights != other.weights:
        return None
    names = [name for name in Arithmetic.__struct_fields__ if getattr(one, name) != getattr(other, name)]
    if not names and one.exact:
        return Band(0.0, "the same arithmetic")
    coarsest = max(one.coarseness, other.coarseness, key=lambda name: BANDS[name])
    width = BANDS[coarsest] if tolerance is None else tolerance
    names_text = ", ".join(f"{name} {getattr(one, name)} and {getattr(other, name)}" for name in names)
    return Band(width, f"other {names_text}" if names_text else "kernels whose sums depend on the division into steps")


def difference(expected: Golden, found: Golden, band: Band) -> str:
    """Return a one-line description of the first difference outside the band, or "".

    The reply may diverge where the two best tokens are closer than the band; the tokens after that are not compared."""
    for at, (old, new) in enumerate(zip(expected.fingerprints, found.fingerprints, strict=True)):
        differs = old.bits != new.bits if band.width == 0 else not distance(old, new) <= band.width
        if differs:
            return _describe(expected, found, at, band)
        if expected.reply[at] != found.reply[at]:
            gap = (old.values[0] - old.values[1]) / old.spread if len(old.values) > 1 and old.spread else 0.0
            return "" if band.width and gap <= 2 * band.width else _describe(expected, found, at, band)
    return ""


def distance(old: LogitFingerprint, new: LogitFingerprint) -> float:
    """Return the largest difference between two fingerprints, relative to the spread. Infinite if only one of them is
    finite."""
    numbers = (old.logsumexp, new.logsumexp, *old.sign_sums, *new.sign_sums, *new.values)
    if not all(map(math.isfinite, numbers)):
        return 0.0 if old.bits == new.bits else math.inf
    most = max(_differences(old, new))
    return 0.0 if most == 0 else most / old.spread if old.spread > 0 else math.inf


def _differences(old: LogitFingerprint, new: LogitFingerprint) -> Iterator[float]:
    yield abs(old.logsumexp - new.logsumexp)
    yield from (abs(a - b) for a, b in zip(old.sign_sums, new.sign_sums, strict=True))
    there = dict(zip(new.ids, new.values, strict=True))
    for token, value in zip(old.ids, old.values, strict=True):
        # A token that is no longer among the largest has at most the smallest of the listed values.
        yield abs(value - there[token]) if token in there else max(0.0, value - new.values[-1])


def _describe(expected: Golden, found: Golden, at: int, band: Band) -> str:
    old, new = expected.fingerprints[at], found.fingerprints[at]
    share = distance(old, new)
    how_far = "not finite" if math.isinf(share) else f"{100 * share:.3g} % of the spread apart"
    token = expected.reply[at], found.reply[at]
    tokens = f"token {token[0]}" if token[0] == token[1] else f"token {token[0]} expected, {token[1]} found"
    return (
        f"golden prompt {expected.prompt.name} ({len(expected.prompt.ids)} tokens), token {at + 1} of its reply: "
        f"{tokens}; logits {old.bits} expected, {new.bits} found, {how_far}; they must agree {band}"
    )
