"""Figures of two memory plans side by side."""

from collections.abc import Iterator
from dataclasses import dataclass

from appliance.plan.plan import Plan


@dataclass(frozen=True)
class Number:
    """One figure on both sides; `form` is "bytes" or "count"."""

    name: str
    before: int
    after: int
    form: str

    @property
    def share(self) -> float | None:
        """The change as a share of what it was; None where that was nothing."""
        return None if not self.before else (self.after - self.before) / self.before


def numbers(before: Plan, after: Plan) -> Iterator[Number]:
    """Bytes of one engine, or of each of its ranks where ranks share its model; then what its cache holds."""
    old, new = before.memory, after.memory
    yield Number("weights", old.weights, new.weights, "bytes")
    yield Number("workspace", old.workspace, new.workspace, "bytes")
    yield Number("KV cache", old.cache, new.cache, "bytes")
    yield Number("together", old.total, new.total, "bytes")
    processes = [len(plan.engines) * plan.engines[0].tensor for plan in (before, after)]
    if max(processes) > 1:
        yield Number("of all processes", old.total * processes[0], new.total * processes[1], "bytes")
    yield Number("KV blocks", old.blocks, new.blocks, "count")
    yield Number("tokens cached", _tokens(before), _tokens(after), "count")
    yield Number("context", before.engines[0].max_context, after.engines[0].max_context, "count")
    yield Number("whole contexts at once", old.whole_contexts, new.whole_contexts, "count")
    yield Number("engines", len(before.engines), len(after.engines), "count")
    if max(plan.engines[0].tensor for plan in (before, after)) > 1:
        yield Number("ranks of an engine", before.engines[0].tensor, after.engines[0].tensor, "count")


def _tokens(plan: Plan) -> int:
    return (plan.memory.blocks - 1) * plan.engines[0].block_tokens
