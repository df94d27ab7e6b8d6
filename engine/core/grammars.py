"""Requests constrained by a grammar or a thinking budget. Compilation runs in other threads; each request gets a
matcher
that is advanced by every token.

All methods run in the loop's thread.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any, Protocol

from engine.api.errors import RequestError
from engine.api.messages import Delta, Grammar, Submit, Thinking
from engine.core.plan import Mask
from engine.core.scheduler import Planned
from engine.core.sequence import Sequence, State

_Failed = tuple[str, RequestError]


class Matcher(Protocol):
    def advance(self, token: int) -> None: ...

    @property
    def finished(self) -> bool: ...

    def fork(self) -> "Matcher":
        """Return an independent copy."""
        ...

    def forced(self) -> tuple[int, ...]:
        """Return the likely next tokens if the text that follows is determined."""
        ...

    @property
    def free(self) -> int:
        """Number of first reply tokens that need no mask, whatever the pending tokens turn out to be. It never
        decreases."""
        ...


class Compiler(Protocol):
    """Compiles grammars in its own threads."""

    def start(
        self, grammar: Grammar | None, end_ids: Iterable[int], thinking: Thinking | None = None
    ) -> Future[Any]: ...

    @property
    def nothing(self) -> Mask:
        """The mask that allows no token."""
        ...

    def masks(self, matchers: list[Any]) -> list[Mask | RequestError | None]:
        """Return for each sequence the mask of the next token, None if all are allowed, or the error if none is."""

    def close(self) -> None: ...


OpenCompiler = Callable[[Callable[[float], None]], Compiler]


@dataclass(slots=True)
class GrammarCounters:
    """Counters since the engine's start."""

    compiled: int = 0
    cached: int = 0  # grammars that were compiled before
    compile_seconds: float = 0.0
    masks: int = 0
    mask_seconds: float = 0.0


