"""State of one request in the scheduler: its tokens, and how many of them are computed or pending."""

from collections.abc import Sequence as Rows
from enum import Enum

import msgspec

from engine.api.messages import Finish, Logprob, Sampling, Submit, Timing
from engine.core.draft_control import Acceptance
from engine.core.drafts import NgramIndex
from engine.kv.cache import Tables

SchedulingKey = tuple[float, int]  # (policy key, arrival): smaller is scheduled first and preempted last


class State(Enum):
    WAITING = "waiting"  # queued; has no slot and no blocks
    RUNNING = "running"  # has a slot and blocks
    ENDED = "ended"  # tokens that steps in flight still sample for it are dropped


TRANSITIONS: dict[State, tuple[State, ...]] = {
    State.WAITING: (State.RUNNING, State.ENDED),
    State.RUNNING: (State.WAITING, State.ENDED),  # preempted, or done
    State.ENDED: (),
}


class Sequence:
    """State of a request.

    ids: known tokens. total: their number including pending ones. computed: positions before it are written by steps
    that are planned. limit: maximum length. last: positions from here on are never computed, because the token that
    reaches the limit is only returned.
    """

    __slots__ = (
        "adapter",
        "arrival",
        "arrived",
        "blocked",
        "cached_tokens",
        "charged",
        "computed",
        "constrained",
        "acceptance",
        "accepted_tokens",
        "forced",
        "proposed",
        "index",
        "rejected_tokens",
        "speculative",
        "first_token",
        "id",
        "ids",
        "last",
        "last_token",
        "limit",
        "min_total",
        "owner",
        "share",
        "preemptions",
        "prompt_logprobs",
        "prompt_tokens",
        "routed",
        "routes",
        "scheduling_key",
        "rope_length",
        "rope_limit",
        "scheduled",
        "slot",
        "state",
        "step",
        "stale",
        "stops",
        "submit",
        "tables",
        "total",
    )

    def __init__(self, submit: Submit, arrival: int, now: float, longest: int) -> None:
        self.submit = submit
        self.id = submit.id
        self.owner = submit.owner
        self.share = submit.share
        self.arrival = arrival  # sequence number
        self.scheduling_key: SchedulingKey = (0, arrival)  # set by the policy
        self.state = State.WAITING
        self.ids = [*submit.prompt, *submit.emitted]
        self.prompt_tokens = len(submit.prompt)
        self.total = len(self.ids)
        self.computed = 0
        self.charged = 0  # number of positions that were computed once, or found in the cache
        self.limit = min(self.prompt_tokens + submit.max_tokens, longest)
        self.last = self.limit - 1 if submit.max_tokens else self.limit  # without a reply, all prompt tokens are scored
        self.min_total = self.prompt_tokens + submit.sampling.min_tokens
        self.stops: dict[int, int | None] = {token: token for token in submit.stop_token_ids}
        if not submit.ignore_eos:
            self.stops.update(dict.fromkeys(submit.eos_token_ids))
        self.constrained = submit.grammar is not None or submit.thinking is not None
        self.speculative = False  # may have drafts; set by the scheduler
        self.index: NgramIndex | None = None  # of `ids`, for drafts that repeat them
        self.forced: tuple[int, ...] = ()  # draft of the next tokens, from a grammar or a thinking budget
        self.acceptance = Acceptance()  # of drafts that may pause
        self.proposed: tuple[int, ...] = ()  # draft of the next tokens, from a draft model
        self.accepted_tokens = self.rejected_tokens = 0  # draft tokens
        self.slot = -1
        self.adapter = -1  # version of its LoRA adapter; -1: none; set by the scheduler
        self.blocked = ""  # reported reason why it cannot run, as the first in the queue
        self.step = 0  # last step that has a row of it
        self.stale = False  # its recurrent state has rejected drafts: it returns to the state of position `computed`
        self.rope_length = self.prompt_tokens
        self.rope_limit = 0  # positions from here on need another rope_length; set by the scheduler
        self.tables = Tables(b"", 0)
        self.prompt_logprobs: list[Logprob | None] | None = None
        if submit.sampling.prompt_logprobs is not None and not submit.emitted:  # else an earlier engine sent them
            self.prompt_logprobs = [None] * self.prompt_tokens
        self.routes: list[bytes] | None = [] if submit.sampling.return_routed_experts else None  # not yet returned
        self.routed = self.total - 1 if submit.emitted else 0  # positions whose experts have been returned or are in it
        self.arrived = now
        self.scheduled: float | None = None
        self.first_token: float | None = None
        self.last_token: float | None = None
        self.cached_tokens = self.preemptions = 0

    def become(self, state: State) -> None:
        assert state in TRANSITIONS[self.state], f"{self.id}: {self.state.value} must not become {state.value}"
        self.state = state

    @property
    def pending(self) -> int:
        """Number of tokens that steps in flight are sampling."""
        return self.total - len(self.ids)

    @property
    def sampling(self) -> Sampling:
        """Parameters for the worker, without prompt logprobs once they have been returned."""
        sampling = self.submit.sampling
        if sampling.prompt_logprobs is None or self.prompt_logprobs is not None:
            return sampling
        return msgspec.structs.replace(sampling, prompt_logprobs=None)

    def add_routes(self, first: int, routes: Rows[bytes]) -> None:
        """Keep the experts of positions from `first` on, unless they were kept before a preemption or a crash."""
        assert self.routes is not None, "the request returns the selected experts"
        if first <= self.routed:
            new = routes[self.routed - first :]
            self.routes += new
            self.routed += len(new)

    def take_routes(self) -> tuple[bytes, ...]:
        """Return the experts for the next delta."""
        if not self.routes:
            return ()
        taken, self.routes = self.routes, []
        return tuple(taken)

    def finish(self) -> tuple[Finish | None, int | None]:
        """Return the finish reason if the last reply token ends the request, and the stop token that ended it."""
        token = self.ids[-1]
        if token in self.stops and len(self.ids) > self.min_total:
            return "stop", self.stops[token]
        return ("length" if len(self.ids) >= self.limit else None), None

    def timing(self) -> Timing:
        return Timing(
            arrived=self.arrived,
            scheduled=self.scheduled or 0.0,
            first_token=self.first_token or 0.0,
            last_token=self.last_token or 0.0,
            cached_tokens=self.cached_tokens,
            written_tokens=self.tables.written,
            preemptions=self.preemptions,
            accepted_tokens=self.accepted_tokens,
            rejected_tokens=self.rejected_tokens,
        )
