"""The GPU suite: its arithmetic on values made by hand, parts that fail or hang, and once all of it on a CPU."""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import gpu, gpu_peer
from benchmarks.gpu_engine import KINDS, Bench, job, run, settings
from benchmarks.gpu_goals import GOALS, Goal
from benchmarks.gpu_parts import (
    COMMAND_S,
    COMMANDS,
    CPU_PLAN,
    Plan,
    Suite,
    cuda_plan,
    groups_of,
    limit_s,
    missing_requirement,
    read_tests,
)
from benchmarks.gpu_run import Costs, Step, decoding, pooled_flops, profiled
from benchmarks.shapes import SHAPES
from benchmarks.workload import chat, same, texts, uniform
from engine.kv.layout import layout
from engine.models.config import normalised
from engine.models.families import declaration
from engine.worker.precompile import parsed
from kernels.ops import OPS

ROOT = Path(__file__).resolve().parents[2]


# -- workloads ---------------------------------------------------------------------------------------------------------


def test_uniform_mix_equals_nano_vllm():
    made = uniform(256, 151936)
    assert sum(len(request.prompt) for request in made) == 142_827
    assert sum(request.tokens for request in made) == 133_966, "what nano-vllm's README counts"
    assert all(100 <= len(request.prompt) <= 1024 and 100 <= request.tokens <= 1024 for request in made)


def test_chat_mix_is_seeded_and_has_the_declared_lengths():
    made = chat(2000, 1000)
    assert made == chat(2000, 1000) and made[:10] == chat(10, 1000) and made != chat(2000, 1000, seed=1)
    prompts, replies = [len(request.prompt) for request in made], [request.tokens for request in made]
    assert sorted(prompts)[1000] == pytest.approx(110, rel=0.06) and sum(prompts) / 2000 == pytest.approx(202, rel=0.06)
    assert sorted(replies)[1000] == pytest.approx(140, rel=0.06) and sum(replies) / 2000 == pytest.approx(205, rel=0.06)
    assert max(prompts) == max(replies) == 1024
    assert all(0 <= token < 1000 for request in made for token in request.prompt)


def test_texts_are_seeded_and_fit_an_encoder():
    made = texts(500, 1000)
    assert made == texts(500, 1000) and made != texts(500, 1000, seed=1)
    assert sorted(map(len, made))[250] == pytest.approx(110, rel=0.15) and max(map(len, made)) == 512
    assert min(map(len, made)) >= 1


def test_prompts_of_one_length_share_no_prefix():
    made = same(5, 40, 7, 97)
    assert {len(request.prompt) for request in made} == {40} and {request.tokens for request in made} == {7}
    assert len({request.prompt[:2] for request in made}) == 5


# -- values computed from measurements ---------------------------------------------------------------------------------


def steps(*sizes):
    return [Step(rows, tokens, 0.0, float(at)) for at, (rows, tokens) in enumerate(sizes)]


def test_only_steady_decode_steps_count():
    seen = steps((1, 64), (2, 65), (2, 2), (2, 2), (2, 2), (1, 1), (2, 2), (2, 2))
    assert decoding(seen, 2) == [3, 4, 7]
    assert decoding(seen, 1) == [] and decoding([], 1) == []


def test_profile_reports_kernels_in_the_window_and_idle_time():
    """Two steps of 100 us from 800 to 1000; the last event ends at 1100, 100 us after them."""
    events = [
        ("early", 500.0, 700.0),
        ("crossing", 700.0, 800.0),  # ends as the window begins
        ("a", 800.0, 840.0),
        ("b", 830.0, 850.0),  # overlaps a for 10 us
        ("a", 900.0, 950.0),
        ("late", 1050.0, 1100.0),
    ]
    found = profiled(events, (-300.0, -100.0), 2, 100.0)
    assert found["busy_us"] == 50.0 and found["gap_us"] == 50.0 and found["launches"] == 1.5
    assert [(one["name"], one["us"], one["launches"]) for one in found["kernels"]] == [
        ("a", 45.0, 1.0),
        ("b", 10.0, 0.5),
    ]
    with pytest.raises(RuntimeError, match="recorded nothing on the device"):
        profiled([], (-1.0, 0.0), 1, 1.0)


def model(shape):
    config = normalised(SHAPES[shape])
    return declaration(config["architectures"][0])(config)


