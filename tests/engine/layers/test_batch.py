"""The tensors of a step against a loop over its tokens."""

import numpy as np
import torch

from engine.worker.batch import build_batch

TOKENS = np.arange(60, dtype=np.int32).reshape(4, 15)
TABLES = (np.array([[5, 9, 2], [0, 7, 1], [3, 0, 0], [8, 6, 4]], np.int32), np.array([[1, 2, 3]] * 4, np.int32))
ROPE = np.array([15, 3, 0, 7], np.int32)


def built(rows):
    slots, first, count = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    return build_batch(slots, first, count, tokens=TOKENS, rope_lengths=ROPE, tables=TABLES, block_tokens=5)


def test_each_token_of_each_row_has_its_id_position_length_and_slot():
    rows = [(3, 4, 6), (0, 0, 1), (1, 11, 2)]
    batch = built(rows)
    places = [(slot, position) for slot, first, count in rows for position in range(first, first + count)]
    assert batch.ids.tolist() == [int(TOKENS[place]) for place in places]
    assert batch.positions.tolist() == [position for _, position in places]
    assert batch.rope_lengths.tolist() == [max(int(ROPE[slot]), position + 1) for slot, position in places]
    for table, slots in zip(TABLES, batch.slot_mapping, strict=True):
        assert slots.tolist() == [int(table[slot, p // 5]) * 5 + p % 5 for slot, p in places]
    assert batch.query_start.tolist() == [0, 6, 7, 9] and batch.last.tolist() == [5, 6, 8]
    assert batch.lengths.tolist() == [10, 1, 13]
    assert (batch.first, batch.count, batch.rows, batch.tokens) == ((4, 0, 11), (6, 1, 2), 3, 9)


def test_tables_are_those_of_the_rows_cut_to_the_longest():
    batch = built([(3, 0, 2), (1, 7, 3)])
    assert batch.tables[0].tolist() == [[8, 6], [0, 7]]


def test_a_step_without_rows_is_empty():
    none = np.zeros(0, np.int64)
    batch = build_batch(none, none, none, tokens=TOKENS, rope_lengths=ROPE, tables=TABLES, block_tokens=5)
    assert (batch.rows, batch.tokens, batch.query_start.tolist()) == (0, 0, [0])
    assert all(tensor.dtype == torch.int64 for tensor in (batch.ids, batch.positions, *batch.slot_mapping))
