"""Block tables of sequences over a pool: prefix hits, growth, release out of reach, publication. Torch-free.

Rules. A block becomes findable once a planned step fills it and all its ids are known. A step's writes come before its
reads, and steps run in order, so a block is found as soon as the step that fills it is planned, and a freed one is
taken again at once. A prefix of n blocks is a hit if every group still has the blocks that position n reads: all of
them for full attention, those within the window otherwise.

At least one token has to be computed, because the next one is drawn from its logits. Of a prompt that lies in the cache
as a whole, the last token alone is computed again, where nobody else holds the block it lies in (it writes the value
that is there, up to rounding); otherwise the hit ends one block earlier.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass

from engine.api.hashes import extend
from engine.kv.layout import NULL_BLOCK, Group, blocks_of
from engine.kv.pool import Pool

Blocks = tuple[tuple[int, ...], ...]  # block ids, one tuple a group


class Tables:
    """What one sequence holds: a block table of each group (equally long), released positions being the null block.

    `touch` is the next position whose step needs a new block or puts one out of reach; before it, nothing is to do.
    Of its first `prompt` blocks it brought `written` tokens into the cache, and of the first `settled` it is known
    whether it did: a preemption changes neither.
    """

    __slots__ = ("blocks", "hashes", "prompt", "published", "released", "root", "settled", "touch", "written")

    def __init__(self, root: bytes, groups: int, prompt: int = 0) -> None:
        self.root = root
        self.hashes: list[bytes] = []
        self.blocks: list[list[int]] = [[] for _ in range(groups)]
        self.released = [0] * groups  # first block of each group that is not released
        self.published = 0  # blocks from the start that were made findable, or found
        self.touch = 0
        self.prompt = prompt
        self.written = self.settled = 0

    def clear(self) -> None:
        for blocks in self.blocks:
            blocks.clear()
        self.released = [0] * len(self.blocks)
        self.published = self.touch = 0


@dataclass(frozen=True, slots=True)
class Hit:
    """`tokens` need not be computed; `cached` lie in the cache. They differ where the whole sequence does."""

    tokens: int
    cached: int


MISS = Hit(0, 0)
ROOM = 2**31


class Cache:
    def __init__(self, groups: Items[Group], block_tokens: int, blocks: int, *, prefix: bool = True) -> None:
        self.groups = tuple(groups)
        self.block_tokens = block_tokens
        self.pool = Pool(blocks)
        self.nothing: Blocks = ((),) * len(self.groups)
        self._prefix = prefix and bool(self.groups)

    def spare(self, running: int) -> int:
        """Free blocks beside one more for each sequence that runs: without groups there is always room."""
        return self.pool.free - running if self.groups else ROOM

    def look(self, tables: Tables, ids: list[int]) -> Hit:
        """What the cache has of a sequence that holds nothing yet."""
        if not self._prefix:
            return MISS
        extend(tables.hashes, tables.root, ids, self.block_tokens)
        full = len(ids) // self.block_tokens
        found = self._longest(tables.hashes, full)
        cached = found * self.block_tokens
        if cached < len(ids):
            return Hit(cached, cached)
        if self._may_rewrite(tables.hashes, found):
            return Hit(cached - 1, cached)
        return Hit(self._longest(tables.hashes, found - 1) * self.block_tokens, cached)

    def _longest(self, hashes: list[bytes], limit: int) -> int:
        """Blocks of the longest prefix, of at most `limit` blocks, that every group can continue from."""
        find, length = self.pool.find, limit
        for index, group in enumerate(self.groups):
            if group.window is None:
                length = next((i for i in range(length) if find((index, hashes[i])) is None), length)
        settled = False
        while not settled:
            settled = True
            for index, group in enumerate(self.groups):
                first = group.needed_from(length * self.block_tokens) // self.block_tokens
                if group.window is None:
                    continue
                for i in range(length - 1, first - 1, -1):
                    if find((index, hashes[i])) is None:  # no longer prefix reaches over the gap either
                        length, settled = i, False
                        break
        return length

    def _may_rewrite(self, hashes: list[bytes], length: int) -> bool:
        """Whether the last token of so many cached blocks can be computed alone."""
        position = length * self.block_tokens - 1
        for index, group in enumerate(self.groups):
            first = group.needed_from(position) // self.block_tokens
            last = self.pool.find((index, hashes[length - 1]))
            if last is None or self.pool.holders[last] or self.pool.find((index, hashes[first])) is None:
                return False
        return True

    def wanted(self, tables: Tables, hit: Hit, tokens: int, step_tokens: int) -> int:
        """Free blocks that a sequence of so many tokens takes if it starts with this hit: at most, over the steps of
        its prompt, in steps of at most `step_tokens`. Never more than `Layout.blocks_for` says."""
        total, block_tokens = 0, self.block_tokens
        for index, group in enumerate(self.groups):
            first = group.needed_from(hit.tokens) // block_tokens
            most = blocks_of(tokens, block_tokens) - first
            if group.window is not None:
                most = min(most, blocks_of(group.window - 2 + min(step_tokens, tokens), block_tokens) + 1)
            for i in range(first, blocks_of(hit.tokens, block_tokens)):
                block = self.pool.find((index, tables.hashes[i]))
                assert block is not None, "a hit ends before a block that is not cached"
                most -= self.pool.holders[block] > 0  # held by others already: costs nothing
            total += most
        return total

    def start(self, tables: Tables, hit: Hit) -> None:
        """Gives a sequence that holds nothing the blocks of its hit."""
        count = blocks_of(hit.tokens, self.block_tokens)
        for index, group in enumerate(self.groups):
            first = group.needed_from(hit.tokens) // self.block_tokens
            blocks = tables.blocks[index]
            blocks.extend([NULL_BLOCK] * first)
            for i in range(first, count):
                block = self.pool.find((index, tables.hashes[i]))
                assert block is not None, "a hit ends before a block that is not cached"
                self.pool.hold(block)
                blocks.append(block)
            tables.released[index] = first
        tables.published = count
        tables.settled = max(tables.settled, count)

    def grow(self, tables: Tables, ids: list[int], first: int, end: int) -> Blocks | None:
        """Makes room for positions [first, end), everything before `first` being planned: publishes what is full,
        releases what is out of reach of `first`, and appends blocks. None if there are too few free ones; what was
        released stays so."""
        self.publish(tables, ids, first)
        if not self.groups:
            return self.nothing
        self._release(tables, first)
        have = len(tables.blocks[0])
        fresh = max(0, blocks_of(end, self.block_tokens) - have)
        if fresh * len(self.groups) > self.pool.free:
            return None
        self._set_touch(tables, have + fresh)
        if not fresh:
            return self.nothing
        take = self.pool.take
        added = tuple(tuple(take() for _ in range(fresh)) for _ in self.groups)
        for blocks, more in zip(tables.blocks, added, strict=True):
            blocks.extend(more)
        return added

    def publish(self, tables: Tables, ids: list[int], computed: int) -> None:
        """Makes the blocks findable that are full of known ids and planned, `computed` positions being so."""
        full = min(computed, len(ids)) // self.block_tokens
        if not self._prefix or full <= tables.published:
            return
        extend(tables.hashes, tables.root, ids, self.block_tokens)
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
        """Drops all blocks, tails first in all groups alike, so that heads of prefixes are found longest. `forget`:
        what they hold is not fit to be found."""
        for column in zip(*(reversed(blocks) for blocks in tables.blocks), strict=True):
            for block in column:
                if block != NULL_BLOCK:
                    if forget:
                        self.pool.forget(block)
                    self.pool.drop(block)
        tables.clear()

    def _release(self, tables: Tables, position: int) -> None:
        for index, group in enumerate(self.groups):
            needed = group.needed_from(position) // self.block_tokens
            blocks = tables.blocks[index]
            for i in range(tables.released[index], min(needed, len(blocks))):
                self.pool.drop(blocks[i])
                blocks[i] = NULL_BLOCK
            tables.released[index] = max(tables.released[index], min(needed, len(blocks)))

    def _set_touch(self, tables: Tables, blocks: int) -> None:
        touch = blocks * self.block_tokens
        for group, released in zip(self.groups, tables.released, strict=True):
            if group.window is not None:
                touch = min(touch, (released + 1) * self.block_tokens + group.window - 1)
        tables.touch = touch