def test_minimal_cost_includes_weights_and_keys():
    """Llama 3.1 8B, computed by hand: 8,030 M weights, including 525 M of the embedding, which are only looked up;
    128 KiB of keys and values per token; 32 heads of 128 in 32 layers."""
    llama = model("llama-3.1-8b")
    form = layout(llama, block_tokens=16, element_bytes=2)
    costs = Costs.of(llama, form, 2 * 8_030_261_248)
    embed = 128256 * 4096
    assert costs.read_bytes == pytest.approx(2 * (8_030_261_248 - embed), rel=1e-9)
    assert costs.kv_bytes == 128 << 10
    norms = (2 * 32 + 1) * 4096
    assert costs.flops == 2 * (8_030_261_248 - 2 * embed - norms) and costs.head_flops == 2 * embed
    assert costs.attention_flops == 32 * 4 * 32 * 128
    assert costs.decode(2, 10.0) == (
        costs.read_bytes + 2 * 10 * (128 << 10),
        2 * (costs.flops + costs.head_flops + 10 * costs.attention_flops),
    )
    assert costs.prefill(3) == 3 * costs.flops + (1 + 2 + 3) * costs.attention_flops + costs.head_flops
    bert = model("bert-large")
    pooled = Costs.of(bert, layout(bert, block_tokens=16, element_bytes=2), 1000)
    assert pooled.flops == 24 * 2 * (4 * 1024**2 + 2 * 1024 * 4096) and (pooled.head_flops, pooled.kv_bytes) == (0, 0)
    assert pooled.attention_flops == 24 * 4 * 1024
    assert pooled_flops(pooled, [3, 1]) == 4 * pooled.flops + (9 + 1) * pooled.attention_flops
    tied = model("qwen3-0.6b")
    assert Costs.of(tied, layout(tied, block_tokens=16, element_bytes=2), 1000).read_bytes == 1000


def test_minimal_cost_of_fp8_is_one_byte_per_weight():
    """Llama 3.1 8B by hand: matrices of one byte a number, the embedding, the head and the norms as they were."""
    llama, embed = model("llama-3.1-8b-fp8"), 128256 * 4096
    matrices = 8_030_261_248 - 2 * embed
    costs = Costs.of(llama, layout(llama, block_tokens=16, element_bytes=2), matrices + 4 * embed, 2 * embed)
    assert costs.read_bytes == matrices + 2 * embed
    assert costs.flops == Costs.of(llama, layout(llama, block_tokens=16, element_bytes=2), 1000).flops


def test_minimal_cost_of_experts_counts_only_used_ones():
    """Qwen3 30B-A3B, computed by hand: 48 layers of 128 experts, 8 active per token, each with three matrices of
    768 x 2,048."""
    moe, total = model("qwen3-30b-a3b"), 30_532_122_624
    costs = Costs.of(moe, layout(moe, block_tokens=16, element_bytes=2), 2 * total)
    one, embed = 48 * 3 * 768 * 2048, 151936 * 2048
    assert costs.expert_bytes == pytest.approx(2 * 128 * one, rel=1e-9) and costs.used_share == 8 / 128
    assert costs.read_bytes == pytest.approx(2 * (total - 128 * one - embed), rel=1e-9)
    norms = 48 * (2 * 2048 + 2 * 128) + 2048
    assert costs.flops == 2 * (total - 2 * embed - norms - 120 * one)
    assert costs.decode(1, 0.0)[0] == pytest.approx(costs.read_bytes + 2 * 8 * one)
    assert costs.decode(2, 0.0)[0] == pytest.approx(costs.read_bytes + 2 * (16 - 8 * 8 / 128) * one)
    assert costs.decode(10_000, 0.0)[0] == pytest.approx(costs.read_bytes + costs.expert_bytes)


def test_shape_that_exceeds_the_device_memory_is_skipped_with_a_reason(suite, capsys):
    suite.results["limits"] = {"memory_bytes": 40 << 30}
    suite.engine("qwen3-30b-a3b")
    why = "its jobs need 84 GiB of memory, but the device has 40"
    assert suite.results["parts"] == {"engine qwen3-30b-a3b": {"code": 0, "left_out": why}}
    assert capsys.readouterr().out == f"engine qwen3-30b-a3b: skipped: {why}\n"
    assert not suite.failed and "engines" not in suite.results
    assert missing_requirement("qwen3-30b-a3b", 84 << 30) == missing_requirement("llama-3.1-8b", 20 << 30) == ""
    assert missing_requirement("qwen3-30b-a3b", None) == "", "an unknown size is no reason"


