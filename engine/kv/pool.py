"""Reference-counted blocks of device memory, and an index of blocks by prefix. Every operation is O(1) per block.

An unused block keeps its contents, findable by key, until it is taken again. Blocks without a key are taken first, then
findable ones in least-recently-used order.
"""

from collections import OrderedDict

from engine.kv.layout import NULL_BLOCK

Key = tuple[int, bytes]  # (group, hash of all tokens up to the end of the block)


class Pool:
    def __init__(self, blocks: int) -> None:
        """`blocks` includes the null block, which is never assigned."""
        self.size = blocks
        self.holders = [0] * blocks
        self._uncached = list(range(blocks - 1, NULL_BLOCK, -1))  # free, without a key; the last is taken first
        self._cached: OrderedDict[int, None] = OrderedDict()  # free, with a key; least recently used first
        self._key: list[Key | None] = [None] * blocks
        self._by_key: dict[Key, int] = {}

    @property
    def free(self) -> int:
        return len(self._uncached) + len(self._cached)

    @property
    def used(self) -> int:
        return self.size - 1 - self.free

    def find(self, key: Key) -> int | None:
        return self._by_key.get(key)

    def allocate(self) -> int:
        """Return a block with one holder and no key. The caller has checked `free`."""
        if self._uncached:
            block = self._uncached.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self.forget(block)
        self.holders[block] = 1
        return block

    def acquire(self, block: int) -> None:
        """Add a holder of a findable block."""
        if self.holders[block] == 0:
            del self._cached[block]
        self.holders[block] += 1

    def release(self, block: int) -> None:
        """Remove a holder. Without holders, the block is free at once, because steps run in the order of their
        plans."""
        holders = self.holders[block] - 1
        assert holders >= 0, f"block {block} was released more often than acquired"
        self.holders[block] = holders
        if holders == 0:
            if self._key[block] is None:
                self._uncached.append(block)
            else:
                self._cached[block] = None

    def publish(self, block: int, key: Key) -> bool:
        """Make a full block findable. Returns whether its contents were not findable before. If several blocks have the
        same contents, the first one is found."""
        if self._key[block] is not None or key in self._by_key:
            return False
        self._by_key[key], self._key[block] = block, key
        return True

    def forget(self, block: int) -> None:
        """Make the block's contents unfindable. Its holders are not affected."""
        key = self._key[block]
        if key is not None:
            del self._by_key[key]
            self._key[block] = None

    def forget_all(self) -> None:
        self._uncached += reversed(self._cached)
        self._cached.clear()
        self._by_key.clear()
        self._key = [None] * self.size
