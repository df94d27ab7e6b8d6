"""Sums of ranks, timed: a table in the order asked for, sums that are checked, and readable refusals."""

import json
import os

import pytest
import torch

from benchmarks import ranks
from engine.distributed.group import open_group
from kernels.cpu.library import usable
from kernels.cpu.shm_collective import ShmCollective

SMALL = ("--rows", "3,1", "--hidden", "40", "--rounds", "2", "--device", "cpu")


def test_every_backend_has_a_line_per_shape_in_the_given_order(tmp_path, capsys):
    file = tmp_path / "ranks.json"
    assert ranks.main([*SMALL, "--json", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("2 ranks on cpu, torch ")
    assert lines[1].split() == ["side", "rows", "hidden", "us", "x", "own"]
    backends = [*([f"shared memory ({usable()[0]})"] if usable() else []), "gloo, in order", "gloo's own"]
    found = json.loads(file.read_text())
    assert [(row["rows"], row["side"]) for row in found["rows"]] == [
        (rows, side) for rows in (3, 1) for side in backends
    ]
    assert len(lines) == 2 + len(found["rows"]) and all(line.startswith(tuple(backends)) for line in lines[2:])
    assert all(0 < row["low"] <= row["us"] <= row["high"] for row in found["rows"])
    assert lines[-1].endswith(" 1.00")


def test_backend_with_a_wrong_sum_is_detected():
    wanted = torch.randn(3, 40)
    ranks.check("right", wanted + 1e-7, wanted)
    with pytest.raises(AssertionError, match="wrong: .* beside the sum"):
        ranks.check("wrong", wanted + 1e-3, wanted)


def broken(settings, rank):
    """Rank 1 is gone where rank 0 waits for it in memory."""
    if rank == 1:
        open_group(torch.device("cpu"), settings.folder / "group", rank, settings.ranks, ordered=True, timeout_s=60)
        with (settings.folder / "memory").open("r+b") as file:
            ShmCollective(usable()[0], file.fileno(), rank, settings.ranks, max(settings.rows) * settings.hidden)
        os._exit(7)
    return ranks.measured(settings, rank)


@pytest.mark.skipif(not usable(), reason="there are no compiled kernels here")
def test_exit_of_one_rank_ends_all_including_waiting_ones(tmp_path):
    settings = ranks.Settings(2, (3,), 40, 1, "cpu", tmp_path)
    with pytest.raises(ranks.RankFailed, match="rank 1 of 2 exited with 7"):
        ranks.run_ranks(settings, broken)


@pytest.mark.parametrize(
    ("options", "says"),
    [(("--ranks", "1"), "at least 2"), (("--rows", "0"), "at least 1"), (("--rows", "x"), "x: must")],
)
def test_invalid_options_give_a_one_line_error(options, says, capsys):
    with pytest.raises(SystemExit) as ended:
        ranks.main(options)
    assert ended.value.code == 2 and says in capsys.readouterr().err


def test_too_few_gpus_are_an_error(capsys):
    assert ranks.main(["--device", "cuda", "--ranks", "64"]) == 2
    assert "64 ranks need 64 GPUs; there are" in capsys.readouterr().out
