"""Golden prompts: fixed token ids, what an engine once made of them, and whether it still makes the same of them.

Of each token of the reply the logits it was drawn from are kept as a digest of a few numbers:

- `bits`, a checksum of all of them: two engines of the same arithmetic agree in it, or one of them is wrong;
- the log of the sum of their exponentials, the largest ones, and sums of all under fixed random signs (a sketch: such a
  sum of a difference is about as large as the difference itself, Alon, Matias, Szegedy 1999): two engines of unlike
  arithmetic agree in these within a band.

All differences are measured against the spread (standard deviation) of the logits, which says how much tells tokens
apart. Free of torch; the numbers are made by engine/worker/logit_fingerprint.py.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import msgspec

REPLY_TOKENS = 4
ROOM_TOKENS = 96  # of prompt and reply, for which an engine keeps blocks of its own
SHORT = 5

# Of the spread, where arithmetic differs; measured in docs/operations.md, and a safe multiple of it.
BANDS = {"float32": 0.001, "half": 0.1, "rounded": 0.2}
Against = Literal["lock", "itself"]

TEXTS = {
    "prose": "The keel is laid in spring, and by autumn the ship leaves the slipway.",
    "code": "def total(prices):\n    return sum(price * 1.19 for price in prices)\n",
}


class Arithmetic(msgspec.Struct, frozen=True, kw_only=True):
    """What the numbers of an engine depend on beside the weights. `exact`: its kernels give the same bits however a
    step is cut and whatever is beside it, so that two engines alike in all of this give the same bits."""

    device: str
    kernels: str
    dtype: str
    kv_dtype: str
    weights: str
    ranks: int = 1
    precision: str = "highest"
    library: str = ""
    release: str = ""
    exact: bool = False

    @property
    def coarseness(self) -> str:
        """The coarsest of its number formats, a key of BANDS."""
        if self.weights != "stored" or self.kv_dtype in ("int8", "fp8"):
            return "rounded"
        return "float32" if (self.dtype, self.kv_dtype) == ("float32", "float32") else "half"


class LogitFingerprint(msgspec.Struct, frozen=True, array_like=True):
    """Of the logits of one position: a checksum of their bits, the log of the sum of their exponentials, their standard
    deviation, the ids of the largest in descending order with their values, and sums under random signs, divided by the
    root of their number."""

    bits: str
    logsumexp: float
    spread: float
    ids: tuple[int, ...]
    values: tuple[float, ...]
    sketch: tuple[float, ...]


class Prompt(msgspec.Struct, frozen=True, omit_defaults=True):
    """An encoder reads the first `source` of its tokens, where there is one in front."""

    name: str
    ids: tuple[int, ...]
    source: int = 0


class Golden(msgspec.Struct, frozen=True):
    """What an engine made of a prompt: its greedy reply, and a digest of the logits of each token."""

    prompt: Prompt
    reply: tuple[int, ...]
    digests: tuple[LogitFingerprint, ...]

    @property
    def finite(self) -> bool:
        return all(math.isfinite(number) for one in self.digests for number in (one.logsumexp, *one.sketch))


class Recorded(msgspec.Struct, frozen=True):
    """Golden prompts as one engine computed them."""

    arithmetic: Arithmetic
    goldens: tuple[Golden, ...]


# -- which prompts ----------------------------------------------------------------------------------------------------


def prompts(
    count: int, *, vocab: int, block_tokens: int, longest: int, texts: tuple[Prompt, ...], sourced: bool = False
) -> list[Prompt]:
    """So many prompts of at most `longest` tokens: a short one and one that fills more than a block, both of ids from
    all over the vocabulary; then texts; then further ones like the first two, of other ids. `sourced`: all but the last
    token of each are a source."""
    longest = min(longest, ROOM_TOKENS) - REPLY_TOKENS
    if longest < 1 + sourced:
        return []
    lengths = (min(SHORT, longest), min(2 * block_tokens + 3, longest))
    kinds = zip(_KINDS, lengths, strict=True)
    found = [Prompt(name, _spread_ids(at, length, vocab)) for at, (name, length) in enumerate(kinds)]
    found += [Prompt(text.name, text.ids[:longest]) for text in texts if text.ids]
    for number in range(count - len(found)):
        kind = number % 2
        name = f"{_KINDS[kind]}-{number // 2 + 2}"
        found.append(Prompt(name, _spread_ids(len(_KINDS) + number, lengths[kind], vocab)))
    if sourced:
        found = [Prompt(one.name, one.ids, len(one.ids) - 1) for one in found if len(one.ids) > 1]
    return found[:count]


_KINDS = ("short", "long")
_STEP = 2654435761  # 2**32 over the golden ratio: multiples of it fall evenly (Knuth, TAOCP 3, 6.4)


def _spread_ids(series: int, count: int, vocab: int) -> tuple[int, ...]:
    return tuple(((series * ROOM_TOKENS + i + 1) * _STEP % 2**32) * vocab >> 32 for i in range(count))


# -- comparing --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Band:
    """How far two results may differ, as a share of the spread; 0 is bit for bit. `why` in a few words."""

    width: float
    why: str

    def __str__(self) -> str:
        return "bit for bit" if self.width == 0 else f"within {100 * self.width:g} %"


def band_between(one: Arithmetic, other: Arithmetic, tolerance: float | None = None) -> Band | None:
    """Of results of two engines; None where they cannot be compared, for their weights were rounded otherwise.
    `tolerance` replaces the width where it is not bit for bit."""
    if one.weights != other.weights:
        return None
    names = [name for name in Arithmetic.__struct_fields__ if getattr(one, name) != getattr(other, name)]
    if not names and one.exact:
        return Band(0.0, "the same arithmetic")
    coarsest = max(one.coarseness, other.coarseness, key=lambda name: BANDS[name])
    width = BANDS[coarsest] if tolerance is None else tolerance
    told = ", ".join(f"{name} {getattr(one, name)} and {getattr(other, name)}" for name in names)
    return Band(width, f"other {told}" if told else "kernels whose sums depend on how steps are cut")


def difference(expected: Golden, found: Golden, band: Band) -> str:
    """What is not within the band, in one line, or "". A reply may part from the expected one where its next two tokens
    were as likely as the band is wide; what follows is another text and is not compared."""
    for at, (old, new) in enumerate(zip(expected.digests, found.digests, strict=True)):
        differs = old.bits != new.bits if band.width == 0 else not distance(old, new) <= band.width
        if differs:
            return _told(expected, found, at, band)
        if expected.reply[at] != found.reply[at]:
            gap = (old.values[0] - old.values[1]) / old.spread if len(old.values) > 1 and old.spread else 0.0
            return "" if band.width and gap <= 2 * band.width else _told(expected, found, at, band)
    return ""


def distance(old: LogitFingerprint, new: LogitFingerprint) -> float:
    """The largest difference of any number of two digests, as a share of the spread; infinite where one of them is not
    finite and the other is."""
    numbers = (old.logsumexp, new.logsumexp, *old.sketch, *new.sketch, *new.values)
    if not all(map(math.isfinite, numbers)):
        return 0.0 if old.bits == new.bits else math.inf
    most = max(_differences(old, new))
    return 0.0 if most == 0 else most / old.spread if old.spread > 0 else math.inf


def _differences(old: LogitFingerprint, new: LogitFingerprint) -> Iterator[float]:
    yield abs(old.logsumexp - new.logsumexp)
    yield from (abs(a - b) for a, b in zip(old.sketch, new.sketch, strict=True))
    there = dict(zip(new.ids, new.values, strict=True))
    for token, value in zip(old.ids, old.values, strict=True):
        # One that is no longer among the largest is at most as large as the least of them.
        yield abs(value - there[token]) if token in there else max(0.0, value - new.values[-1])


def _told(expected: Golden, found: Golden, at: int, band: Band) -> str:
    old, new = expected.digests[at], found.digests[at]
    share = distance(old, new)
    how_far = "not finite" if math.isinf(share) else f"{100 * share:.3g} % of their spread off"
    token = expected.reply[at], found.reply[at]
    tokens = f"token {token[0]}" if token[0] == token[1] else f"token {token[0]} expected, {token[1]} found"
    return (
        f"golden prompt {expected.prompt.name} ({len(expected.prompt.ids)} tokens), token {at + 1} of its reply: "
        f"{tokens}; logits {old.bits} expected, {new.bits} found, {how_far}; they have to agree {band}"
    )
