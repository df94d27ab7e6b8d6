"""Memory of one engine, or of each of its ranks, in bytes: weights, workspace and KV cache, and the share of a request.

This module only computes; it reads no files.

budget = min(memory_share · free, free less what the appliance takes) / engines  ≥  weights + workspace + cache
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from appliance.planning.derivation import Account, Step, product
from engine.kv.layout import Layout, Shape
from engine.lowering.footprint import Holding
from engine.lowering.operations import Part

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
CPU_CACHE_BYTES = 4 * 2**30
LENGTHS = (
    1024,
    4096,
    16384,
    65536,
)  # context lengths for which the plan reports concurrency, in addition to the maximum


@dataclass(frozen=True)
class StateGroup:
    """KV cache of one request in the layers of one kind."""

    kind: str
    layers: int
    kv_heads: int
    token_bytes: int  # bytes of each token within reach
    reach: int | None  # tokens that the layers attend to; None: all
    request_bytes: int  # bytes of a request that fills the context, in whole blocks


@dataclass(frozen=True)
class Concurrency:
    """Number of requests of this length that the cache holds at once."""

    tokens: int
    requests: int


@dataclass(frozen=True)
class Host:
    """Host memory that is not part of an engine's device."""

    appliance: int  # launcher, Supervisor, restart monitor and gateway
    engines: int  # engine processes, on a GPU only
    pinned: int  # page-locked buffers of transfers, on a GPU only
    loading: int  # one matrix while it is read
    shared: int  # /dev/shm

    @property
    def total(self) -> int:
        return self.appliance + self.engines + self.pinned + self.loading + self.shared


@dataclass(frozen=True)
class RankWeights:
    """Weights of one rank."""

    parts: dict[str, int]  # bytes by part
    mapped: int  # bytes read from the mapped checkpoint file


@dataclass(frozen=True)
class Memory:
    """Memory of one engine, or of its rank with the most weights. Sizes are in bytes."""

    free: int
    budget: int
    weights: int
    workspace: int
    cache: int
    block_bytes: int
    blocks: int  # including the null block
    tokens: int  # tokens of the longest sequence that the cache can hold
    whole_contexts: int  # requests of `max_context` tokens that fit at the same time
    parts: dict[str, int]  # weights by part
    mapped: int  # weights read from the mapped checkpoint file; they count as page cache
    ranks: tuple[RankWeights, ...]  # weights of each rank
    tables: int  # request tables, allocated at the start
    buffers: int  # step buffers allocated at the start; 0 if each step allocates its own
    self_test: int  # KV cache blocks of the self-test, allocated at the start
    states: int  # recurrent state of requests and snapshots, allocated at the start
    state_slots: int  # number of slots that it has, of `state_slot_bytes` each
    state_slot_bytes: int
    graphs: int
    loading: int  # peak while the weights load
    state: tuple[StateGroup, ...]
    concurrency: tuple[Concurrency, ...]
    host: Host
    accounts: tuple[Account, ...]  # derivation of each number

    @property
    def total(self) -> int:
        return self.weights + self.workspace + self.cache


def planned_parts(memory: Memory) -> tuple[dict[str, int], ...]:
    """Return the planned bytes that each rank compares with its measured memory, by the names that it reports."""
    alike = {"kv": memory.blocks * memory.block_bytes, "tables": memory.tables}
    if memory.self_test:
        alike["self_test"] = memory.self_test
    if memory.states:
        alike["states"] = memory.states
    if memory.buffers:
        alike["buffers"] = memory.buffers
    return tuple({**rank.parts, **alike} for rank in memory.ranks)


def weight_accounts(holdings: Sequence[Holding]) -> tuple[Account, ...]:
    """Return one account for each part of the weights. Equal matrices of different layers share a line."""
    found = []
    for part in dict.fromkeys(one.part for one in holdings):
        equal = Counter((_generic(one.name), one.what, one.factors) for one in holdings if not _skips(one, part))
        steps = [product(f"{name}: {what}", *factors, times=times) for (name, what, factors), times in equal.items()]
        steps += [_mapped(one) for one in holdings if one.part == part and one.mapped]
        found.append(Account(part, f"weights of this part: {part}", tuple(steps)))
    return tuple(found)


def _skips(one: Holding, part: Part) -> bool:
    return one.part != part or one.mapped


def _mapped(one: Holding) -> Step:
    made = product(f"{one.name}: {one.what}, read in the file (page cache, not counted)", *one.factors)
    return Step(made.name, made.formula, made.value, added=False)


def _generic(name: str) -> str:
    """Replace the layer and expert numbers in a weight name by `*`.

    Example: `model.layers.3.mlp.experts.7.up_proj` becomes `layers.*.mlp.experts.*.up_proj`.
    """
    words = name.removeprefix("model.").split(".")
    return ".".join("*" if word.isdigit() else word for word in words)


def state_groups(layout: Layout, max_context: int, step_tokens: int) -> tuple[StateGroup, ...]:
    """Return the cache state by attention window or chunk and shape of the pages: groups of the layout with the same
    ones are combined.

    Recurrent state does not grow with the context; it is part of the workspace.
    """
    kinds: dict[tuple[int | None, int | None, Shape | None], list[int]] = {}
    for number, group in enumerate(layout.groups):
        kinds.setdefault((group.window, group.chunk, group.shape), []).append(number)
    found = []
    for (window, chunk, _), numbers in kinds.items():
        layers = sum(len(layout.groups[number].layers) for number in numbers)
        blocks = sum(group_blocks(layout, number, max_context, step_tokens) for number in numbers)
        found.append(
            StateGroup(
                kind=f"window {window}" if window else f"chunk {chunk}" if chunk else "full",
                layers=layers,
                kv_heads=layout.shape(layout.groups[numbers[0]]).kv_heads,
                token_bytes=layers * layout.layer_bytes(layout.groups[numbers[0]]),
                reach=window or chunk,
                request_bytes=blocks * layout.block_bytes,
            )
        )
    return tuple(found)


def group_blocks(layout: Layout, number: int, tokens: int, step_tokens: int) -> int:
    """Return the blocks that a request of `tokens` tokens takes in one group of the layout."""
    alone = replace(layout, groups=(layout.groups[number],))
    return alone.blocks_for(tokens, step_tokens)


def concurrency(layout: Layout, blocks: int, lengths: Sequence[int], step_tokens: int) -> tuple[Concurrency, ...]:
    """Return the concurrency at each length. `blocks` is the size of the pool, including the null block."""
    return tuple(
        Concurrency(tokens, (blocks - 1) // layout.blocks_for(tokens, step_tokens)) for tokens in sorted({*lengths})
    )


def largest(most: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number up to `most` that fits, by bisection; 0 if not even 1 fits."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def pool_bytes(layout: Layout, tokens: int, sequences: int = 1, step_tokens: int = 1) -> int:
    """Return the bytes of a pool that holds `sequences` requests of `tokens` tokens, and the null block."""
    return (sequences * layout.blocks_for(tokens, step_tokens) + 1) * layout.block_bytes


def spell_bytes(count: float) -> str:
    """Format a number of bytes, for example `3.2 GiB`."""
    for size, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"
