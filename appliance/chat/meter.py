"""Limits on what a chat template may take: without them one that does not end holds a thread for ever.

Every loop and macro of a template calls `tick` once a round. The budget is the thread's own processor time, so that a
busy machine makes no template fail, and characters.
"""

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

CPU_S = 5.0
CHARACTERS = 64 * 2**20
_ROUNDS = 256  # between two looks at the clock


class TooMuch(Exception):
    """The template takes more than it may; the message says of what."""


class _Meter(threading.local):
    end_s = float("inf")
    rounds = 0


_METER = _Meter()


@contextmanager
def metered() -> Iterator[None]:
    """What this thread renders within may take CPU_S seconds."""
    before, _METER.end_s = _METER.end_s, min(_METER.end_s, time.thread_time() + CPU_S)
    try:
        yield
    finally:
        _METER.end_s = before


def tick() -> str:
    """Counts a round of a loop, or a call of a macro. Raises TooMuch."""
    _METER.rounds += 1
    if _METER.rounds % _ROUNDS == 0 and time.thread_time() > _METER.end_s:
        raise TooMuch(f"it computes for more than {CPU_S:g} s")
    return ""


def collected(parts: Iterable[str]) -> str:
    """The whole text of its parts. Raises TooMuch where it is too long."""
    kept, size = [], 0
    for part in parts:
        size += len(part)
        if size > CHARACTERS:
            raise TooMuch(f"its text has more than {CHARACTERS:,} characters")
        kept.append(part)
        tick()
    return "".join(kept)


def _many(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple) else 0


class MeteredEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose templates tick, and whose operators make nothing huge."""

    intercepted_binops = frozenset(("*", "**"))

    def _generate(self, source: nodes.Template, *args: Any, **options: Any) -> str:
        for node in source.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            call = nodes.Call(nodes.ImportedName(f"{__name__}.tick"), [], [], None, None)
            node.body.insert(0, nodes.ExprStmt(call).set_lineno(node.lineno))  # type: ignore[attr-defined]
        return super()._generate(source, *args, **options)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*" and isinstance(left, int) != isinstance(right, int):
            count, value = (left, right) if isinstance(left, int) else (right, left)
            if isinstance(count, int) and count * _many(value) > CHARACTERS:
                raise TooMuch(f"a product has more than {CHARACTERS:,} elements")
        if operator == "**" and isinstance(left, int) and isinstance(right, int) and right * left.bit_length() > 65536:
            raise TooMuch("a power has more than 65,536 bits")
        return super().call_binop(context, operator, left, right)
