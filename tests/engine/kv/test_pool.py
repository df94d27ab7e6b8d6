"""The pool of blocks: order of reuse, holders, keys."""

import random

import pytest

from engine.kv.pool import Pool


def key(number):
    return 0, bytes([number])


def test_null_block_is_never_allocated():
    pool = Pool(4)
    assert {pool.allocate() for _ in range(3)} == {1, 2, 3}
    assert pool.free == 0


def test_uncached_blocks_are_allocated_first_then_least_recently_used():
    pool = Pool(5)
    blocks = [pool.allocate() for _ in range(3)]
    for number, block in enumerate(blocks):
        pool.publish(block, key(number))
    for block in (blocks[1], blocks[0], blocks[2]):
        pool.release(block)
    assert pool.allocate() == 4, "one that never held anything"
    assert pool.find(key(1)) == blocks[1]
    assert [pool.allocate() for _ in range(3)] == [blocks[1], blocks[0], blocks[2]]
    assert [pool.find(key(number)) for number in range(3)] == [None] * 3


def test_found_block_is_kept_while_it_has_holders():
    pool = Pool(2)
    block = pool.allocate()
    pool.publish(block, key(1))
    pool.release(block)
    for _ in range(2):
        pool.acquire(pool.find(key(1)))
    pool.release(block)
    assert pool.free == 0
    pool.release(block)
    assert pool.free == 1 and pool.find(key(1)) == block


def test_the_first_block_with_a_key_stays_the_one_found():
    pool = Pool(3)
    first, second = pool.allocate(), pool.allocate()
    pool.publish(first, key(1))
    pool.publish(second, key(1))
    pool.release(second)
    assert pool.find(key(1)) == first
    assert pool.allocate() == second, "it holds nothing that could be found"


def test_releasing_a_free_block_fails():
    pool = Pool(2)
    block = pool.allocate()
    pool.release(block)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(block)


def test_after_forgetting_all_every_free_block_can_be_taken_and_nothing_is_found():
    rng = random.Random(7)
    pool = Pool(12)
    held = [pool.allocate() for _ in range(9)]
    for number, block in enumerate(held):
        pool.publish(block, key(number))
    rng.shuffle(held)
    for block in held[:5]:
        pool.release(block)
    pool.forget_all()
    assert pool.free == 7
    taken = [pool.allocate() for _ in range(7)]
    assert len(set(taken)) == 7 and not set(taken) & set(held[5:])
    assert all(pool.find(key(number)) is None for number in range(9))
