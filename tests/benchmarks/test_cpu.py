"""The benchmark beside peers: what it reads, and a whole run of its own sides on a small shape."""

import argparse
import json
import sys

import pytest

from benchmarks import cpu
from benchmarks.cpu import Job, job, prompts


def test_jobs_are_read_as_they_are_named():
    for text in ("decode:8:1024", "prefill:512"):
        assert job(text).name == text
    assert (job("decode:8:64"), job("prefill:512")) == (Job(8, 64), Job(0, 512))
    for wrong in ("decode:8", "prefill:1:2", "other:1"):
        with pytest.raises(argparse.ArgumentTypeError, match="must be decode:BATCH:CONTEXT or prefill:TOKENS"):
            job(wrong)


def test_prompts_differ_and_stay_in_the_vocabulary():
    made = prompts(3, 50, 97)
    assert len({tuple(ids) for ids in made}) == 3 and all(10 <= token < 97 for ids in made for token in ids)


@pytest.mark.slow
def test_a_run_writes_the_rates_of_every_side_and_job(tmp_path, monkeypatch, capsys):
    out = tmp_path / "cpu.json"
    arguments = ["--shape", "small", "--checkpoint", str(tmp_path / "small"), "--rounds", "2", "--out", str(out)]
    sides = ["--sides", "slipway:stored@base", "slipway:int4@base", "transformers:float32"]
    jobs = ["--jobs", "decode:2:20", "prefill:40", "--threads", "1", "--busy"]
    monkeypatch.setattr(sys, "argv", ["cpu", *arguments, *sides, *jobs])
    cpu.main()
    found = json.loads(out.read_text())
    assert found["settings"]["busy"] is True
    assert {name: set(rates) for name, rates in found["tokens_per_s"].items()} == {
        "decode:2:20": set(sides[1:]),
        "prefill:40": set(sides[1:]),
    }
    assert all(
        len(values) == 2 and min(values) > 0 for rates in found["tokens_per_s"].values() for values in rates.values()
    )
    assert "decode:2:20, tokens a second" in capsys.readouterr().out
