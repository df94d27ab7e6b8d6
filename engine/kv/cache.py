"""Block tables of sequences over the block pool: prefix hits, growth, release and publication. Independent of torch.

A block becomes findable when a step that fills it is planned and all its ids are known. In a step, writes precede
reads, and steps run in order. A block can therefore be reused as soon as the step that fills it is planned, and a freed
block can be taken again at once. A prefix of n blocks is a hit if every group still has the blocks that position n
attends to: all of them for full attention, else those within the window or the chunk.

At least one token has to be computed, because the next one is sampled from its logits. If an entire prompt is cached,
only its last token is recomputed, provided that no other sequence uses its block (the recomputed value equals the
cached
one up to rounding). Otherwise the hit ends one block earlier.

A recurrent or hybrid model also needs the state after the prefix, which only exists where a snapshot was taken
(`engine.kv.snapshots`). A hit then ends at a snapshot, and is shorter than the sequence, because the state of the last
token cannot be recomputed from the state after it.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass

from engine.api.hashes import NO_MARKS, extend
from engine.kv.layout import NULL_BLOCK, Group, blocks_of
from engine.kv.pool import Pool
from engine.kv.snapshots import SavePoints, Snapshots

Blocks = tuple[tuple[int, ...], ...]  # block ids, one tuple per group


class Tables:
    """Block tables of one sequence, one for each group, of equal length. Released positions contain the null block.

    touch: next position whose step needs a new block or releases one; before it, nothing changes.
    prompt: number of blocks of the prompt.
    written: tokens of these blocks that the sequence added to the cache. Preemption does not change it.
    settled: number of these blocks that are accounted for in `written`. Preemption does not change it.
    points: snapshots of the recurrent state.
    marks: what blocks depend on besides their tokens, by number: the media in them.
    """

    __slots__ = (
        "blocks",
        "hashes",
        "marks",
        "points",
        "prompt",
        "published",
        "released",
        "root",
        "settled",
        "touch",
        "written",
    )

    def __init__(self, root: bytes, groups: int, prompt: int = 0, marks: Mapping[int, bytes] = NO_MARKS) -> None:
        self.root, self.marks = root, marks
        self.hashes: list[bytes] = []
        self.blocks: list[list[int]] = [[] for _ in range(groups)]
        self.released = [0] * groups  # index of the first block of each group that is not released
        self.published = 0  # number of leading blocks that were published or found
        self.touch = 0
        self.prompt = prompt
        self.written = self.settled = 0
        self.points = SavePoints()

    def clear(self) -> None:
        for blocks in self.blocks:
            blocks.clear()
        self.released = [0] * len(self.blocks)
        self.published = self.touch = 0


@dataclass(frozen=True, slots=True)
class Hit:
    """Result of a lookup."""

    tokens: int  # need not be computed
    cached: int  # are in the cache; differs from `tokens` if the entire sequence is cached
    branch: int = 0  # recurrent model: keys and values are cached up to here, but perhaps no state


MISS = Hit(0, 0)
ROOM = 2**31


class Cache:
    def __init__(
        self,
        groups: Items[Group],
        block_tokens: int,
        blocks: int,
        *,
        prefix: bool = True,
        snapshots: int | None = None,
    ) -> None:
        """snapshots: number of snapshots of recurrent state; None if the model has no such state."""
        self.groups = tuple(groups)
        self.block_tokens = block_tokens
        self.pool = Pool(blocks)
        self.no_blocks: Blocks = ((),) * len(self.groups)
        self.snapshots = Snapshots(snapshots, block_tokens) if prefix and snapshots else None
        self._prefix = prefix and (bool(self.groups) if snapshots is None else snapshots > 0)

    def spare(self, running: int) -> int:
        """Return the free blocks minus one for each running sequence. Unlimited without groups."""
        return self.pool.free - running if self.groups else ROOM

    def lookup(self, tables: Tables, ids: list[int]) -> Hit:
        """Look up the prefix of a sequence without blocks."""
        if not self._prefix:
            return MISS
        extend(tables.hashes, tables.root, ids, self.block_tokens, tables.marks)
        if self.snapshots is not None:
            return self._lookup_state(self.snapshots, tables.hashes, (len(ids) - 1) // self.block_tokens)
        full = len(ids) // self.block_tokens
        found = self._longest(tables.hashes, full)
        cached = found * self.block_tokens
        if cached < len(ids):
            return Hit(cached, cached)
        if self._may_rewrite(tables.hashes, found):
            return Hit(cached - 1, cached)
        return Hit(self._longest(tables.hashes, found - 1) * self.block_tokens, cached)

    def _lookup_state(self, snapshots: Snapshots, hashes: list[bytes], limit: int) -> Hit:
        """Return the longest hit of at most `limit` blocks that has a snapshot."""
        branch = length = self._longest(hashes, limit)
        while (found := snapshots.longest(hashes, length)) and (length := self._longest(hashes, found)) < found:
            pass  # a window may lack blocks of a shorter prefix
        tokens = found * self.block_tokens
        return Hit(tokens, tokens, branch * self.block_tokens)

    def _longest(self, hashes: list[bytes], limit: int) -> int:
        """Return the length in blocks, at most `limit`, of the longest prefix that is a hit in every group."""
        find, length = self.pool.find, limit
        for index, group in enumerate(self.groups):
            if group.reach is None:
                length = next((i for i in range(length) if find((index, hashes[i])) is None), length)
        settled = False
        while not settled:
            settled = True
            for index, group in enumerate(self.groups):
                first = group.needed_from(length * self.block_tokens) // self.block_tokens
                if group.reach is None:
                    continue
                for i in range(length - 1, first - 1, -1):
                    if find((index, hashes[i])) is None:  # every longer prefix needs this block, too
                        length, settled = i, False
                        break
        return length

    def _may_rewrite(self, hashes: list[bytes], length: int) -> bool:
        """Return whether the last token of this many cached blocks can be recomputed alone."""
        position = length * self.block_tokens - 1
        for index, group in enumerate(self.groups):
            first = group.needed_from(position) // self.block_tokens
            last = self.pool.find((index, hashes[length - 1]))
            # The hit has the blocks that the next position needs. The last one may belong to an earlier chunk.
            more = range(first, length if group.chunk else first + 1)
            if last is None or self.pool.holders[last] or any(self.pool.find((index, hashes[i])) is None for i in more):
                return False
        return True

    def blocks_needed(self, tables: Tables, hit: Hit, tokens: int, step_tokens: int) -> int:
        """Return the maximum number of free blocks that a sequence with this many tokens and this hit takes while its
        prompt is computed in steps of at most `step_tokens`. At most `Layout.blocks_for`."""
        total, block_tokens = 0, self.block_tokens
        for index, group in enumerate(self.groups):
            first = group.needed_from(hit.tokens) // block_tokens
            most = blocks_of(tokens, block_tokens) - first
            if group.reach is not None:
                most = min(most, blocks_of(group.reach - 2 + min(step_tokens, tokens), block_tokens) + 1)
            for i in range(first, blocks_of(hit.tokens, block_tokens)):
                block = self.pool.find((index, tables.hashes[i]))
                assert block is not None, "the blocks of a hit are cached"
                most -= self.pool.holders[block] > 0  # in use by another sequence: not a free block
            total += most
        return total

    def start(self, tables: Tables, hit: Hit) -> None:
        """Assign the blocks of a hit to a sequence without blocks."""
        count = blocks_of(hit.tokens, self.block_tokens)
        for index, group in enumerate(self.groups):
            first = group.needed_from(hit.tokens) // self.block_tokens
            blocks = tables.blocks[index]
            blocks.extend([NULL_BLOCK] * first)
            for i in range(first, count):
                block = self.pool.find((index, tables.hashes[i]))
                assert block is not None, "the blocks of a hit are cached"
                self.pool.acquire(block)
                blocks.append(block)
            tables.released[index] = first
        tables.published = count
        tables.settled = max(tables.settled, count)

    def restore(self, tables: Tables, hit: Hit, total: int) -> int | None:
        """Return the snapshot to copy to the state of a sequence of `total` tokens that starts with this hit, or None
        if its state is zero or if the model has none."""
        if self.snapshots is None:
            return None
        return self.snapshots.start(tables.points, tables.hashes, hit.tokens, hit.branch, total)

    def cut(self, tables: Tables, first: int, end: int, total: int) -> int:
        """Return the position, at most `end`, at which a step from `first` ends. total: known tokens."""
        return end if self.snapshots is None else self.snapshots.cut(tables.points, first, end, total)

    def save(self, tables: Tables, end: int) -> int | None:
        """Return the snapshot to which the state is copied after a step that ends at `end`, or None."""
        return None if self.snapshots is None else self.snapshots.save(tables.points, tables.hashes, end)

    def drafts_before_save(self, tables: Tables, known: int) -> int:
        """Return how many drafts may follow `known` tokens, so that a step ends where the next snapshot is due."""
        if self.snapshots is None:
            return ROOM
        return self.snapshots.drafts_before(tables.points, known)

    def publish_states(self, tables: Tables, ids: list[int]) -> None:
        """Publish the snapshots of earlier plans whose tokens are known."""
        if self.snapshots is not None and tables.points.saved:
            extend(tables.hashes, tables.root, ids, self.block_tokens, tables.marks)
            self.snapshots.publish(tables.points, tables.hashes)

    def grow(self, tables: Tables, ids: list[int], first: int, end: int) -> Blocks | None:
        """Add blocks for positions [first, end), where everything before `first` is planned. Publishes full blocks,
        releases blocks that `first` does not need, then appends new ones. Returns None if there are too few free
        blocks; released blocks stay released."""
        self.publish(tables, ids, first)
        if not self.groups:
            return self.no_blocks
        self._release(tables, first)
        have = len(tables.blocks[0])
        fresh = max(0, blocks_of(end, self.block_tokens) - have)
        if fresh * len(self.groups) > self.pool.free:
            return None
        self._set_touch(tables, have + fresh)
        if not fresh:
            return self.no_blocks
        allocate = self.pool.allocate
        added = tuple(tuple(allocate() for _ in range(fresh)) for _ in self.groups)
        for blocks, more in zip(tables.blocks, added, strict=True):
            blocks.extend(more)
        return added

    def publish(self, tables: Tables, ids: list[int], computed: int) -> None:
        """Publish the blocks whose ids are known and whose `computed` positions are planned."""
        full = min(computed, len(ids)) // self.block_tokens
        if not self._prefix or full <= tables.published:
            return
        extend(tables.hashes, tables.root, ids, self.block_tokens, tables.marks)
        new: set[int] = set()
        for index, blocks in enumerate(tables.blocks):
            for i in range(tables.published, full):
                if blocks[i] != NULL_BLOCK and self.pool.publish(blocks[i], (index, tables.hashes[i])):
                    new.add(i)
        tables.published = full
        if tables.settled < tables.prompt:
            tables.written += self.block_tokens * sum(tables.settled <= i < tables.prompt for i in new)
            tables.settled = max(tables.settled, full)

    def end(self, tables: Tables, *, forget: bool = False) -> None:
        """Drop all blocks, last ones first in all groups, so that the beginnings of prefixes stay cached longest, and
        unpublished snapshots. `forget`: also remove published ones from the cache, because their contents are
        invalid."""
        for column in zip(*(reversed(blocks) for blocks in tables.blocks), strict=True):
            for block in column:
                if block != NULL_BLOCK:
                    if forget:
                        self.pool.forget(block)
                    self.pool.release(block)
        if self.snapshots is not None:
            self.snapshots.end(tables.points, tables.hashes, forget=forget)
        tables.clear()

    def forget_all(self) -> None:
        """Make everything that is cached unfindable."""
        self.pool.forget_all()
        if self.snapshots is not None:
            self.snapshots.pool.forget_all()

    def _release(self, tables: Tables, position: int) -> None:
        for index, group in enumerate(self.groups):
            needed = group.needed_from(position) // self.block_tokens
            blocks = tables.blocks[index]
            for i in range(tables.released[index], min(needed, len(blocks))):
                self.pool.release(blocks[i])
                blocks[i] = NULL_BLOCK
            tables.released[index] = max(tables.released[index], min(needed, len(blocks)))

    def _set_touch(self, tables: Tables, blocks: int) -> None:
        touch = blocks * self.block_tokens
        for group, released in zip(self.groups, tables.released, strict=True):
            releases = group.released_at((released + 1) * self.block_tokens)
            if releases is not None:
                touch = min(touch, releases)
        tables.touch = touch
