"""Prefix hits of chunked attention: the blocks of the chunk in which the next position is."""

import pytest

from engine.kv.cache import Cache, Hit, Tables
from engine.kv.layout import Group

IDS = list(range(24))  # 6 blocks of 4 tokens, 2 chunks of 12


def cached() -> tuple[Cache, list[int]]:
    """Return a cache that a sequence filled and left, and its blocks."""
    cache, tables = Cache([Group("g", (0,), None, 12)], 4, 20), Tables(b"", 1)
    assert cache.grow(tables, IDS, 0, len(IDS)) is not None
    cache.publish(tables, IDS, len(IDS))
    blocks = list(tables.blocks[0])
    cache.end(tables)
    return cache, blocks


def test_last_token_of_a_cached_chunk_is_recomputed_alone():
    cache, blocks = cached()
    tables = Tables(b"", 1)
    hit = cache.lookup(tables, IDS)
    assert hit == Hit(23, 24)
    cache.start(tables, hit)
    assert tables.blocks[0] == [0, 0, 0, *blocks[3:]]


@pytest.mark.parametrize(("missing", "tokens"), [(3, 12), (4, 16), (5, 20)])
def test_last_token_of_a_chunk_that_lacks_a_block_is_not_recomputed_alone(missing, tokens):
    """At the start of the next chunk, no block is needed, so the complete prompt counts as cached."""
    cache, blocks = cached()
    cache.pool.forget(blocks[missing])
    tables = Tables(b"", 1)
    hit = cache.lookup(tables, IDS)
    assert hit == Hit(tokens, 24)
    cache.start(tables, hit)


def test_hit_at_the_start_of_a_chunk_needs_no_block():
    cache, blocks = cached()
    for block in blocks[:3]:
        cache.pool.forget(block)
    assert cache.lookup(Tables(b"", 1), [*IDS, 5]) == Hit(24, 24)
