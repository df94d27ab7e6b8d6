"""Tests of the benchmark of compiled CPU kernels: both the kernel and the baseline run the stated work."""

import json
import os
import subprocess
import sys
from itertools import accumulate
from pathlib import Path

import pytest
import torch

from benchmarks.kernels import bench, bench_cpu
from benchmarks.kernels.bench_cpu import Spread, attention_workload, op_workloads
from kernels.attention.batches import FEW, batch, kind
from kernels.cpu.library import best, usable
from kernels.cpu.program import Team
from kernels.op import tensors
from kernels.ops import OPS

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def team():
    made = Team(best(), 2)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("q512", ((512, 512),)),
        ("3q1s4096", ((1, 4096),) * 3),
        ("q2ks32k", ((2048, 32768),)),
        ("2q3+q1s7", ((3, 3), (3, 3), (1, 7))),
    ],
)
def test_batch_is_parsed(text, rows):
    assert batch(text) == rows


@pytest.mark.parametrize("text", ["", "8", "q", "q5s", "q0", "0q1", "q5s4", "8q1s4k+", "q1s1m", "decode"])
def test_invalid_batch_is_rejected(text):
    with pytest.raises(ValueError, match=f"^{text.replace('+', '[+]')}: "):
        batch(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("q1", "decode"),
        ("8q1s4k", "decode"),
        ("q2", "prefill"),
        ("4q512", "prefill"),
        ("q2s3", "spec"),
        (f"4q{FEW}s{FEW + 1}", "spec"),
        (f"4q{FEW + 1}s{FEW + 2}", "extend"),
        ("q512s4k", "extend"),
        ("q512+q1s7", "mixed"),
        (f"q{FEW}s90+q{FEW + 1}s90", "mixed"),
    ],
)
def test_batches_are_classified_at_their_bounds(text, expected):
    assert kind(batch(text)) == expected


@pytest.mark.parametrize("pages", bench_cpu.PAGES)
@pytest.mark.parametrize("shape", [(4, 2, 16), (7, 1, 24)])
def test_attention_of_a_batch_equals_torch(team, pages, shape):
    rows = batch("2q3s20+q9+3q1s33+q1")
    work = attention_workload(team, rows, shape, pages, case="some")
    starts = list(accumulate((count for count, _ in rows), initial=0))
    ours = work.compiled_call()
    want = torch.cat([part.transpose(1, 2).flatten(0, 1) for part in work.torch_call()])
    assert want.shape == ours.shape and starts[-1] == len(ours) == 2 * 3 + 9 + 3 + 1
    tolerance = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 2e-2, "int8": 2e-2, "int4": 0.3}[pages]
    assert (ours - want).abs().max() < tolerance


def test_bytes_and_flops_of_attention_count_visible_keys(team):
    work = attention_workload(team, batch("2q1s10+q3s7"), (4, 2, 16), "int8", case="some")
    pairs = 2 * 10 + 5 + 6 + 7
    assert work.flops == 2 * 2 * pairs * 4 * 16
    assert work.bytes == 2 * 5 * 4 * 16 * 4 + 2 * (10 + 10 + 7) * 2 * (16 + 4)


# These operate in place, so that each call changes the next call's input: a comparison needs fresh arguments.
CHANGING = (
    *("qk_norm_rope_kv", "cap_logits", "logit_bias", "penalties", "causal_conv", "delta_rule", "selective_scan"),
    "rg_lru",
)


def test_every_compiled_body_is_timed_with_its_torch_equivalent(team, monkeypatch):
    """Attention is timed by batches."""
    assert {op.name for op in OPS if op.cpu_cases} == {
        op.name for op in OPS if op.compiled is not None and "attention" not in op.name
    }
    for work in op_workloads(team):
        ours, torchs = tensors(work.compiled_call()), tensors(work.torch_call())
        assert work.bytes > 0 and ours[0].shape == torchs[0].shape, work
        if work.op not in CHANGING:
            close = 2e-4 * torchs[0].nan_to_num(neginf=0.0).abs().max().item()
            torch.testing.assert_close(ours[0], torchs[0], atol=close, rtol=0, msg=str(work))


def test_spread_summarizes_its_samples():
    assert Spread.of([1.0, 3.0, 8.0]) == Spread(1.0, 4.0, 8.0, pytest.approx((26 / 3) ** 0.5))


def run(*arguments, out=None):
    given = [*arguments, "--threads", "1", "--rounds", "2", *(["--json", str(out)] if out else [])]
    return bench.main(given)


@pytest.mark.parametrize("variant", usable())
def test_run_prints_an_ordered_table_and_restores_torch(variant, tmp_path, capsys):
    before = torch.get_num_threads()
    specs = ["q3s9", "2q1s40", "q20"]
    assert run("--kernels", variant, "--batch", *specs, out=tmp_path / "out.json") == 0
    assert torch.get_num_threads() == before
    first, head, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith(f"CPU, {variant}, 1 threads") and head.split()[2:7] == ["kind", "min", "us", "mean", "max"]
    assert [line.split()[:5] for line in lines] == [
        ["attention", spec, name, "float16", what]
        for name in bench_cpu.SHAPES
        for spec, what in zip(specs, ("spec", "decode", "prefill"), strict=True)
    ]
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["facts"]["kernels"] == variant
    for row in found["rows"]:
        assert 0 < row["time"]["min"] <= row["time"]["mean"] <= row["time"]["max"]


def test_torch_threads_are_restored_after_an_error():
    before = torch.get_num_threads()
    with pytest.raises(RuntimeError), bench_cpu.torch_threads(before + 1):
        assert torch.get_num_threads() == before + 1
        raise RuntimeError
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--kernels", "sse9"], f"--kernels sse9: usable here are {', '.join(usable())}"),
        (["--batch", "8q"], "--batch 8q: '8q' is not a batch; write 8q1s4096"),
        (["--kernels", best(), "--tune"], "--tune: compiled kernels have no settings"),
    ],
)
def test_unavailable_options_give_a_one_line_error(arguments, words, capsys):
    assert run(*arguments) == 2
    assert words in capsys.readouterr().err


@pytest.mark.nightly(
    "tests/benchmarks/kernels/test_bench_cpu.py::test_as_a_command_without_a_gpu_it_times_the_fastest_kernels"
)
def test_names_select_operations_and_cases(capsys):
    assert run("--kernels", best(), "rms_norm", "--case", "8x") == 0
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()[2:]] == [["rms_norm", "8x1024"]]


def test_a_name_of_no_operation_is_an_error():
    assert run("--kernels", best(), "nothing") == 2


def test_as_a_command_without_a_gpu_it_times_the_fastest_kernels():
    kept = {"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    command = [
        sys.executable,
        "-m",
        "benchmarks.kernels",
        "rms_norm",
        "--case",
        "8x",
        "--rounds",
        "1",
        "--threads",
        "1",
    ]
    done = subprocess.run(command, cwd=ROOT, env=kept, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stderr
    first, _, row = done.stdout.splitlines()
    assert first.startswith(f"CPU, {best()}, 1 threads") and row.split()[:2] == ["rms_norm", "8x1024"]
