"""LoRA kernels: constants that other parts know, spans of outputs, and refused arguments."""

import pytest
import torch

from engine.layers.lora import AdapterRows
from engine.lowering.adapters import MOST_GROUPS, PART_INPUTS
from kernels.experts.schedule import EXPERT_SCHEDULE
from kernels.jit import installed, interpreted
from kernels.lora_expand import BLOCK, LORA_EXPAND, spans_of
from kernels.lora_shrink import LORA_SHRINK, SPLIT

pytestmark = [pytest.mark.skipif(not installed() or not interpreted(), reason="needs Triton's interpreter")]


def test_plans_know_the_parts_of_the_sums() -> None:
    assert PART_INPUTS == SPLIT


def test_spans_have_one_source_and_fit_into_a_program() -> None:
    spans = spans_of([(5, 2 * BLOCK + 1, 0), (2 * BLOCK + 6, 3, 1)])
    assert spans == [(5, BLOCK + 5, 0), (BLOCK + 5, 2 * BLOCK + 5, 0), (2 * BLOCK + 5, 2 * BLOCK + 6, 0),
                     (2 * BLOCK + 6, 2 * BLOCK + 9, 1)]  # fmt: skip


def test_rows_of_the_largest_group_are_computed() -> None:
    """Rows of the first and the last of as many groups as are supported, and rows without a group."""
    groups = torch.tensor([[MOST_GROUPS - 1], [MOST_GROUPS], [0]], dtype=torch.int32)
    pairs, tiles = EXPERT_SCHEDULE(groups, MOST_GROUPS, 16)
    a = torch.zeros(MOST_GROUPS, 2, 16)
    a[-1], a[0] = 1.0, 2.0
    u = LORA_SHRINK(torch.ones(3, 2), a, pairs, tiles, 1, 16)
    assert u[0, ::2, 0].tolist() == [2.0, 4.0]


def test_rows_without_an_adapter_take_no_tile_and_do_not_change() -> None:
    """Their products are undefined, and may be infinite."""
    rows = AdapterRows.of(torch.tensor([[1], [2], [0], [2]], dtype=torch.int32), 2)
    assert (rows.tiles[:, 2] > rows.tiles[:, 1]).sum() == 2
    u, y = torch.full((1, 4, 16), torch.nan), torch.zeros(4, 4)
    u[:, [0, 2]] = 1.0
    ranks, spans = torch.tensor([[1], [1]], dtype=torch.int32), torch.tensor([[0, 4, 0]], dtype=torch.int32)
    LORA_EXPAND(u, torch.full((2, 2, 4), 3.0), ranks, spans, rows.pairs, rows.tiles, rows.tile_rows, y)
    assert y.tolist() == [[3.0] * 4, [0.0] * 4, [3.0] * 4, [0.0] * 4]


def test_a_slot_without_an_adapter_changes_nothing() -> None:
    """A slot keeps the matrices of an adapter that has left it, and its rank is 0."""
    pairs, tiles = EXPERT_SCHEDULE.reference(torch.tensor([[0], [1]], dtype=torch.int32), 3, 16)
    spans = torch.tensor([[0, 4, 0]], dtype=torch.int32)
    ranks, y = torch.tensor([[0], [1]], dtype=torch.int32), torch.zeros(2, 4)
    LORA_EXPAND(torch.ones(1, 2, 16), torch.full((2, 2, 4), 3.0), ranks, spans, pairs, tiles, 16, y)
    assert y.tolist() == [[0.0] * 4, [3.0] * 4]


def test_wrong_arguments_are_refused() -> None:
    pairs, tiles = EXPERT_SCHEDULE.reference(torch.zeros(2, 1, dtype=torch.int32), 2, 16)
    a, u, b = torch.zeros(1, 8, 16), torch.zeros(1, 2, 16), torch.zeros(1, 4, 6)
    ranks, spans = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([[0, 6, 0]], dtype=torch.int32)
    with pytest.raises(ValueError, match="a: the matrices of the groups must be contiguous"):
        LORA_SHRINK(torch.zeros(2, 16), a.transpose(1, 2), pairs, tiles, 1, 16)
    with pytest.raises(ValueError, match=r"x of \[3, 8\]: 2 pairs, 1 per row"):
        LORA_SHRINK(torch.zeros(3, 8), a, pairs, tiles, 1, 16)
    with pytest.raises(ValueError, match=r"y of \[2, 5\]: 2 pairs need rows of 6 outputs"):
        LORA_EXPAND(u, b, ranks, spans, pairs, tiles, 16, torch.zeros(2, 5))
    with pytest.raises(ValueError, match="b: must be contiguous"):
        LORA_EXPAND(u, b.transpose(1, 2), ranks, spans, pairs, tiles, 16, torch.zeros(2, 4))
