"""Requests whose tokens a grammar or a thinking budget limits: compiled beside the loop, then one matcher each,
advanced by every token.

All methods run in the loop's thread; compilation does not.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.api.errors import RequestError
from engine.api.messages import Delta, Grammar, Submit, Thinking
from engine.core.scheduler import Planned

Mask = NDArray[np.uint32]  # bit i % 32 of word i // 32: token i is allowed


class Matcher(Protocol):
    def mask(self) -> Mask | None:
        """None where any token may come."""
        ...

    def advance(self, token: int) -> None: ...

    @property
    def finished(self) -> bool: ...


class Compiler(Protocol):
    """Compiles in a thread of its own."""

    def start(
        self, grammar: Grammar | None, end_ids: Iterable[int], thinking: Thinking | None = None
    ) -> Future[Any]: ...

    def close(self) -> None: ...


class Grammars:
    """`open_compiler` is called at the first request that has a grammar or a thinking budget."""

    def __init__(self, open_compiler: Callable[[], Compiler] | None) -> None:
        self._open = open_compiler
        self._compiler: Compiler | None = None
        self._compiling: dict[str, tuple[Submit, float]] = {}
        self._matchers: dict[str, Matcher] = {}

    def start(self, submit: Submit, now: float, done: Callable[[Future[Any]], None]) -> None:
        """Begins to compile; `done` is called with the future, in any thread. Raises RequestError."""
        assert submit.grammar is not None or submit.thinking is not None, "nothing limits the request"
        if self._compiler is None:
            if self._open is None:
                raise RequestError("this engine was started without structured output", "response_format")
            self._compiler = self._open()
        if submit.id in self._compiling:
            raise RequestError(f"request id {submit.id!r} is in use; ids of open requests must differ", "id")
        ends = submit.stop_token_ids if submit.ignore_eos else submit.eos_token_ids + submit.stop_token_ids
        self._compiling[submit.id] = submit, now
        limits = (submit.thinking,) if submit.thinking is not None else ()
        self._compiler.start(submit.grammar, ends, *limits).add_done_callback(done)

    def finish(self, submit: Submit, future: Future[Any]) -> float | None:
        """The future of this very submit is done: when it arrived, or None if it was aborted meanwhile. Raises
        RequestError."""
        if submit.id not in self._compiling or self._compiling[submit.id][0] is not submit:
            return None
        _, arrived = self._compiling.pop(submit.id)
        try:
            matcher: Matcher = future.result()
        except CancelledError as error:
            raise RequestError("the grammar was not compiled", "response_format") from error
        for token in submit.emitted:
            matcher.advance(token)
        self._matchers[submit.id] = matcher
        return arrived

    def drop(self, id: str) -> bool:
        """Forgets a request; whether it was still compiling."""
        self._matchers.pop(id, None)
        return self._compiling.pop(id, None) is not None

    def drop_all(self) -> None:
        self._matchers.clear()
        self._compiling.clear()

    @property
    def compiling(self) -> int:
        return len(self._compiling)

    def masks(self, planned: Planned) -> tuple[dict[int, Mask], list[tuple[str, RequestError]]]:
        """Masks by row, and the requests whose grammar has no way on."""
        masks: dict[int, Mask] = {}
        failed = []
        for index in planned.constrained:
            id = planned.sequences[index].id
            try:
                mask = self._matchers[id].mask()
            except RequestError as error:
                failed.append((id, error))
            else:
                if mask is not None:
                    masks[index] = mask
        return masks, failed

    def advance(self, delta: Delta) -> bool:
        """Follows the tokens of a delta; whether nothing may come after them. Raises RequestError."""
        matcher = self._matchers.get(delta.id)
        if matcher is None:
            return False
        if delta.finish is not None:
            del self._matchers[delta.id]
            return False
        for token in delta.ids:
            matcher.advance(token)
        return matcher.finished

    def close(self) -> None:
        if self._compiler is not None:
            self._compiler.close()
