"""Selection of keys by the compiled kernels, against the reference of the operation and torch.topk."""

import pytest
import torch

from kernels.attention.select import SELECT_KEYS
from kernels.cpu import program as cpu
from kernels.cpu.library import usable
from kernels.cpu.program import Program, StepData, Team
from kernels.op import Make

CPU = torch.device("cpu")
SIZES = {"heads": 5, "dim": 16, "top_k": 6}
CASES = {
    "mixed": SIZES | {"rows": ((1, 37), (3, 9), (4, 70), (1, 6), (7, 7))},
    "splits": SIZES | {"rows": ((1, 1100), (2, 513), (1, 512), (1, 513)), "top_k": 600, "block_tokens": 16},
    "equal": SIZES | {"rows": ((2, 60), (1, 700), (5, 30)), "top_k": 16, "equal": True},
    "many-heads": {"rows": ((4, 20), (1, 20)), "heads": 65, "dim": 10, "top_k": 1},
}


def selected(team, args):
    """Run the compiled kernel on the arguments of the operation."""
    q, weights, pages, layer, table, slot, query_start, lengths, out = args
    count = query_start.diff().to(torch.int64)
    op = cpu.Select(
        q=q.data_ptr(),
        weights=weights.data_ptr(),
        selected=out.data_ptr(),
        q_stride=q.stride(0),
        weights_stride=weights.stride(0),
        heads=q.shape[1],
        dim=q.shape[2],
        top_k=out.shape[1],
        group=0,
        layer=layer,
    )
    step = StepData(
        len(q),
        first=lengths.to(torch.int64) - count,
        count=count,
        tables=[table[slot.long()].to(torch.int64).contiguous()],
        slot_mapping=[torch.empty(0, dtype=torch.int64)],
        pages=pages,
    )
    team.run(Program([op], (q, weights, out, pages)), step)
    return out


@pytest.fixture(scope="module", params=[(variant, threads) for variant in usable() for threads in (1, 3)], ids=str)
def team(request):
    made = Team(*request.param)
    yield made
    made.close()


@pytest.mark.parametrize("case", CASES)
def test_compiled_selection_equals_the_reference(case, team):
    args = SELECT_KEYS.inputs(Make(CPU, torch.float32, 1), **CASES[case])
    (want,) = SELECT_KEYS.reference(*args[:-1], torch.full_like(args[-1], 7))
    assert torch.equal(selected(team, (*args[:-1], torch.full_like(args[-1], 7))), want)


@pytest.mark.parametrize("pages", [torch.float16, torch.bfloat16], ids=str)
def test_compiled_selection_reads_pages_in_16_bits(pages, team):
    q, weights, wide, *rest = SELECT_KEYS.inputs(Make(CPU, torch.float32, 2), **CASES["mixed"])
    narrow = wide.to(pages)
    (want,) = SELECT_KEYS.reference(q, weights, narrow.float(), *rest[:-1], torch.zeros_like(rest[-1]))
    assert torch.equal(selected(team, (q, weights, narrow, *rest[:-1], torch.zeros_like(rest[-1]))), want)


@pytest.mark.parametrize("top_k", [16, 2048])
def test_selected_keys_are_those_of_topk(top_k, team):
    """The positions of a short row end with -1."""
    sizes = {"rows": ((1, 2100), (1, 9)), "heads": 16, "dim": 8, "top_k": top_k, "layers": 1}
    args = SELECT_KEYS.inputs(Make(CPU, torch.float32, 3), **sizes)
    q, weights, pages, _, table, slot, *_ = args
    keys = pages[table[slot[0], :525].long(), 0, 0, :, 0].flatten(0, 1)
    scores = ((q[0] @ keys.T).relu() * weights[0].unsqueeze(1)).sum(0)
    found = selected(team, args)
    assert set(found[0].tolist()) == set(scores.topk(top_k).indices.tolist())
    assert found[1].tolist() == [*range(9), *[-1] * (top_k - 9)]


def test_scores_that_are_not_numbers_select_valid_positions(team):
    q, *args = SELECT_KEYS.inputs(Make(CPU, torch.float32, 4), **CASES["mixed"])
    found = selected(team, (q.fill_(torch.nan), *args))
    for line, seen in zip(found.tolist(), [37, 7, 8, 9, 67, 68, 69, 70, 6, *range(1, 8)], strict=True):
        kept = [one for one in line if one >= 0]
        assert len(kept) == min(seen, 6) and kept == sorted(set(kept)) and max(kept) < seen