COUNTED = {
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "llama-3.1-8b": 8_030_261_248,
    "qwen3-30b-a3b": 30_532_122_624,
    "bert-large": 334_092_288,  # without the pooler of next sentences
}


def test_shapes_have_the_sizes_of_their_models():
    from engine.models.sources import elements, sources

    counts = {name: elements(sources(model(name))) for name in COUNTED}
    moe = sources(model("qwen3-moe-mini"))
    taken = sum(math.prod(shape) // (8 if ".experts." in name else 1) for name, shape in moe.items())
    assert round(elements(moe) / 1e9, 2) == 1.04 and round(taken / 1e9, 2) == 0.25
    assert counts == COUNTED


# -- jobs --------------------------------------------------------------------------------------------------------------


def test_job_names_are_parsed():
    for text, rows, length in (
        ("decode:32:512", 32, 1536),
        ("prefill:2048", 1, 2056),
        ("chat:1000", 512, 2056),
        ("embed:256:512", 256, 512),
        ("texts:2000", 512, 512),
    ):
        assert (job(text).name, job(text).rows, job(text).length) == (text, rows, length)
    for wrong in ("decode:32", "prefill:1:2", "other:1", "chat:x", "chat"):
        with pytest.raises(argparse.ArgumentTypeError, match="must be one of decode:ROWS:CONTEXT"):
            job(wrong)


@pytest.mark.parametrize("quick", [True, False])
def test_every_planned_job_is_supported_by_the_engine(quick):
    plan = cuda_plan(quick)
    assert set(plan.engines) <= set(SHAPES)
    for jobs in plan.engines.values():
        assert {job(text).kind for text in jobs} <= set(KINDS)
        kinds = [job(text).kind for text in jobs]
        assert kinds == sorted(kinds, key=lambda kind: kind == "profile"), "a profiler that fails costs no other job"


def test_an_engine_on_a_gpu_is_sized_for_its_jobs(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1000, 2000))
    jobs = [job("decode:32:512"), job("chat:300"), job("prefill:16384")]
    config = settings("llama-3.1-8b", tmp_path, "cuda", jobs)
    assert (config.hardware.device, config.model.dtype, config.hardware.kernels, config.model.load) == (
        "cuda",
        "bfloat16",
        "triton",
        "random",
    )
    assert (config.scheduling.max_running, config.model.max_context, config.memory.kv_cache) == (300, 16392, 900)
    assert config.hardware.graph_sizes[-1] == 300
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"], "no weights are written"


def test_engine_is_not_used_after_a_failed_job(tmp_path, capsys):
    class Fake(Bench):
        def __init__(self):
            self.ran = []

        def run(self, asked):
            self.ran.append(asked.name)
            if asked.name == "chat:2":
                raise RuntimeError("no\nmemory")
            return {"tokens_per_s": 5.0}

    bench, out = Fake(), tmp_path / "engine.json"
    assert run(bench, [job("prefill:5"), job("chat:2"), job("chat:3")], {"shape": "small", "jobs": {}}, out)
    assert bench.ran == ["prefill:5", "chat:2"]
    assert json.loads(out.read_text())["jobs"] == {
        "prefill:5": {"tokens_per_s": 5.0},
        "chat:2": {"error": "RuntimeError: no memory"},
    }
    assert "small prefill:5: tokens_per_s 5" in capsys.readouterr().out


# -- goals -------------------------------------------------------------------------------------------------------------


def row(op, case="some", us=10.0, moved=1 << 30, of_copy=0.5, flops=0, of_matmul=0.0, peer=None):
    time_ = {"us": us, "low": us, "high": us}
    shares = {"of_copy": of_copy, "of_matmul": of_matmul}
    return {"op": op, "case": case, "time": time_, "bytes": moved, "flops": flops, "peer": peer} | shares


