"""Bytes of one engine, or of each of its ranks, by part: weights, workspace, KV cache, and what a request takes of the
cache. Pure arithmetic.

budget = min(memory_share · free, free less what the appliance takes) / engines  ≥  weights + workspace + cache
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from appliance.planning.derivation import Account, Step, product
from engine.kv.layout import Layout
from engine.models.footprint import Holding, Part

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "int8": 1}
CPU_CACHE_BYTES = 4 * 2**30
LENGTHS = (1024, 4096, 16384, 65536)  # at which the plan says how many requests fit, besides the longest


@dataclass(frozen=True)
class StateGroup:
    """What the layers of one kind keep of a request: `token_bytes` for each token in reach of theirs, `reach` tokens at
    most (None: all of them), `request_bytes` for a request of the whole context, in whole blocks."""

    kind: str
    layers: int
    token_bytes: int
    reach: int | None
    request_bytes: int


@dataclass(frozen=True)
class Concurrency:
    """How many requests of so many tokens the cache holds at once."""

    tokens: int
    requests: int


@dataclass(frozen=True)
class Host:
    """Memory of the host beside what an engine computes with: `appliance` for launcher, Supervisor, sentinel and
    gateway; on a GPU `engines` for their processes and `pinned` for page-locked copies on their way; `loading` for one
    matrix while it is read; `shared` in /dev/shm."""

    appliance: int
    engines: int
    pinned: int
    loading: int
    shared: int

    @property
    def total(self) -> int:
        return self.appliance + self.engines + self.pinned + self.loading + self.shared


@dataclass(frozen=True)
class RankWeights:
    """What one rank holds of the weights: bytes by part, and those that it reads in the checkpoint's file."""

    parts: dict[str, int]
    mapped: int


@dataclass(frozen=True)
class Memory:
    """Of one engine, or of its rank that holds most; in bytes unless named otherwise. `blocks` counts the null
    block; `tokens` is the longest sequence that the cache could hold, `whole_contexts` how many requests of
    `max_context` tokens fit at once. `parts`: of the weights. `mapped`: weights that are read in the checkpoint's file
    and count as page cache. `ranks`: the weights of each. `loading`: the most that loading takes at once. `buffers`,
    `tables` and `self_test` (pages of golden prompts) are parts of the workspace that are there from the start on, 0
    where only a step makes them. `accounts` tell how each number comes about."""

    free: int
    budget: int
    weights: int
    workspace: int
    cache: int
    block_bytes: int
    blocks: int
    tokens: int
    whole_contexts: int
    parts: dict[str, int]
    mapped: int
    ranks: tuple[RankWeights, ...]
    tables: int
    buffers: int
    self_test: int
    graphs: int
    loading: int
    state: tuple[StateGroup, ...]
    concurrency: tuple[Concurrency, ...]
    host: Host
    accounts: tuple[Account, ...]

    @property
    def total(self) -> int:
        return self.weights + self.workspace + self.cache


def planned_parts(memory: Memory) -> tuple[dict[str, int], ...]:
    """What each rank compares with what it really took, by the names that it reports."""
    alike = {"kv": memory.blocks * memory.block_bytes, "tables": memory.tables}
    if memory.self_test:
        alike["self_test"] = memory.self_test
    if memory.buffers:
        alike["buffers"] = memory.buffers
    return tuple({**rank.parts, **alike} for rank in memory.ranks)


def weight_accounts(holdings: Sequence[Holding]) -> tuple[Account, ...]:
    """One account for each part; equal matrices of different layers are one line."""
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
    """`model.layers.3.mlp.experts.7.up_proj` → `layers.*.mlp.experts.*.up_proj`."""
    words = name.removeprefix("model.").split(".")
    return ".".join("*" if word.isdigit() else word for word in words)


def state_groups(layout: Layout, max_context: int, step_tokens: int) -> tuple[StateGroup, ...]:
    """By kind: the groups of the layout that keep the same positions, together. Other kinds of state (chunked, latent,
    recurrent) are further kinds of the layout's groups."""
    kinds: dict[int | None, list[int]] = {}
    for number, group in enumerate(layout.groups):
        kinds.setdefault(group.window, []).append(number)
    found = []
    for window, numbers in kinds.items():
        layers = sum(len(layout.groups[number].layers) for number in numbers)
        blocks = sum(group_blocks(layout, number, max_context, step_tokens) for number in numbers)
        found.append(
            StateGroup(
                kind="full" if window is None else f"window {window}",
                layers=layers,
                token_bytes=layers * layout.page_bytes // layout.block_tokens,
                reach=window,
                request_bytes=blocks * layout.block_bytes,
            )
        )
    return tuple(found)


def group_blocks(layout: Layout, number: int, tokens: int, step_tokens: int) -> int:
    """Blocks that a request of so many tokens holds in one group of the layout."""
    alone = Layout(
        (layout.groups[number],),
        layout.block_tokens,
        layout.layers_per_block,
        layout.kv_heads,
        layout.head_dim,
        layout.element_bytes,
        layout.scale_bytes,
    )
    return alone.blocks_for(tokens, step_tokens)


def concurrency(layout: Layout, blocks: int, lengths: Sequence[int], step_tokens: int) -> tuple[Concurrency, ...]:
    """blocks: of the pool, the null block counted."""
    return tuple(
        Concurrency(tokens, (blocks - 1) // layout.blocks_for(tokens, step_tokens)) for tokens in sorted({*lengths})
    )


def largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number from 0 to `most` that fits, if all smaller ones do; 0 where not even 1 does."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def pool_bytes(layout: Layout, tokens: int, sequences: int = 1, step_tokens: int = 1) -> int:
    """Bytes of a pool that holds so many requests of so many tokens, and the null block."""
    return (sequences * layout.blocks_for(tokens, step_tokens) + 1) * layout.block_bytes


def spell_bytes(count: float) -> str:
    """`3.2 GiB`"""
    for size, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"
