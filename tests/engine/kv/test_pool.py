"""The pool of blocks: order of reuse, holders, keys."""

import random

import pytest

from engine.kv.pool import Pool


def key(number):
    return 0, bytes([number])


def test_the_null_block_is_never_given_out():
    pool = Pool(4)
    assert {pool.take() for _ in range(3)} == {1, 2, 3}
    assert pool.free == 0


def test_blocks_without_content_go_first_then_the_least_recently_held():
    pool = Pool(5)
    blocks = [pool.take() for _ in range(3)]
    for number, block in enumerate(blocks):
        pool.publish(block, key(number))
    for block in (blocks[1], blocks[0], blocks[2]):
        pool.drop(block)
    assert pool.take() == 4, "one that never held anything"
    assert pool.find(key(1)) == blocks[1]
    assert [pool.take() for _ in range(3)] == [blocks[1], blocks[0], blocks[2]]
    assert [pool.find(key(number)) for number in range(3)] == [None] * 3


def test_a_found_block_is_kept_while_it_is_held_by_any():
    pool = Pool(2)
    block = pool.take()
    pool.publish(block, key(1))
    pool.drop(block)
    for _ in range(2):
        pool.hold(pool.find(key(1)))
    pool.drop(block)
    assert pool.free == 0
    pool.drop(block)
    assert pool.free == 1 and pool.find(key(1)) == block


def test_the_first_block_with_a_key_stays_the_one_found():
    pool = Pool(3)
    first, second = pool.take(), pool.take()
    pool.publish(first, key(1))
    pool.publish(second, key(1))
    pool.drop(second)
    assert pool.find(key(1)) == first
    assert pool.take() == second, "it holds nothing that could be found"


def test_a_block_dropped_once_too_often_is_noticed():
    pool = Pool(2)
    block = pool.take()
    pool.drop(block)
    with pytest.raises(AssertionError, match="dropped more often"):
        pool.drop(block)


def test_after_forgetting_all_every_free_block_can_be_taken_and_nothing_is_found():
    rng = random.Random(7)
    pool = Pool(12)
    held = [pool.take() for _ in range(9)]
    for number, block in enumerate(held):
        pool.publish(block, key(number))
    rng.shuffle(held)
    for block in held[:5]:
        pool.drop(block)
    pool.forget_all()
    assert pool.free == 7
    taken = [pool.take() for _ in range(7)]
    assert len(set(taken)) == 7 and not set(taken) & set(held[5:])
    assert all(pool.find(key(number)) is None for number in range(9))
