"""The benchmark beside other engines: what it reads, and a whole run of its own sides on a small shape."""

import argparse
import json
import os
import sys

import pytest

from benchmarks import cpu
from benchmarks.shapes import make
from benchmarks.sides import Job, Name, ik_llama_cpp, job, name, prompts


def test_jobs_are_read_as_they_are_named():
    for text in ("decode:8:1024", "prefill:512"):
        assert job(text).name == text
    assert (job("decode:8:64"), job("prefill:512")) == (Job(8, 64), Job(0, 512))
    for wrong in ("decode:8", "prefill:1:2", "other:1"):
        with pytest.raises(argparse.ArgumentTypeError, match="must be decode:BATCH:CONTEXT or prefill:TOKENS"):
            job(wrong)


def test_sides_are_read_as_they_are_named():
    assert name("slipway@avx2:int8") == Name("slipway", "avx2", "int8")
    for text in ("slipway@avx2:int8", "llama.cpp:Q8_0"):
        assert str(name(text)) == text
    assert name("slipway@avx2:int8").build == "slipway@avx2"
    for wrong in ("slipway", "other:int8"):
        with pytest.raises(argparse.ArgumentTypeError, match="ENGINE one of slipway, slipway-http, llama.cpp"):
            name(wrong)


def test_prompts_differ_and_stay_in_the_vocabulary():
    made = [*prompts(3, 50, 9973), *prompts(3, 50, 9973, start=1)]
    assert len({tuple(ids) for ids in made}) == 6 and all(10 <= token < 9973 for ids in made for token in ids)


def test_no_prompt_begins_with_another_one():
    """An engine with a prefix cache would read such a prompt from it."""
    asked = [(8, 1024, 0), (8, 64, 0), *((1, 512, start) for start in range(1, 41))]
    beginnings = [tuple(ids[:16]) for count, length, start in asked for ids in prompts(count, length, 151936, start)]
    decoded, prefilled = set(beginnings[:8]), beginnings[16:]
    assert len(set(prefilled)) == len(prefilled) and not decoded & set(prefilled)
    assert prompts(2, 64, 151936, 3) == prompts(2, 64, 151936, 3)


def test_ik_llama_cpp_s_table_is_read(tmp_path, monkeypatch):
    """The program is a script that prints what llama-batched-bench does; its row holds its own arguments."""
    program = tmp_path / "bench"
    row = "|    64 |     24 |    8 |    704 |    6.553 |    78.13 |   42.101 |     4.56 |   48.654 |    14.47 |"
    program.write_text(f"#!/bin/sh\necho 'log: |' >&2\nprintf '| PP |\\n|----|\\n{row}\\n' >&2\n")
    program.chmod(0o755)
    (tmp_path / "F16.gguf").touch()
    monkeypatch.setenv("SLIPWAY_BENCH_IK", str(program))
    measure = ik_llama_cpp.load(tmp_path, "F16", "", 2, [8, 64, 512])
    assert (measure(Job(8, 64)), measure(Job(0, 64))) == (4.56, 78.13)
    program.write_text("#!/bin/sh\necho cannot load the model\n")
    with pytest.raises(SystemExit, match="cannot load the model"):
        measure(Job(8, 64))


@pytest.mark.slow
def test_a_run_writes_the_rates_of_every_side_and_job(tmp_path, monkeypatch, capsys):
    out = tmp_path / "cpu.json"
    arguments = ["--shape", "small", "--checkpoint", str(tmp_path / "small"), "--rounds", "2", "--out", str(out)]
    sides = ["--sides", "slipway@base:stored", "slipway@base:int4", "slipway-http:int8", "transformers:float32"]
    jobs = ["--jobs", "decode:2:20", "prefill:40", "--threads", "1", "--busy"]
    monkeypatch.setattr(sys, "argv", ["cpu", *arguments, *sides, *jobs])
    cpu.main()
    found = json.loads(out.read_text())
    for part in ("tokens_per_s", "beside_a_busy_process"):
        rates = found[part]
        assert {asked: set(of_sides) for asked, of_sides in rates.items()} == {
            "decode:2:20": set(sides[1:]),
            "prefill:40": set(sides[1:]),
        }
        every = [values for of_sides in rates.values() for values in of_sides.values()]
        assert all(len(values) == 2 and min(values) > 0 for values in every)
    printed = capsys.readouterr().out
    assert "decode:2:20, tokens a second\n" in printed and "of its quiet rate" in printed


def test_a_shape_s_tokenizer_has_a_token_for_every_id(tmp_path):
    from tokenizers import Tokenizer

    folder = make("small", tmp_path)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == json.loads((folder / "config.json").read_text())["vocab_size"]
    assert tokenizer.decode(tokenizer.encode("two words").ids) == "two words"
    assert len({tokenizer.decode([token]) for token in range(300, 8192)}) == 8192 - 300
    assert os.path.getsize(folder / "tokenizer.json") < 1 << 20
