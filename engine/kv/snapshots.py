"""Snapshots of recurrent state at block boundaries, so that prefixes of recurrent and hybrid models can be reused.

A recurrent layer keeps one state per sequence, which is overwritten by every step. The state after n tokens is
therefore only available if it was copied when it was computed. Steps of a sequence end at chosen block boundaries, and
the plan tells the worker to copy the state to a snapshot after the step. A snapshot has the key of the last block of
its prefix. A prefix is a hit only if there is a snapshot of exactly its length; it is copied to the state of the
request before the first step.

Snapshots are taken at the last block boundary before the end of the known tokens, which serves the same prompt and its
continuations; where a prompt leaves the cached keys and values of another one, which serves shared system prompts (the
branch point of Marconi, arXiv:2411.19379); and after every `interval` tokens, which limits what a preempted request
computes again. The least recently used snapshot is replaced.

The copy to a snapshot follows the step, and copies from snapshots precede it. A snapshot is therefore published when
the next step is planned, and can be reused at once.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from engine.kv.pool import Pool

INTERVAL = 1024  # tokens between snapshots of a long prompt or reply
NEVER = 2**31


@dataclass(slots=True)
class SavePoints:
    """Snapshots of one running sequence."""

    marks: tuple[int, ...] = ()  # positions at which a step of its known tokens ends, with a snapshot
    due: int = NEVER  # block boundary from which on the next snapshot is taken, besides `marks`
    saved: list[tuple[int, int]] = field(default_factory=list)  # (tokens, snapshot) that are not published yet


class Snapshots:
    def __init__(self, count: int, block_tokens: int) -> None:
        self.pool = Pool(count + 1)  # number 0 is not used
        self.block_tokens = block_tokens
        self._interval = max(1, INTERVAL // block_tokens) * block_tokens

    def longest(self, hashes: Items[bytes], limit: int) -> int:
        """Return the length in blocks, at most `limit`, of the longest prefix that has a snapshot; 0 without one."""
        find = self.pool.find
        return next((n for n in range(limit, 0, -1) if find((0, hashes[n - 1])) is not None), 0)

    def start(self, points: SavePoints, hashes: Items[bytes], tokens: int, branch: int, total: int) -> int | None:
        """Begin a sequence of `total` tokens with a hit of `tokens`. Return the snapshot to restore, or None without a
        hit. branch: tokens whose keys and values are cached."""
        block_tokens = self.block_tokens
        points.marks = (branch, (total - 1) // block_tokens * block_tokens)
        points.due = tokens + self._interval
        if not tokens:
            return None
        found = self.pool.find((0, hashes[tokens // block_tokens - 1]))
        assert found is not None, "the snapshot of a hit is cached"
        self._refresh(found)
        return found

    def cut(self, points: SavePoints, first: int, end: int, total: int) -> int:
        """Return the position, at most `end`, at which a step from `first` ends: the next mark, or a block boundary if
        the step does not complete the `total` known tokens."""
        if end < total:
            boundary = end // self.block_tokens * self.block_tokens
            end = boundary if boundary > first else end
        return min((mark for mark in points.marks if first < mark < end), default=end)

    def save(self, points: SavePoints, hashes: Items[bytes], end: int) -> int | None:
        """Return the snapshot to which the state is copied after a step that ends at `end`, or None if none is due or
        all are waiting to be published."""
        if end % self.block_tokens or (end < points.due and end not in points.marks):
            return None
        points.due = end + self._interval
        number = end // self.block_tokens - 1
        known = self.pool.find((0, hashes[number])) if number < len(hashes) else None
        if known is not None:
            self._refresh(known)
            return None
        if not self.pool.free:
            return None
        snapshot = self.pool.allocate()
        points.saved.append((end, snapshot))
        return snapshot

    def drafts_before(self, points: SavePoints, known: int) -> int:
        """Return how many drafts may follow `known` tokens. A step with drafts cannot be saved, so none reaches the
        block boundary at which a snapshot is due."""
        boundary = -(-max(points.due, known) // self.block_tokens) * self.block_tokens
        return max(0, boundary - 1 - known)

    def publish(self, points: SavePoints, hashes: Items[bytes]) -> None:
        """Publish the snapshots of earlier steps whose tokens are all known. hashes: of all full blocks."""
        waiting = []
        for tokens, snapshot in points.saved:
            number = tokens // self.block_tokens - 1
            if number >= len(hashes):
                waiting.append((tokens, snapshot))
                continue
            self.pool.publish(snapshot, (0, hashes[number]))
            self.pool.release(snapshot)
        points.saved = waiting

    def end(self, points: SavePoints, hashes: Items[bytes], *, forget: bool) -> None:
        """Drop the snapshots that were not published. `forget`: also make all of the sequence's unfindable."""
        for _, snapshot in points.saved:
            self.pool.release(snapshot)
        points.saved = []
        points.marks, points.due = (), NEVER
        if forget:
            for key in hashes:
                found = self.pool.find((0, key))
                if found is not None:
                    self.pool.forget(found)

    def _refresh(self, snapshot: int) -> None:
        """Make a snapshot the most recently used one."""
        self.pool.acquire(snapshot)
        self.pool.release(snapshot)
