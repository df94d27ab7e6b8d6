"""The request table under plans that come and go."""

import numpy as np
import pytest

from engine.api.messages import Sampling
from engine.core.plan import NewRow, Row, StepPlan
from engine.kv.layout import Group, Layout
from engine.worker.table import RequestTable

LAYOUT = Layout((Group("full.0", (0,), None), Group("window6.0", (1,), 6)), 4, 1, 1, 8, 4)


@pytest.fixture
def table() -> RequestTable:
    return RequestTable(slots=3, max_context=18, layout=LAYOUT, vocab=11)


def new(slot: int, ids: tuple[int, ...], sampling: Sampling | None = None) -> NewRow:
    return NewRow(slot, ids, len(ids), sampling or Sampling(), (), 9)


def test_blocks_are_appended_per_group_from_row_to_row(table):
    table.apply(StepPlan(1, (new(1, (5, 6, 7)),), (), (Row(1, 0, 3, True, ((4,), (9,))),)))
    table.apply(StepPlan(2, (), (), (Row(1, 3, 1, True, ((), ())),)))
    table.apply(StepPlan(3, (), (), (Row(1, 4, 1, True, ((5, 2), (0,))),)))
    assert table.tables[0][1].tolist() == [4, 5, 2, 0, 0]
    assert table.tables[1][1].tolist() == [9, 0, 0, 0, 0]
    assert not table.tables[0][[0, 2]].any()


def test_a_slot_dropped_and_taken_in_one_plan_belongs_to_the_new_request(table):
    everything = Sampling(logit_bias={3: 1.0}, allowed_token_ids=(3,), bad_words=((1,),), logprobs=1, prompt_logprobs=1)
    table.apply(StepPlan(1, (new(2, (5,) * 18, everything),), (), (Row(2, 0, 18, True, ((1, 2, 3, 4, 5), (6,))),)))
    table.apply(StepPlan(2, (new(2, (8, 9)),), (2,), (Row(2, 0, 2, True, ((7,), (8,))),)))
    assert table.tables[0][2].tolist() == [7, 0, 0, 0, 0] and table.tables[1][2].tolist() == [8, 0, 0, 0, 0]
    assert table.tokens[2, :2].tolist() == [8, 9] and table.rope_lengths[2] == 9
    columns = table.columns
    assert not (columns.bias or columns.allowed or columns.bad_words or columns.logprobs or columns.prompt_logprobs)


def test_sampled_tokens_are_written_for_the_next_step(table):
    table.apply(StepPlan(1, (new(0, (1,)), new(2, (1,) * 18)), (), ()))
    table.write(np.array([2, 0]), np.array([18, 1]), np.array([10, 3]))  # one past the longest context is room enough
    assert table.tokens[2, 18] == 10 and table.tokens[0, 1] == 3
