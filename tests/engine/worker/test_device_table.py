"""Tests of the device table: it equals the host table after staging, and holds nothing before."""

import msgspec
import numpy as np
import pytest
import torch

from engine.api.messages import Sampling
from engine.core.plan import NewRow, Row, StepPlan
from engine.kv.layout import Group, Layout
from engine.sampling.columns import Columns
from engine.worker.device_table import DeviceTable, StepUpload
from engine.worker.rows import plan_rows
from engine.worker.table import RequestTable
from kernels.sampling.columns import FIELDS, join_float64

VOCAB, SLOTS, CONTEXT = 40, 5, 90
FORM = Layout((Group("full", (0,), None), Group("window", (1,), 8)), 4, 1, 1, 8, 4)


class Pair:
    """The host's table and the device's, fed the same plans."""

    def __init__(self):
        self.host = RequestTable(slots=SLOTS, max_context=CONTEXT, layout=FORM, vocab=VOCAB)
        self.device = DeviceTable(slots=SLOTS, max_context=CONTEXT, layout=FORM, device=torch.device("cpu"))
        self.upload = StepUpload(self.device, SLOTS)

    def run(self, plan):
        self.host.apply(plan)
        self.upload.send(plan, plan_rows(plan), self.host.columns)

    def check(self, slot, length):
        assert self.device.tokens[slot, :length].tolist() == self.host.tokens[slot, :length].tolist()
        assert self.device.rope_lengths[slot] == self.host.rope_lengths[slot]
        blocks = -(-length // FORM.block_tokens)
        for group, table in enumerate(self.host.tables):
            assert self.device.tables[group, slot, :blocks].tolist() == table[slot, :blocks].tolist()


def new(slot, length, draw=0, **sampling):
    ids = tuple(np.random.default_rng(draw).integers(0, VOCAB, length).tolist())
    return NewRow(slot, ids, length, Sampling(**sampling), (), length + 3)


def row(slot, first, count, *blocks):
    return Row(slot, first, count, True, blocks or ((), ()))


@pytest.fixture
def pair():
    return Pair()


def test_tokens_blocks_and_columns_arrive(pair):
    pair.run(
        StepPlan(
            1,
            (new(3, 9, temperature=0.5, top_p=0.25, top_k=7, seed=2**63 + 5), new(1, 2, min_p=0.125)),
            (),
            (row(3, 0, 9, (4, 5, 6), (7, 8, 9)), row(1, 0, 2, (1,), (2,))),
        )
    )
    pair.check(3, 9)
    pair.check(1, 2)
    columns = pair.device.columns
    assert (columns.temperature[3], columns.top_k[3]) == (0.5, 7)
    assert join_float64(columns.top_p_low, columns.top_p_high)[3] == 0.25
    assert join_float64(columns.log_min_p_low, columns.log_min_p_high)[1] == np.log(0.125)
    assert (int(columns.seed_low[3]) % 2**32) + (int(columns.seed_high[3]) % 2**32 << 32) == 2**63 + 5
    assert pair.upload.slot[:2].tolist() == [3, 1] and pair.upload.first[:2].tolist() == [0, 0]
    assert pair.upload.query_start[:4].tolist() == [0, 9, 11, 11]


def test_blocks_are_appended_and_a_new_request_starts_over(pair):
    pair.run(StepPlan(1, (new(0, 4),), (), (row(0, 0, 4, (1,), (2,)),)))
    pair.run(StepPlan(2, (), (), (row(0, 4, 1, (3,), (4,)),)))
    pair.run(StepPlan(3, (), (), (row(0, 5, 1),)))
    assert pair.device.tables[:, 0, :2].tolist() == [[1, 3], [2, 4]]
    pair.run(StepPlan(4, (new(0, 5, draw=1),), (0,), (row(0, 0, 5, (9, 8), (7, 6)),)))
    assert pair.device.tables[:, 0, :2].tolist() == [[9, 8], [7, 6]]
    pair.check(0, 5)


def test_unstaged_data_is_not_visible(pair):
    plan = StepPlan(1, (new(2, 6),), (), (row(2, 0, 6, (1, 2), (3, 4)),))
    pair.host.apply(plan)
    assert not pair.device.memory.any()
    with pytest.raises(AssertionError, match="step 1 runs, but the last upload was for step -1"):
        pair.upload.check(plan)


def test_large_changes_use_several_uploads(pair):
    plan = StepPlan(1, tuple(new(slot, CONTEXT, draw=slot) for slot in range(SLOTS)), (), ())
    pair.upload._capacity = pair.upload._head + CONTEXT + 20
    pair.run(plan)
    for slot in range(SLOTS):
        assert pair.device.tokens[slot, :CONTEXT].tolist() == pair.host.tokens[slot, :CONTEXT].tolist()


def test_columns_of_other_slots_are_unchanged(pair):
    pair.run(StepPlan(1, (new(0, 3, temperature=0.75),), (), ()))
    pair.run(StepPlan(2, (new(4, 3, temperature=0.25),), (), ()))
    assert pair.device.columns.temperature[[0, 4]].tolist() == [0.75, 0.25]


def test_segment_starts_are_staged():
    table = DeviceTable(slots=SLOTS, max_context=CONTEXT, layout=FORM, device=torch.device("cpu"), segments=3)
    upload = StepUpload(table, SLOTS)
    for step, (segments, begins) in enumerate(
        (((4, 2, 3), [4, 6]), ((9,), [2**31 - 1] * 2), ((5, 4), [5, 2**31 - 1]), ((), [2**31 - 1] * 2))
    ):
        plan = StepPlan(step, (msgspec.structs.replace(new(1, 9), segments=segments),), (), ())
        upload.send(plan, plan_rows(plan), None)
        assert table.segments[1].tolist() == begins
        assert table.tokens[1, :9].tolist() == list(new(1, 9).ids)
    assert not table.segments[[0, 2]].any() and not table.columns.temperature.any()


def test_a_model_without_rows_for_segments_keeps_none(pair):
    assert pair.device.segments is None
    one = DeviceTable(slots=SLOTS, max_context=CONTEXT, layout=FORM, device=torch.device("cpu"), segments=1)
    assert one.segments.shape == (SLOTS, 0) and one.nbytes == pair.device.nbytes


def test_every_sampling_column_has_its_field():
    """A parameter that the host keeps by slot and no kernel could read would be lost on a device. `min_tokens` the host
    looks at itself, as it knows how long each sequence is."""
    dense = {name for name, value in vars(Columns(2, VOCAB)).items() if isinstance(value, np.ndarray)}
    found = {name.removesuffix("_low").removeprefix("log_") for name in FIELDS}
    assert dense - {"min_tokens"} <= found


def test_adapters_of_new_requests_arrive() -> None:
    table = DeviceTable(slots=SLOTS, max_context=CONTEXT, layout=FORM, device=torch.device("cpu"), adapters=True)
    upload = StepUpload(table, SLOTS)
    requests = (msgspec.structs.replace(new(3, 2), adapter=7), new(1, 2))
    columns = RequestTable(slots=SLOTS, max_context=CONTEXT, layout=FORM, vocab=VOCAB).columns
    plan = StepPlan(1, requests, (), (row(3, 0, 2, (4,), (5,)),))
    upload.send(plan, plan_rows(plan), columns)
    assert table.adapters is not None
    assert table.adapters[[3, 1]].tolist() == [7, -1]