def test_goals_are_found_in_the_results():
    jobs = {
        "decode:1:512": {"of_roof": 0.4},
        "decode:32:512": {"tokens_per_s": 2_100.0},
        "prefill:2048": {"of_matmul": 0.75, "ms": 40.0},
        "chat:200": {"new_tokens_per_s": 1.0},
        "chat:1000": {"new_tokens_per_s": 11_000.0},
    }
    theirs = {
        "decode:32:512": {"tokens_per_s": 2_000.0},
        "prefill:2048": {"ms": 50.0},
        "chat:200": {"new_tokens_per_s": 9.0},
        "chat:1000": {"new_tokens_per_s": 10_000.0},
    }
    bench = [
        row("decode_attention", of_copy=0.9),
        row("decode_attention", of_copy=0.425),
        row("decode_attention", moved=1 << 20, of_copy=0.01),
        row("decode_attention", case="64x8192", us=340.0),
        row("decode_attention", case="64x8192-fp8", us=200.0),
        row("prefill_attention", case="8192", us=200.0, flops=5, of_matmul=0.3, peer={"us": 100.0}),
        row("rms_norm", us=2.0, moved=1000),
        row("qk_norm_rope_kv", us=4.0, moved=1000),
        row("activation", of_copy=0.85),
        row("sample", case="top_p-256x151936", of_copy=0.2),
        row("sample", case="top_p-1x151936", us=999.0),
        {**row("rms_norm"), "time": None},
    ]
    results = {
        "engines": {
            "llama-3.1-8b": {"jobs": jobs},
            "qwen3-30b-a3b": {"jobs": {"decode:32:512": {"of_roof": 0.35}}},
            "bert-large": {"jobs": {"embed:256:512": {"of_matmul": 0.66}}},
            "qwen3-0.6b": {"jobs": {"uniform:256": {"error": "x"}, "profile:256:512": {"gap_us": 600.0}}},
        },
        "again": {"start_s": {"engine": 3.0}},
        "vllm": {"llama-3.1-8b": {"jobs": theirs, "start_s": {"engine": 20.0}}},
        "bench": {"rows": bench},
    }
    found = {goal.name: goal.line(results)[2:] for goal in GOALS}
    assert found == {
        "Llama-3.1-8B, decode of 1 row: share of the roofline": ("40%", "50%"),
        "Llama-3.1-8B, decode of 32 rows: share of the roofline": ("–", ""),
        "Llama-3.1-8B in fp8, decode of 1 row: share of the roofline": ("–", ""),
        "Llama-3.1-8B, prefill of 2,048 tokens: share of the matmul rate": ("75%", "100%"),
        "Llama-3.1-8B, decode of 1 row: rate to vLLM's": ("–", ""),
        "Llama-3.1-8B, decode of 32 rows: rate to vLLM's": ("1.05 x", "100%"),
        "Llama-3.1-8B, decode of 256 rows: rate to vLLM's": ("–", ""),
        "Llama-3.1-8B, chat mix: new tokens per second to vLLM's": ("1.1 x", "100%"),
        "Qwen3-0.6B, uniform mix: new tokens per second to vLLM's": ("–", ""),
        "Llama-3.1-8B, prompt of 2,048 tokens: time to first token to vLLM's": ("0.8 x", "112%"),
        "Llama-3.1-8B, start of the engine, kernels cached: time to vLLM's": ("0.15 x", "200%"),
        "BERT-large, prompts of 512 tokens: share of the matmul rate": ("66%", "200%"),
        "Qwen3-0.6B, 256 rows: device idle time": ("600 us a step", "50%"),
        "Qwen3-30B-A3B, decode of 1 row: share of the roofline": ("–", ""),
        "Qwen3-30B-A3B, decode of 32 rows: share of the roofline": ("35%", "50%"),
        "decode attention, large cases: least share of the copy rate": ("42%", "50%"),
        "attention of spans: best share of the matmul rate": ("30%", "50%"),
        "decode attention, 8-bit pages: times as fast as bf16": ("1.7 x", "100%"),
        "attention of spans, 8,192 tokens: times as fast as torch's": ("0.5 x", "50%"),
        "norms, heads, activation, large cases: least share of the copy rate": ("85%", "100%"),
        "norms, heads, activation, small cases: median": ("3 us", "100%"),
        "sampling 256 rows of 151,936 logits, top_p 0.95: share of the copy rate": ("20%", "50%"),
    }
    assert all(goal.line({})[2:] == ("–", "") for goal in GOALS)


def test_the_page_of_kernels_has_the_goals():
    page = (ROOT / "docs" / "kernels.md").read_text()
    for goal in GOALS:
        assert f"| {goal.name} | {goal.wanted} |" in page
    assert Goal("x", 0.5, "%", lambda results: None).wanted == "≥ 50%"


# -- parts -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def suite(tmp_path):
    (tmp_path / "logs").mkdir()
    return Suite(tmp_path, CPU_PLAN, time.monotonic() + 60)


def test_peer_does_the_jobs_that_goals_compare():
    plan = cuda_plan(False)
    for shape in filter(plan.mixes, plan.engines):
        assert {job.split(":")[0] for job in plan.compared(shape)} <= set(gpu_peer.JOBS)
    assert {"decode:256:512", "prefill:2048", "chat:1000"} <= set(plan.compared("llama-3.1-8b"))


