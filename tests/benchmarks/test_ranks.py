"""Sums of ranks, timed: a table in the order asked for, sums that are checked, and readable refusals."""

import json
import os

import pytest
import torch

from benchmarks import ranks
from engine.distributed.group import open_group
from kernels.cpu.library import usable
from kernels.cpu.meeting import Meeting

SMALL = ("--rows", "3,1", "--hidden", "40", "--rounds", "2", "--device", "cpu")


def test_every_side_has_a_line_of_each_shape_in_the_order_asked_for(tmp_path, capsys):
    file = tmp_path / "ranks.json"
    assert ranks.main([*SMALL, "--ranks", "3", "--json", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("3 ranks on cpu, torch ")
    assert lines[1].split() == ["side", "rows", "hidden", "us", "x", "own"]
    sides = [*([f"shared memory ({usable()[0]})"] if usable() else []), "gloo, in order", "gloo's own"]
    found = json.loads(file.read_text())
    assert [(row["rows"], row["side"]) for row in found["rows"]] == [(rows, side) for rows in (3, 1) for side in sides]
    assert len(lines) == 2 + len(found["rows"]) and all(line.startswith(tuple(sides)) for line in lines[2:])
    assert all(0 < row["low"] <= row["us"] <= row["high"] for row in found["rows"])
    assert lines[-1].endswith(" 1.00")


def test_a_side_that_does_not_add_up_is_found():
    wanted = torch.randn(3, 40)
    ranks.check("right", wanted + 1e-7, wanted)
    with pytest.raises(AssertionError, match="wrong: .* beside the sum"):
        ranks.check("wrong", wanted + 1e-3, wanted)


def broken(asked, rank):
    """Rank 1 is gone where rank 0 waits for it in memory."""
    if rank == 1:
        open_group(torch.device("cpu"), asked.folder / "group", rank, asked.ranks, ordered=True, timeout_s=60)
        with (asked.folder / "memory").open("r+b") as file:
            Meeting(usable()[0], file.fileno(), rank, asked.ranks, max(asked.rows) * asked.hidden)
        os._exit(7)
    return ranks.measured(asked, rank)


@pytest.mark.skipif(not usable(), reason="there are no compiled kernels here")
def test_a_rank_that_ends_ends_them_all_also_who_waits_in_memory(tmp_path):
    asked = ranks.Asked(2, (3,), 40, 1, "cpu", tmp_path)
    with pytest.raises(ranks.RankFailed, match="rank 1 of 2 ended with 7"):
        ranks.together(asked, broken)


@pytest.mark.parametrize(
    ("options", "says"),
    [(("--ranks", "1"), "at least 2"), (("--rows", "0"), "at least 1"), (("--rows", "x"), "x: must")],
)
def test_what_cannot_be_is_said_in_a_line(options, says, capsys):
    with pytest.raises(SystemExit) as ended:
        ranks.main(options)
    assert ended.value.code == 2 and says in capsys.readouterr().err


def test_without_gpus_for_all_ranks_it_says_so(capsys):
    assert ranks.main(["--device", "cuda", "--ranks", "64"]) == 2
    assert "64 ranks need as many GPUs; there are" in capsys.readouterr().out
