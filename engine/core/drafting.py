"""Drafts of the next tokens of a request: forced text first, then the method of `speculation.method`.

Lookup methods search a draft when a step is planned. The draft of a model is part of the result of the step before
(engine/worker/drafting.py)."""

from collections.abc import Callable

from engine.api.config import SpeculationConfig
from engine.core.draft_control import DraftControl
from engine.core.drafts import NgramIndex
from engine.core.plan import StepPlan
from engine.core.sequence import Sequence
from engine.core.suffixes import RecentReplies, propose

Propose = Callable[[Sequence, int], tuple[int, ...]]


class Drafting:
    """Searches drafts, and pauses them where they do not pay.

    shared: drafts may come from replies to other requests of the same scope.
    clock: measures the time of drafting. Plans do not depend on it."""

    def __init__(self, config: SpeculationConfig, *, shared: bool) -> None:
        self._config, self._shared = config, shared
        self.search: Propose = {
            "ngram": self._ngram,
            "suffix": self._suffix,
            "draft": _of_model,
            "eagle": _of_model,
            "eagle3": _of_model,
            "mtp": _of_model,
        }.get(config.method, _nothing)
        self.control = DraftControl()
        self.replies = RecentReplies(config.ngram_min)
        self.clock: Callable[[], float] = _no_time
        self.seconds = 0.0

    def allows(self, rows: int, step: int) -> bool:
        """Return whether a step with this number of rows may have drafts."""
        return not self._config.adaptive or self.control.allows(rows, step)

    def may_draft(self, sequence: Sequence) -> bool:
        """Return whether a draft may follow the next token of this request."""
        if not sequence.speculative or not self._config.adaptive:
            return sequence.speculative
        return sequence.constrained or sequence.total >= sequence.acceptance.resume

    def propose(self, sequence: Sequence, count: int, rows: int) -> tuple[int, ...]:
        """Return up to `count` draft tokens, for a step with this number of rows."""
        if count < 1:
            return ()
        if sequence.forced:
            return sequence.forced[:count]
        count = min(count, self._config.tokens)
        if self._config.has_model:  # `lookahead` has limited the draft, which is computed
            return self.search(sequence, count)
        count = self._paying(sequence, count, rows)
        if count < 1:
            return ()
        began = self.clock()
        drafts = self.search(sequence, count)
        self.seconds += self.clock() - began
        if self._config.adaptive:
            sequence.acceptance.proposed(len(drafts), len(sequence.ids))
        return drafts

    def lookahead(self, sequence: Sequence, count: int, rows: int) -> int:
        """Return how many tokens, up to `count`, a model drafts after a step with this number of rows."""
        return self._paying(sequence, min(count, self._config.tokens), rows) if sequence.speculative else 0

    def _paying(self, sequence: Sequence, count: int, rows: int) -> int:
        """Return how many of `count` draft tokens pay. A request whose drafts do not pay pauses."""
        if not self._config.adaptive:
            return count
        if len(sequence.ids) < sequence.acceptance.resume:
            return 0
        break_even = self.control.break_even(rows)
        if not sequence.acceptance.begun:
            sequence.acceptance.begin(self.control.state.acceptance, break_even)
        pays = sequence.acceptance.length(break_even, len(sequence.ids))
        return count if pays is None else min(count, pays)

    def verified(self, sequence: Sequence, drafted: int, accepted: int, *, forced: bool) -> None:
        """Count a verified draft. Forced text says nothing about other drafts of the request."""
        if self._config.adaptive and not forced:
            sequence.acceptance.verified(drafted, accepted)
            self.control.verified(drafted, accepted)

    def measure(self, plan: StepPlan, started: float, now: float, *, running: bool) -> None:
        """Measure a step, which was planned at `started` and whose result came at `now`."""
        if not self._config.adaptive:
            return
        # The time to compute tokens again after a rejected draft is a cost of drafts.
        again = set(plan.returned)
        decoding = all(row.count == 1 + len(row.drafts) or row.slot in again for row in plan.rows)
        # A step in which a model drafts the first tokens after a pause is neither with nor without drafts.
        decoding = decoding and all(row.drafts or not row.lookahead for row in plan.rows)
        drafts = sum(len(row.drafts) for row in plan.rows) if decoding else None
        if again and not drafts:
            drafts = None
        self.control.applied(len(plan.rows), drafts, plan.step, started, now, running=running)

    def end(self, sequence: Sequence) -> None:
        """Keep the reply of a request for later ones."""
        if self._config.method == "suffix" and self._shared and sequence.speculative:
            scope = sequence.submit.salt, sequence.adapter
            self.replies.add(scope, sequence.ids[sequence.prompt_tokens :])

    def _ngram(self, sequence: Sequence, count: int) -> tuple[int, ...]:
        return self._index(sequence).propose(sequence.ids, count)

    def _suffix(self, sequence: Sequence, count: int) -> tuple[int, ...]:
        index = self._index(sequence)
        index.extend(sequence.ids)
        replies = self.replies.text((sequence.submit.salt, sequence.adapter))
        return propose(index, sequence.ids, replies, count)

    def _index(self, sequence: Sequence) -> NgramIndex:
        if sequence.index is None:
            sequence.index = NgramIndex(self._config.ngram_min)
        return sequence.index


def _of_model(sequence: Sequence, count: int) -> tuple[int, ...]:
    """Return the draft of a model, which the last step of the request computed."""
    return sequence.proposed[:count]


def _nothing(sequence: Sequence, count: int) -> tuple[int, ...]:
    """Draft forced text only."""
    return ()


def _no_time() -> float:
    """Measure nothing, as in a replay."""
    return 0.0