def test_a_peers_decode_step_is_the_difference_of_two_replies(monkeypatch):
    seconds = {gpu_peer.SHORT: 1.0, gpu_peer.SHORT + gpu_peer.STEPS: 1.0 + 0.01 * gpu_peer.STEPS}
    monkeypatch.setattr(gpu_peer, "serve", lambda llm, requests: seconds[requests[0].tokens])
    found = gpu_peer.decode(None, 100, "decode", 32, 16)
    assert found["tokens_per_s"] == pytest.approx(3200)


def test_failed_part_does_not_affect_others(suite):
    assert suite.run("bad", ["-c", "print('some words'); raise SystemExit(3)"], 30) == 3
    assert suite.run("good", ["-c", "import os; print(os.environ['WORD'])"], 30, WORD="yes") == 0
    suite.save()
    parts = json.loads((suite.out / "results.json").read_text())["parts"]
    assert parts["bad"]["code"] == 3 and parts["bad"]["tail"] == "some words\n"
    assert parts["good"]["code"] == 0 and "tail" not in parts["good"]
    assert suite.failed == ["bad"]
    assert (suite.out / "logs" / "good.log").read_text() == "yes\n"


def test_hanging_part_is_stopped_with_its_children(suite):
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\ntime.sleep(600)\n"
    )
    assert suite.run("slow", ["-c", code], 5.0) is None
    assert suite.results["parts"]["slow"]["error"] == "stopped after 5 s"
    child = int((suite.out / "logs" / "slow.log").read_text())
    end = time.monotonic() + 100
    while _runs(child) and time.monotonic() < end:
        os.sched_yield()
    assert not _runs(child)


def _runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_parts_beyond_the_time_limit_are_not_started(suite):
    suite.end = time.monotonic()
    assert suite.run("late", ["-c", "open('started', 'w')"], 30) is None
    assert suite.results["parts"]["late"]["error"] == "the time limit was reached" and suite.failed == ["late"]


def test_part_without_output_has_no_results(suite):
    assert suite.read("nothing.json") == {}
    (suite.out / "half.json").write_text('{"rows": [')
    assert suite.read("half.json") == {}


def test_kernels_of_the_engines_are_compiled_from_their_configurations(suite):
    command = suite.models(suite.out / "shapes", ["--target", "sm_90", "--cache", str(suite.out / "kernels")])
    assert command[:2] == ["-m", "engine.worker.precompile"]
    options = parsed(command[2:])
    assert [path.name for path in options.checkpoint] == ["small", "bert-small"] and options.target == ["sm_90"]
    assert (options.checkpoint[0] / "config.json").exists()


def test_tests_are_counted_and_failures_listed(tmp_path):
    (tmp_path / "test_some.py").write_text(
        "import pytest\ndef test_good(): pass\ndef test_bad(): assert 1 == 2, 'reason'\n"
        "@pytest.mark.skip\ndef test_skipped(): pass\n@pytest.fixture\ndef broken(): raise ValueError('broken')\n"
        "def test_error(broken): pass\n"
    )
    file = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={file}", "test_some.py"]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    found = read_tests(file)
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 2, 1)
    assert [one["test"] for one in found["failures"]] == ["test_bad", "test_error"]
    assert "reason" in found["failures"][0]["message"]
    assert "error" in read_tests(tmp_path / "nothing.xml")


def test_groups_are_all_operations_and_every_other_file_with_a_test_for_a_gpu():
    groups = dict(groups_of(cuda_plan(False)))
    assert list(groups)[: len(OPS)] == [op.name for op in OPS]
    others = {Path(arguments[0]).name for name, arguments in groups.items() if name not in {op.name for op in OPS}}
    assert "test_memory.py" in others and "test_ops.py" not in others and "test_llm.py" not in others
    assert all(arguments[1:3] == ["-m", "gpu"] for arguments in groups.values())


def test_an_operations_group_has_its_tests_and_no_others():
    name, arguments = next(groups_of(Plan("cpu", (), ("qk_norm_rope_kv",), (), {}, None)))
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    tests = [line for line in done.stdout.splitlines() if "::" in line]
    assert name == "qk_norm_rope_kv" and tests and all("[qk_norm_rope_kv-" in line for line in tests)


# -- the command -------------------------------------------------------------------------------------------------------


