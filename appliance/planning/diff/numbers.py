"""Comparison of the numbers of two plans."""

from collections.abc import Iterator
from dataclasses import dataclass

from appliance.planning.plan import Plan


@dataclass(frozen=True)
class Number:
    """One number on both sides."""

    name: str
    before: float
    after: float
    form: str  # "bytes", "count", or "rate" (tokens per second)
    part: bool = False  # True: a part of the number above, listed only if it differs

    @property
    def share(self) -> float | None:
        """Return the relative change, or None if the old value is 0."""
        return None if not self.before else (self.after - self.before) / self.before


def numbers(before: Plan, after: Plan) -> Iterator[Number]:
    """Yield the memory of one engine or of its rank with the most weights, the cache capacity and the rooflines."""
    old, new = before.memory, after.memory
    yield Number("weights", old.weights, new.weights, "bytes")
    for part in dict.fromkeys((*old.parts, *new.parts)):
        yield Number(part, old.parts.get(part, 0), new.parts.get(part, 0), "bytes", part=True)
    yield Number("workspace", old.workspace, new.workspace, "bytes")
    yield Number("graphs", old.graphs, new.graphs, "bytes", part=True)
    yield Number("tables", old.tables, new.tables, "bytes", part=True)
    yield Number("KV cache", old.cache, new.cache, "bytes")
    yield Number("together", old.total, new.total, "bytes")
    yield Number("host, without the engines", old.host.total, new.host.total, "bytes", part=True)
    processes = [len(plan.engines) * plan.engines[0].parallelism.tensor for plan in (before, after)]
    if max(processes) > 1:
        yield Number("of all processes", old.total * processes[0], new.total * processes[1], "bytes")
    yield Number("KV blocks", old.blocks, new.blocks, "count")
    yield Number("cached tokens", _tokens(before), _tokens(after), "count")
    yield Number("one full context", _request(before), _request(after), "bytes")
    yield Number("context", before.engines[0].model.max_context, after.engines[0].model.max_context, "count")
    yield Number("full contexts at the same time", old.whole_contexts, new.whole_contexts, "count")
    yield Number("engines", len(before.engines), len(after.engines), "count")
    if max(plan.engines[0].parallelism.tensor for plan in (before, after)) > 1:
        yield Number(
            "ranks per engine", before.engines[0].parallelism.tensor, after.engines[0].parallelism.tensor, "count"
        )
    yield from _ceilings(before, after)


def _request(plan: Plan) -> int:
    return sum(state.request_bytes for state in plan.memory.state)


def _ceilings(before: Plan, after: Plan) -> Iterator[Number]:
    """Yield the throughput ceilings at batch sizes that both sides have."""
    old, new = before.estimate.roofline, after.estimate.roofline
    if old is None or new is None:
        return
    then = {one.rows: one.tokens_s for one in new.decode}
    for one in old.decode:
        if one.rows in then:
            rows = f"{one.rows} row{'s' * (one.rows != 1)}"
            yield Number(f"decode limit, {rows}", one.tokens_s, then[one.rows], "rate")
    yield Number("prefill limit", old.prefill.tokens_s, new.prefill.tokens_s, "rate")


def _tokens(plan: Plan) -> int:
    return (plan.memory.blocks - 1) * plan.engines[0].cache.block_tokens
