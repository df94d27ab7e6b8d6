"""The workload of `slipway bench` as requests of a simulation: the same sessions, in an open or a closed loop."""

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from appliance.bench.arrivals import start_times
from appliance.bench.client import Outcome
from appliance.bench.run import Loop
from appliance.bench.workload import Session
from engine.api.messages import Sampling, Submit
from engine.core.whatif.simulate import Reply
from engine.core.whatif.traffic import RecordedRequest

Encode = Callable[[str], Sequence[int]]


@dataclass
class _Running:
    """A session with its next turn."""

    session: Session
    turn: int = 0
    ids: tuple[int, ...] = ()
    """Tokens of all earlier messages and replies."""


class SessionRequests:
    """Requests of sessions, each turn after the reply to the one before."""

    def __init__(self, sessions: Sequence[Session], loop: Loop, encode: Encode, *, vocab: int, seed: int) -> None:
        self._encode, self._vocab = encode, vocab
        self._limit = loop.concurrency or len(sessions) or 1
        self._active = 0
        self._free_since = 0.0
        """Time at which a session last ended while as many as permitted were running."""
        self._pending: deque[tuple[float, Session]] = deque()
        self._by_id: dict[str, tuple[_Running, float, RecordedRequest]] = {}
        self._upcoming: list[tuple[float, int, _Running]] = []
        starts = [0.0] * len(sessions) if loop.arrivals is None else start_times(len(sessions), loop.arrivals, seed)
        for at, session in zip(starts, sessions, strict=True):
            heapq.heappush(self._upcoming, (at, session.index, _Running(session)))

    def next_at(self) -> float | None:
        while self._upcoming:
            at, _, running = self._upcoming[0]
            if running.turn or self._active < self._limit:
                return at
            heapq.heappop(self._upcoming)
            self._pending.append((at, running.session))
        return None

    def take(self) -> tuple[RecordedRequest, float]:
        at, _, running = heapq.heappop(self._upcoming)
        if not running.turn:
            self._active += 1
            at = max(at, self._free_since)
        turn = running.session.turns[running.turn]
        for message in turn.messages:
            running.ids += tuple(self._encode(_text(message.get("content"))))
        generator = random.Random(turn.seed)
        tokens = [generator.randrange(self._vocab) for _ in range(turn.max_tokens)]
        id = f"{running.session.index}.{running.turn}"
        submit = Submit(id, running.ids or (0,), Sampling(), turn.max_tokens, ignore_eos=True)
        request = RecordedRequest(submit, at, tokens)
        self._by_id[id] = running, at, request
        return request, at

    def ended(self, id: str, now: float) -> None:
        running, _, request = self._by_id[id]
        running.ids += tuple(request.tokens)
        running.turn += 1
        if running.turn < len(running.session.turns):
            pause_s = running.session.turns[running.turn].pause_s
            heapq.heappush(self._upcoming, (now + pause_s, running.session.index, running))
            return
        if self._active == self._limit:
            self._free_since = now
        self._active -= 1
        if self._pending:
            at, session = self._pending.popleft()
            heapq.heappush(self._upcoming, (max(now, at), session.index, _Running(session)))

    def outcomes(self, replies: Sequence[Reply]) -> list[Outcome]:
        """Return the simulated replies as outcomes of a client."""
        by_id = {reply.id: reply for reply in replies}
        return [self._outcome(id, by_id.get(id)) for id in self._by_id]

    def _outcome(self, id: str, reply: Reply | None) -> Outcome:
        running, at, request = self._by_id[id]
        turn = int(id.rpartition(".")[2])
        outcome = Outcome(0, running.session.index, turn, at, prompt_tokens=len(request.submit.prompt))
        if reply is None or not reply.times:
            outcome.error = "refused: the prompt or the reply is too long"
            return outcome
        outcome.first_s, outcome.last_s = reply.times[0] - at, reply.times[-1] - at
        outcome.gaps_s = [after - before for before, after in zip(reply.times, reply.times[1:], strict=False)]
        outcome.output_tokens = len(reply.times)
        return outcome


def _text(content: object) -> str:
    if isinstance(content, list):
        return " ".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content or "")
