"""CPU comparison with other engines: its inputs, and a complete run of Slipway's own backends on a small model."""

import argparse
import json
import math
import os
import sys

import numpy as np
import pytest
from gguf import GGUFReader
from safetensors.torch import load_file

from benchmarks import bandwidth, cpu
from benchmarks.backends import Job, Name, ik_llama_cpp, job, name, prompts, slipway
from benchmarks.backends.gguf_file import gguf
from benchmarks.shapes import make
from benchmarks.weights import token_bytes
from engine.models.checkpoint import read_checkpoint
from tests.tiers import thinned


def test_job_names_are_parsed():
    for text in ("decode:8:1024", "prefill:512"):
        assert job(text).name == text
    assert (job("decode:8:64"), job("prefill:512")) == (Job(8, 64), Job(0, 512))
    for wrong in ("decode:8", "prefill:1:2", "other:1"):
        with pytest.raises(argparse.ArgumentTypeError, match="must be decode:BATCH:CONTEXT or prefill:TOKENS"):
            job(wrong)


def test_backend_names_are_parsed():
    assert name("slipway@avx2:int8") == Name("slipway", "avx2", "int8")
    for text in ("slipway@avx2:int8", "llama.cpp:Q8_0"):
        assert str(name(text)) == text
    assert name("slipway@avx2:int8").build == "slipway@avx2"
    for wrong in ("slipway", "other:int8"):
        with pytest.raises(argparse.ArgumentTypeError, match="ENGINE one of slipway, slipway-http, llama.cpp"):
            name(wrong)


def test_prompts_are_distinct_and_within_the_vocabulary():
    made = [*prompts(3, 50, 9973), *prompts(3, 50, 9973, start=1)]
    assert len({tuple(ids) for ids in made}) == 6 and all(10 <= token < 9973 for ids in made for token in ids)


def test_no_prompt_is_a_prefix_of_another():
    """An engine with a prefix cache would read such a prompt from it."""
    asked = [(8, 1024, 0), (8, 64, 0), *((1, 512, start) for start in range(1, 41))]
    beginnings = [tuple(ids[:16]) for count, length, start in asked for ids in prompts(count, length, 151936, start)]
    decoded, prefilled = set(beginnings[:8]), beginnings[16:]
    assert len(set(prefilled)) == len(prefilled) and not decoded & set(prefilled)
    assert prompts(2, 64, 151936, 3) == prompts(2, 64, 151936, 3)


def test_every_round_of_a_prefill_reads_a_new_prompt(tmp_path, monkeypatch):
    """Prompts of prefill rounds never hit the prefix cache; a repeated prompt aborts the backend."""
    measure = slipway.load(make("small", tmp_path), "stored", "base", 1, (2, 64, 128))
    for asked in (Job(0, 64), Job(2, 64), Job(0, 64), Job(1, 64), Job(0, 64), Job(0, 48), Job(0, 64)):
        assert measure(asked) > 0
    monkeypatch.setattr(slipway, "prompts", lambda *sizes, **more: prompts(1, 64, 8192))
    with pytest.raises(SystemExit, match="of a new prompt were in the prefix cache"):
        for _ in range(2):
            measure(Job(0, 64))


def test_rounds_alternate_between_backends():
    """The first round of each job is a discarded warm-up. Each measured
    round is followed by one with a busy process."""
    asked: list[tuple[str, str]] = []

    class Fake:
        def __init__(self, name):
            self.name = name

        def measure(self, one):
            asked.append((one.name, self.name))
            return float(len(asked))

    quiet, loaded = cpu.run([Fake("a"), Fake("b")], [Job(1, 64), Job(0, 32)], 2, with_busy=True)
    assert asked == [(name, side) for name in ("decode:1:64", "prefill:32") for _ in range(5) for side in "ab"]
    assert quiet["decode:1:64"] == {"a": [3.0, 7.0], "b": [4.0, 8.0]}
    assert loaded["decode:1:64"] == {"a": [5.0, 9.0], "b": [6.0, 10.0]}