class Grammars:
    """Matchers of all constrained requests.

    open_compiler: called for the first constrained request. It gets a callback for the duration of each compilation in
    seconds (0: it was cached), which may be called in any thread."""

    def __init__(self, open_compiler: OpenCompiler | None) -> None:
        self._open = open_compiler
        self._compiler: Compiler | None = None
        self._compiling: dict[str, tuple[Submit, float]] = {}
        self._futures: dict[str, Future[Any]] = {}
        self._matchers: dict[str, Matcher] = {}
        self._durations = deque[float]()
        self._counters = GrammarCounters()

    def start(self, submit: Submit, now: float, done: Callable[[Future[Any]], None]) -> None:
        """Start to compile. `done` is called with the future, in any thread. Raises RequestError."""
        assert submit.grammar is not None or submit.thinking is not None, "the request has no constraint"
        if self._compiler is None:
            if self._open is None:
                raise RequestError("this engine was started without structured output", "response_format")
            self._compiler = self._open(self._durations.append)
        if submit.id in self._compiling:
            raise RequestError(f"request id {submit.id!r} is in use; ids of open requests must differ", "id")
        ends = submit.stop_token_ids if submit.ignore_eos else submit.eos_token_ids + submit.stop_token_ids
        self._compiling[submit.id] = submit, now
        future = self._compiler.start(submit.grammar, ends, submit.thinking)
        self._futures[submit.id] = future
        future.add_done_callback(done)

    def finish(self, submit: Submit, future: Future[Any]) -> float | None:
        """Handle a finished compilation. Return the request's arrival time, or None if it was aborted meanwhile. Raises
        RequestError."""
        if submit.id not in self._compiling or self._compiling[submit.id][0] is not submit:
            return None
        _, arrived = self._compiling.pop(submit.id)
        self._futures.pop(submit.id, None)
        try:
            matcher: Matcher = future.result()
        except CancelledError as error:
            raise RequestError("the grammar was not compiled", "response_format") from error
        for token in submit.emitted:
            matcher.advance(token)
        self._matchers[submit.id] = matcher
        return arrived

    def drop(self, id: str) -> bool:
        """Drop a request and cancel its compilation. Return whether it was still compiling."""
        self._matchers.pop(id, None)
        future = self._futures.pop(id, None)
        if future is not None:
            future.cancel()
        return self._compiling.pop(id, None) is not None

    def drop_all(self) -> None:
        for id in (*self._matchers, *self._compiling):
            self.drop(id)

    @property
    def compiling(self) -> int:
        return len(self._compiling)

    def limited(self, planned: Planned) -> list[int]:
        """Return the rows of a planned step that may need a mask, whatever the pending tokens turn out to be."""
        rows, sequences = planned.plan.rows, planned.sequences
        return [row for row in planned.constrained if self._is_limited(sequences[row], len(rows[row].drafts))]

    def _is_limited(self, sequence: Sequence, drafts: int) -> bool:
        return sequence.total + drafts - sequence.prompt_tokens > self._matchers[sequence.id].free

    def masks(
        self, planned: Planned, rows: Iterable[int], clock: Callable[[], float]
    ) -> tuple[dict[int, Mask], list[_Failed]]:
        """Return masks by sample, and the requests whose grammar allows no next token.

        Rows of requests that ended after planning have no mask. Samples after a draft that the grammar does not allow
        have none either, because the mask before rejects the draft. A sample after a draft that completes the reply is
        not allowed any token, so that the row ends with the draft."""
        assert self._compiler is not None, "a constrained request is planned only after its compilation"
        began = clock()
        samples = planned.plan.first_samples
        masks: dict[int, Mask] = {}
        walks: list[tuple[int, str | None, Matcher]] = []  # (sample, id for the first one of a row, matcher)
        for row in rows:
            sequence, sample = planned.sequences[row], samples[row]
            if sequence.state is State.ENDED:
                continue
            walks.append((sample, sequence.id, self._matchers[sequence.id]))
            for number, matcher in enumerate(self._walk(sequence.id, planned.plan.rows[row].drafts)):
                if matcher.finished:
                    masks[sample + number + 1] = self._compiler.nothing
                else:
                    walks.append((sample + number + 1, None, matcher))
        found = self._compiler.masks([matcher for _, _, matcher in walks])
        failed: list[_Failed] = []
        for (sample, id, _), mask in zip(walks, found, strict=True):
            if not isinstance(mask, RequestError):
                if mask is not None:
                    masks[sample] = mask
            elif id is not None:
                failed.append((id, mask))
            else:  # the row ends before this token; if the request reaches it, the next step reports the error
                masks[sample] = self._compiler.nothing
        self._counters.masks += len(masks)
        self._counters.mask_seconds += clock() - began
        return masks, failed

    def _walk(self, id: str, drafts: tuple[int, ...]) -> Iterator[Matcher]:
        """Yield the matchers after each draft that the grammar allows, up to the draft that completes the reply."""
        matcher = self._matchers[id]
        for draft in drafts:
            matcher = matcher.fork()
            try:
                matcher.advance(draft)
            except RequestError:
                return
            yield matcher
            if matcher.finished:
                return

    def forced(self, id: str) -> tuple[int, ...]:
        """Return the likely next tokens of a request if the text that follows is determined."""
        return self._matchers[id].forced() if id in self._matchers else ()

    def allowed(self, id: str, drafts: tuple[int, ...]) -> tuple[int, ...]:
        """Return the drafts before the first one that the grammar does not allow."""
        return drafts[: sum(1 for _ in self._walk(id, drafts))]

    def counters(self) -> GrammarCounters:
        """Return the counters so far."""
        while self._durations:
            seconds = self._durations.popleft()
            self._counters.compile_seconds += seconds
            self._counters.compiled += seconds > 0
            self._counters.cached += seconds == 0
        return self._counters

    def __contains__(self, id: str) -> bool:
        """Return whether this request is constrained."""
        return id in self._matchers

    def advance(self, delta: Delta) -> bool:
        """Advance by the tokens of a delta. Return whether the reply is complete. Raises RequestError."""
        matcher = self._matchers[delta.id]
        if delta.finish is not None:
            del self._matchers[delta.id]
            return False
        for token in delta.ids:
            matcher.advance(token)
        return matcher.finished

    def close(self) -> None:
        if self._compiler is not None:
            self._compiler.close()
