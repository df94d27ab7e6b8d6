"""Which request ended an engine: found by trying, never guessed.

A death of an engine is nobody's fault at first: what was open is given to the next engine as it is. A request that two
engines died under, without coming past the token where the first did, is a suspect. Suspects run in cohorts: half of
them, the least likely first, while the others wait; a cohort that comes past its tokens is cleared, one that dies is
halved again. The last one left runs alone on an engine that has just answered a probe; each death there is a proof, and
two convict it. Its content is refused from then on.

So a request is never convicted by engines that somebody killed: every token that it gains beyond the point of its last
death clears it, and an engine that dies without it, or under the probe, proves nothing.

Pure: no clock, no sockets. Keys are the router's names of its open requests.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from engine.api.messages import Submit

PASSED = 2
"""Tokens beyond the point of the last death that clear a request: a dying engine takes the tokens of up to two steps
with it."""
SUSPECT_DEATHS = 2
PROOFS = 2
REFUSED = 1024
"""Contents that are remembered; the oldest go first."""


@dataclass
class Record:
    """What is known of one open request. `deaths`: engines that died under it since it last came past `point`, the
    number of tokens it had when the last one did. `fresh`: it had gained nothing on that engine."""

    point: int = 0
    deaths: int = 0
    proofs: int = 0
    fresh: bool = True


@dataclass(frozen=True)
class Verdict:
    """What a death came to: `convicted` requests, and whether it was part of a trial, so that no restart policy needs
    to count it."""

    convicted: tuple[str, ...] = ()
    explained: bool = False


class Quarantine:
    """The trial of one router's requests: at most one cohort of suspects is out at a time."""

    def __init__(self) -> None:
        self._records: dict[str, Record] = {}
        self._groups: list[list[str]] = []  # still to be tried; the first holds a culprit, if anyone is one
        self._cohort: set[str] = set()  # suspects that run now
        self._alone = ""  # of them the one that runs alone after a probe
        self._refused: OrderedDict[str, int] = OrderedDict()

    @property
    def on(self) -> bool:
        """Whether there are suspects."""
        return bool(self._groups or self._cohort)

    @property
    def alone(self) -> str:
        """The request that runs with nothing beside it on its engine; "" if there is none."""
        return self._alone

    def is_suspect(self, key: str) -> bool:
        return key in self._cohort or any(key in group for group in self._groups)

    def runs(self, key: str) -> bool:
        """Whether a suspect belongs to the cohort that runs now."""
        return key in self._cohort

    def deaths(self, key: str) -> int:
        """Engines that died under an open request since it last came past the point where they did."""
        record = self._records.get(key)
        return record.deaths if record else 0

    def died(self, flying: Iterable[tuple[str, int, bool]]) -> Verdict:
        """An engine died under these requests: key, tokens so far, whether it gained any on that engine."""
        for key, tokens, gained in flying:
            record = self._records.setdefault(key, Record())
            record.point, record.fresh = tokens, not gained
            record.deaths += 1
        flown = [key for key, _, _ in flying]
        if self._cohort & set(flown):
            return self._cohort_died(flown)
        suspects = [key for key in flown if self._records[key].deaths >= SUSPECT_DEATHS]
        known = {key for group in self._groups for key in group}
        if suspects := [key for key in suspects if key not in known]:
            self._groups.insert(0, self._by_likelihood(suspects))
        return Verdict()

    def next_cohort(self, idle: bool) -> tuple[tuple[str, ...], bool]:
        """The suspects to run now, none while others are out, and whether it is one that has to run alone behind a
        probe. `idle`: the engine that would take them runs nothing else; without that no one is tried alone."""
        if self._cohort or not self._groups:
            return (), False
        group = self._groups.pop(0)
        if len(group) > 1:
            half = len(group) // 2
            self._groups.insert(0, group[half:])
            group = group[:half]
        elif idle:
            self._alone = group[0]
        self._cohort = set(group)
        return tuple(group), bool(self._alone)

    def withdraw(self) -> None:
        """The cohort never came to run: it is tried again."""
        self._groups.insert(0, [*self._cohort])
        self._cohort.clear()
        self._alone = ""

    def gained(self, key: str, tokens: int) -> bool:
        """A request has so many tokens now. Whether that ended the trial of a cohort, so that others may run."""
        record = self._records.get(key)
        if record is None or tokens <= record.point + PASSED:
            return False
        return self.ended(key)

    def ended(self, key: str) -> bool:
        """A request is over, or is cleared. Whether that ended the trial of a cohort."""
        self._records.pop(key, None)
        self._groups = [left for group in self._groups if (left := [each for each in group if each != key])]
        if key not in self._cohort:
            return False
        self._cohort.discard(key)
        if key == self._alone:
            self._alone = ""
        return not self._cohort

    def convict(self, submit: Submit, tokens: int) -> None:
        """Refuses this content from now on."""
        self._refused[content_hash(submit)] = tokens
        while len(self._refused) > REFUSED:
            self._refused.popitem(last=False)

    def refuses(self, submit: Submit) -> bool:
        return bool(self._refused) and content_hash(submit) in self._refused

    def _cohort_died(self, flown: Sequence[str]) -> Verdict:
        guilty = [key for key in flown if key in self._cohort]
        left = [key for key in self._cohort if key not in guilty]  # were not on that engine
        self._cohort.clear()
        if self._alone and flown == [self._alone]:
            key, self._alone = self._alone, ""
            self._records[key].proofs += 1
            if self._records[key].proofs >= PROOFS:
                del self._records[key]
                self._acquit()
                return Verdict((key,), explained=True)
        self._alone = ""
        rest = [key for group in self._groups for key in group] + left
        self._groups = [self._by_likelihood(guilty), *([rest] if rest else [])]
        return Verdict(explained=True)

    def _acquit(self) -> None:
        """The culprit is found: the others waited only because it was among them."""
        for group in self._groups:
            for key in group:
                self._records.pop(key, None)
        self._groups.clear()

    def _by_likelihood(self, keys: Iterable[str]) -> list[str]:
        """The likely culprits last: those that had gained nothing, then those with most deaths."""
        return sorted(keys, key=lambda key: (self._records[key].fresh, self._records[key].deaths))


def content_hash(submit: Submit) -> str:
    """SHA-256 of what a request asks for, whoever asks and with whatever seed."""
    sampling = msgspec.structs.replace(submit.sampling, seed=0)
    content = (
        submit.prompt,
        submit.source,
        sampling,
        submit.max_tokens,
        submit.grammar,
        submit.stop_token_ids,
        submit.ignore_eos,
    )
    return hashlib.sha256(msgspec.msgpack.encode(content)).hexdigest()