def test_bandwidth_share_is_computed_for_one_row():
    rates = {"decode:1:64": {"a": [10.0, 30.0, 20.0], "b": [5.0]}, "decode:8:64": {"a": [1.0], "b": [1.0]}}
    assert cpu.shares(rates, {"a": 100, "b": None}, 4000.0) == {"decode:1:64": {"a": 0.5}}


@pytest.mark.parametrize("compiler", ["cc", "no-such-compiler"])
def test_the_bandwidth_is_the_largest_rate_of_all_rounds(monkeypatch, compiler):
    monkeypatch.setenv("CC", compiler)
    found = bandwidth.measure(2, 8 * bandwidth.MIB + 100, rounds=3)
    assert len(found.rounds) == 3 and max(found.rounds) == found.bytes_per_s > 1e8
    assert (found.threads, found.bytes) == (2, 8 * bandwidth.MIB)
    assert found.how in bandwidth.LOOPS if compiler == "cc" else found.how == "torch.sum"
    assert "2 threads" in bandwidth.line(found)


def test_compiled_loops_read_every_byte(tmp_path):
    """Each sum of 64-bit words equals the sum that numpy computes."""
    words = np.arange(2 * bandwidth.TURN // 8 + 8, dtype=np.int64)
    aligned = words[-words.ctypes.data % 64 // 8 :][: 2 * bandwidth.TURN // 8]
    readers = bandwidth.compiled_loops(tmp_path)
    assert len(readers) == 2
    for read in readers.values():
        assert read(aligned.ctypes.data, aligned.nbytes) == aligned.sum()


def test_bytes_per_token_equal_the_matrix_bytes(tmp_path):
    """Stored weights are bf16, transformers uses float32, 8-bit weights add scales; the
    files of other engines are unknown."""
    folder = make("small", tmp_path)
    sizes = {text: token_bytes(folder, name(text)) for text in ("slipway@base:stored", "transformers:float32")}
    weights = sum(math.prod(one.shape) for one in read_checkpoint(folder).tensors.values())
    assert sizes["transformers:float32"] == 4 * weights
    assert 2 * weights < sizes["slipway@base:stored"] < 2.01 * weights
    scales = 2 / 64  # bytes per weight
    assert weights < token_bytes(folder, name("slipway@base:int8")) / (1 + scales) < 1.01 * weights
    assert token_bytes(folder, name("openvino:int8")) is None


# Tensors of the second layer and their shapes, as llama.cpp reads them: the innermost dimension first.
OF_LLAMA_CPP = {
    "qwen3-moe-tiny": {"ffn_gate_exps": [128, 64, 16], "ffn_down_exps": [64, 128, 16], "ffn_gate_inp": [128, 16],
                       "attn_q_norm": [32], "attn_k": [128, 64]},
    "deepseek-v2-tiny": {"attn_q_a": [128, 96], "attn_q_b": [96, 256], "attn_kv_a_mqa": [128, 96],
                         "attn_k_b": [32, 64, 4], "attn_v_b": [64, 32, 4], "ffn_up_exps": [128, 64, 16],
                         "ffn_up_shexp": [128, 128]},
    "bamba-tiny": {"attn_k": [128, 64], "ffn_gate": [128, 256]},
}  # fmt: skip
MIXER = {"ssm_in.weight": [128, 584], "ssm_conv1d.weight": [4, 320], "ssm_conv1d.bias": [320], "ssm_a": [1, 8],
         "ssm_d": [1, 8], "ssm_dt.bias": [8], "ssm_norm.weight": [256, 1], "ssm_out.weight": [256, 128]}  # fmt: skip


@pytest.mark.parametrize("shape", OF_LLAMA_CPP)
def test_shapes_with_experts_latents_and_mixers_run_and_have_files_for_llama_cpp(shape, tmp_path):
    folder = make(shape, tmp_path)
    measure = slipway.load(folder, "int8", "base", 1, (2, 16, 32))
    assert measure(Job(2, 16)) > 0 and measure(Job(0, 16)) > 0
    found = GGUFReader(gguf(folder, "F16"))
    shapes = {one.name: one.shape.tolist() for one in found.tensors}
    wanted = {f"blk.1.{name}.weight": size for name, size in OF_LLAMA_CPP[shape].items()}
    if shape == "bamba-tiny":
        wanted |= {f"blk.0.{name}": size for name, size in MIXER.items()}
        assert found.fields["granitehybrid.attention.head_count_kv"].contents() == [0, 2]
        assert all((one.data < 0).all() for one in found.tensors if one.name.endswith("ssm_a"))
    assert {name: shapes.get(name) for name in wanted} == wanted
    assert sum(math.prod(one) for one in shapes.values()) == sum(
        math.prod(one.shape) for one in read_checkpoint(folder).tensors.values()
    )


def test_keys_and_values_of_latents_are_divided_by_head(tmp_path):
    """Row 5 of the second head's keys is column 5 of llama.cpp's matrix; its values follow."""
    folder = make("deepseek-v2-tiny", tmp_path)
    tensors = {one.name: one.data for one in GGUFReader(gguf(folder, "F16")).tensors}
    whole = load_file(folder / "model.safetensors")["model.layers.1.self_attn.kv_b_proj.weight"].half().numpy()
    assert np.array_equal(tensors["blk.1.attn_k_b.weight"][1][:, 5], whole[64 + 5])
    assert np.array_equal(tensors["blk.1.attn_v_b.weight"][1], whole[64 + 32 : 128])


def test_table_of_ik_llama_cpp_is_parsed(tmp_path, monkeypatch):
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
@pytest.mark.parametrize("busy", thinned([True, False], kept=[False]))
def test_run_writes_the_rates_of_every_backend_and_job(tmp_path, monkeypatch, capsys, busy):
    out = tmp_path / "cpu.json"
    arguments = ["--shape", "small", "--checkpoint", str(tmp_path / "small"), "--rounds", "1", "--out", str(out)]
    sides = ["--sides", "slipway@base:stored", "slipway-http:int8", "transformers:float32"]
    jobs = ["--jobs", "decode:1:20", "prefill:40", "--threads", "1", *["--busy"][:busy], "--buffer", "8"]
    monkeypatch.setattr(sys, "argv", ["cpu", *arguments, *sides, *jobs])
    cpu.main()
    found = json.loads(out.read_text())
    assert found["memory"]["bytes_per_s"] > 1e8
    assert set(found["weight_bytes_per_token"]) == set(sides[1:])
    assert all(0 < share < 10 for share in found["share_of_bandwidth"]["decode:1:20"].values())
    for part in ("tokens_per_s", *["beside_a_busy_process"][:busy]):
        rates = found[part]
        assert {asked: set(of_sides) for asked, of_sides in rates.items()} == {
            "decode:1:20": set(sides[1:]),
            "prefill:40": set(sides[1:]),
        }
        every = [values for of_sides in rates.values() for values in of_sides.values()]
        assert all(len(values) == 1 and min(values) > 0 for values in every)
    printed = capsys.readouterr().out
    assert "decode:1:20, tokens a second\n" in printed and ("of its quiet rate" in printed) == busy
    assert "decode:1:20, weights read, share of the bandwidth\n" in printed


def test_tokenizer_of_a_shape_has_a_token_for_every_id(tmp_path):
    from tokenizers import Tokenizer

    folder = make("small", tmp_path)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == json.loads((folder / "config.json").read_text())["vocab_size"]
    assert tokenizer.decode(tokenizer.encode("two words").ids) == "two words"
    assert len({tokenizer.decode([token]) for token in range(300, 8192)}) == 8192 - 300
    assert os.path.getsize(folder / "tokenizer.json") < 1 << 20
