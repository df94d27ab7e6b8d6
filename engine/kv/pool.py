"""Blocks of device memory: who holds them, and which of them hold a known prefix. Every operation is O(1) a block.

A block that nobody holds keeps its content, findable by its key, until it is taken again. Blocks without a key are
taken first, then the findable ones, least recently held first.
"""

from collections import OrderedDict

from engine.kv.layout import NULL_BLOCK

Key = tuple[int, bytes]  # group, hash of all tokens up to the end of the block


class Pool:
    def __init__(self, blocks: int) -> None:
        """`blocks` counts the null block, which is never given out."""
        self.size = blocks
        self.holders = [0] * blocks
        self._blank = list(range(blocks - 1, NULL_BLOCK, -1))  # free and without a key; the last is taken first
        self._findable: OrderedDict[int, None] = OrderedDict()  # free with a key, least recently held first
        self._key: list[Key | None] = [None] * blocks
        self._by_key: dict[Key, int] = {}

    @property
    def free(self) -> int:
        return len(self._blank) + len(self._findable)

    @property
    def used(self) -> int:
        return self.size - 1 - self.free

    def find(self, key: Key) -> int | None:
        return self._by_key.get(key)

    def take(self) -> int:
        """A block of one holder with no key. The caller has looked at `free`."""
        if self._blank:
            block = self._blank.pop()
        else:
            block, _ = self._findable.popitem(last=False)
            self.forget(block)
        self.holders[block] = 1
        return block

    def hold(self, block: int) -> None:
        """One more holder of a findable block."""
        if self.holders[block] == 0:
            del self._findable[block]
        self.holders[block] += 1

    def drop(self, block: int) -> None:
        """One holder less; after the last one the block is free at once: steps run in the order they were planned."""
        holders = self.holders[block] - 1
        assert holders >= 0, f"block {block} was dropped more often than held"
        self.holders[block] = holders
        if holders == 0:
            if self._key[block] is None:
                self._blank.append(block)
            else:
                self._findable[block] = None

    def publish(self, block: int, key: Key) -> bool:
        """Makes a held, full block findable, and says whether its content was not. The first block with a key stays the
        one found."""
        if self._key[block] is not None or key in self._by_key:
            return False
        self._by_key[key], self._key[block] = block, key
        return True

    def forget(self, block: int) -> None:
        """The block's content is no longer to be found (its holders keep it)."""
        key = self._key[block]
        if key is not None:
            del self._by_key[key]
            self._key[block] = None

    def forget_all(self) -> None:
        self._blank += reversed(self._findable)
        self._findable.clear()
        self._by_key.clear()
        self._key = [None] * self.size
