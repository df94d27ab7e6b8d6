"""Sums of ranks, timed: a table in the order asked for, sums that are checked, and readable refusals."""

import json

import pytest

from benchmarks import ranks
from kernels.cpu.library import usable

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


def test_a_side_that_does_not_add_up_is_found(monkeypatch):
    monkeypatch.setattr(ranks, "in_order", lambda shares: shares[0])
    with pytest.raises(AssertionError, match="beside the sum"):
        ranks.main(SMALL)


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