def test_without_a_gpu_the_interpreter_runs_the_tests(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    called = []

    def started(command, **rest):
        called.append(command)
        return subprocess.CompletedProcess(command, 7)

    monkeypatch.setattr(gpu.subprocess, "run", started)
    assert gpu.main(["--out", str(tmp_path / "out")]) == 7
    assert capsys.readouterr().out == "benchmarks.gpu: no GPU found; running the kernel tests in the interpreter\n"
    assert called[0][-1].endswith("tests/kernels/test_ops.py") and not (tmp_path / "out").exists()


def test_parts_without_their_packages_are_left_out(suite, capsys):
    def names(*absent):
        return [name for name, _ in gpu.parts(suite, absent, None)]

    assert names() == ["limits", "compile", "tests", "engine small", "bench", "engine bert-small", "again"]
    capsys.readouterr()
    assert names("msgspec") == ["limits", "compile", "tests", "bench"]
    assert "engine small: skipped: install msgspec\n" in capsys.readouterr().out
    assert names("triton") == ["limits"]
    assert names("hypothesis") == ["limits", "compile", "engine small", "bench", "engine bert-small", "again"]
    assert names("tokenizers") == ["limits", "compile", "tests", "bench"]
    assert [name for name, _ in gpu.parts(suite, (), "vllm")][-1] == "vllm small"


def test_every_command_ends_within_its_minutes_and_together_they_run_every_part(suite):
    for names in COMMANDS.values():
        assert sum(map(limit_s, names)) <= COMMAND_S
    on_gpu = replace(suite, plan=cuda_plan(False))
    parts = {name for name, _ in gpu.parts(on_gpu, (), "vllm")}
    left = parts - {name for names in COMMANDS.values() for name in names}
    assert {name for names in COMMANDS.values() for name in names} <= parts
    assert left == {"vllm qwen3-0.6b"}, "whose mix is less important than the time it takes"


def test_results_of_several_commands_are_merged(suite):
    suite.results |= {"limits": {"copy": 5.0}, "parts": {"limits": {"code": 0}}}
    suite.save()
    later = Suite(suite.out, CPU_PLAN, 0.0)
    later.merge()
    later.results["parts"]["bench"] = {"code": 0}
    later.save()
    found = json.loads((suite.out / "results.json").read_text())
    assert found["limits"] == {"copy": 5.0} and set(found["parts"]) == {"limits", "bench"}


@pytest.mark.slow
@pytest.mark.nightly("tests/benchmarks/test_gpu.py::test_an_operations_group_has_its_tests_and_no_others")
def test_the_whole_suite_runs_on_a_cpu_with_only_the_packages_it_needs(tmp_path):
    """Make the gateway's packages impossible to import, as on a machine without them."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "for name in ('pydantic', 'fastapi', 'orjson', 'llguidance', 'openai', 'jsonschema'):\n"
        "    sys.modules[name] = None\n"
    )
    out = tmp_path / "out"
    paths = os.pathsep.join(filter(None, [str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH")]))
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--out", str(out)],
        cwd=ROOT,
        env=kept | {"PYTHONPATH": paths, "TRITON_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    first = done.stdout.splitlines()[0]
    assert first.startswith("missing: ") and "llguidance" in first and "pydantic" in first
    results = json.loads((out / "results.json").read_text())
    assert all(part["code"] == 0 for part in results["parts"].values())
    assert results["limits"]["copy"] > 0 and results["tests"]["total"]["passed"] > 10
    assert results["bench"]["rows"][0]["time"]["us"] > 0
    jobs = results["engines"]["small"]["jobs"]
    assert set(jobs) == set(CPU_PLAN.engines["small"])
    assert all(found.get("tokens_per_s") or found.get("new_tokens_per_s") for found in jobs.values())
    assert jobs["decode:4:16"]["rows"] == 4 and jobs["decode:4:16"]["steps"] > 100
    pooled = results["engines"]["bert-small"]["jobs"]
    assert set(pooled) == set(CPU_PLAN.engines["bert-small"])
    assert pooled["embed:4:32"]["tokens"] == 128 and pooled["embed:4:32"]["steps"] == 1
    assert all(found["tokens_per_s"] > 0 for found in pooled.values())
    start = results["again"]["start_s"]
    assert {"process and imports", "reading", "loading", "allocating", "warming", "first token"} <= set(start)
    assert start["all"] >= start["process and imports"] + start["engine"] + start["first token"]
    assert len(results["table"]) == len(GOALS)
