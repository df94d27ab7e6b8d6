"""Tests of the whole engine with tensor parallelism: its replies and its shutdown."""

import asyncio
import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from engine.api.client import EngineClient, Interrupted
from engine.api.config import Place, write_config
from engine.api.errors import EXIT_CRASH, EXIT_PERMANENT, ConfigError, EngineGone
from engine.api.messages import Grammar, Sampling, Submit
from engine.arguments import engine_config
from engine.core.replay import main as replay
from engine.llm import LLM, Params
from engine.worker.build import _run_abortable
from engine.worker.ranks import RankLost, Ranks
from kernels.cpu.library import best
from tests.engine.forked_ranks import forked
from tests.tiers import NIGHTLY

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
DEMO = ROOT / "manifests" / "demo"
TOLERANCE = 2e-4  # of a logprob


def _tiny_models():
    """The cases of the layers' tests."""
    path = HERE / "layers" / "conftest.py"
    spec = importlib.util.spec_from_file_location("tiny_models_of_ranks", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


tiny = _tiny_models()
STARTS_RANKS = True  # as the product does, except in tests of what ranks compute


@pytest.fixture
def forked_here():
    with forked():
        yield


def children(pid):
    """Processes whose parent this is."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                    found.append(int(folder.name))
    return found


def ranks_of(pid):
    return [child for child in children(pid) if b"engine.rank" in Path(f"/proc/{child}/cmdline").read_bytes()]


def wait_until(true, seconds, what):
    limit = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < limit, f"not within {seconds} s: {what}"
        time.sleep(0.02)


def small(path, tensor=2, **more):
    sizes = {"block_tokens": 4, "max_context": 48, "kv_bytes": 1 << 20, "threads": 1, "kernels": "torch"}
    return LLM(path, **{**sizes, "max_step_tokens": 7, "max_running": 5, "tensor": tensor, **more})


def prompts_of(seed):
    """Mixed lengths, some with a shared beginning: several blocks, several steps of at most 7 tokens."""
    draw = torch.Generator().manual_seed(seed)

    def ids(count):
        return tuple(torch.randint(3, tiny.VOCAB, (count,), generator=draw).tolist())

    shared = ids(13)
    return [ids(1), ids(7), shared + ids(1), shared + ids(9), ids(23)]


def assert_transformers(model, made):
    """Check that greedy tokens and the top three logprobs equal transformers' in float32."""
    with torch.no_grad():
        logits = model(torch.tensor([[*made.prompt_ids, *made.ids]])).logits[0, len(made.prompt_ids) - 1 : -1]
    expected = logits.float().log_softmax(-1)
    assert made.ids == expected.argmax(-1).tolist()
    for found, row in zip(made.logprobs, expected, strict=True):
        values, ids = row.topk(3)
        assert found.top_ids == tuple(ids.tolist())
        assert found.top_logprobs == pytest.approx(values.tolist(), abs=TOLERANCE)


# One model per feature: biases, fused projections, QK-norm over all heads and per head, windows, soft caps, parallel
# residual blocks, tied and untied heads, experts with and without a shared one. No size divides the vocabulary of 97.
SHARED = ("qwen2", "phi3", "olmo2", "cohere-qk-norm", "gemma2", "starcoder2", "mixtral", "qwen2-moe")
IN_MAKE_TEST = ("cohere-qk-norm", "qwen2-moe")


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        *(
            pytest.param(name, best(), marks=() if name in ("cohere-qk-norm", "qwen2-moe") else NIGHTLY)
            for name in SHARED
        ),
        ("olmo2", "torch"),
        pytest.param("qwen2", "torch", marks=NIGHTLY),
    ],
)
def test_two_processes_equal_transformers(name, kernels, tmp_path):
    """Cut into chunks, together, with prefixes found again, and preempted where the cache is small."""
    model = tiny.random_model(name)
    model.save_pretrained(tmp_path / name)
    greedy = Params(temperature=0.0, max_tokens=9, ignore_eos=True, logprobs=3)
    with forked(), small(tmp_path / name, kernels=kernels) as llm:
        made = llm.generate(prompts_of(1), greedy)
        again = llm.generate(prompts_of(1)[::-1], greedy)[::-1]
    assert max(one.timing.cached_tokens for one in again) >= 8
    for one, two in zip(made, again, strict=True):
        assert one.ids == two.ids
        assert_transformers(model, one)


def test_ranks_that_outnumber_the_kv_heads_hold_them_together(tmp_path, monkeypatch):
    """Six ranks with two heads are threads of one process in layers/test_architectures.py."""
    monkeypatch.setitem(tiny.CASES, "llama-one-kv-head", ("Llama", {"num_key_value_heads": 1}))
    model = tiny.random_model("llama-one-kv-head")
    model.save_pretrained(tmp_path / "llama")
    with forked(), small(tmp_path / "llama", tensor=2, kernels=best()) as llm:
        for made in llm.generate(prompts_of(2), Params(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=3)):
            assert_transformers(model, made)


@pytest.fixture(scope="module", params=["torch", best()])
def demo_pair(request):
    """The demo model on one process and on two."""
    sizes = {"kv_bytes": 1 << 21, "max_context": 192, "block_tokens": 4, "threads": 1, "kernels": request.param}
    with forked():
        one, two = LLM(DEMO, **sizes), LLM(DEMO, **sizes, tensor=2)
    with one, two:
        yield one, two


def test_every_request_option_is_identical_on_two_processes(demo_pair):
    schema = '{"type": "object", "properties": {"name": {"enum": ["Ada", "Bo"]}}, "required": ["name"]}'
    asked = [
        Params(temperature=0.8, top_p=0.95, top_k=20, seed=3, max_tokens=12, logprobs=4),
        Params(temperature=0.0, max_tokens=12, repetition_penalty=1.3, frequency_penalty=0.5, prompt_logprobs=2),
        Params(temperature=0.7, seed=5, max_tokens=12, min_tokens=6, logit_bias={7: 3.0}, bad_words=((9, 9),)),
        Params(temperature=1.0, seed=9, max_tokens=40, grammar=Grammar("json_schema", schema)),
    ]
    prompts = ["What is 17 + 25?", "Hello", "Tell me a story about a cat.", "Say a name as JSON."]
    single, shared = (llm.generate(prompts, asked) for llm in demo_pair)
    for one, two in zip(single, shared, strict=True):
        assert (one.text, one.ids, one.finish) == (two.text, two.ids, two.finish)
        assert [found.logprob for found in one.logprobs] == pytest.approx(
            [found.logprob for found in two.logprobs], abs=1e-3
        )
    assert len(single[0].logprobs) == len(single[0].ids) and single[1].prompt_logprobs is not None
    assert '"name"' in shared[3].text


def test_memory_is_shared_out(demo_pair):
    one, two = demo_pair
    assert two._worker.kv_bytes == 2 * two._worker.blocks * two._worker.layout.block_bytes
    assert two._worker.layout.block_bytes * 2 == one._worker.layout.block_bytes
    # only norms are replicated, plus padding of the shards for compiled kernels
    assert one._worker.weight_bytes < two._worker.weight_bytes < 1.02 * one._worker.weight_bytes


def test_closing_leaves_no_process():
    before = set(ranks_of(os.getpid()))
    llm = small(DEMO, kv_bytes=1 << 21)
    pids = set(ranks_of(os.getpid())) - before
    assert len(pids) == 1
    llm.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.parametrize("kernels", [best(), *([pytest.param("torch", marks=NIGHTLY)] if best() != "torch" else [])])
@pytest.mark.parametrize(
    ("number", "words", "seconds"),
    [
        (signal.SIGKILL, "was killed by SIGKILL", 5),
        pytest.param(signal.SIGSTOP, "rank 1 has sent no message for 5 s", 20, marks=NIGHTLY),
    ],
)
def test_lost_rank_ends_the_engine_and_is_named(number, words, seconds, kernels):
    before = set(ranks_of(os.getpid()))
    llm = small(DEMO, kv_bytes=1 << 22, max_context=400, kernels=kernels)
    (pid,) = set(ranks_of(os.getpid())) - before
    try:
        assert llm.generate("Hello", Params(max_tokens=3))[0].finish == "length"
        os.kill(pid, number)
        began = time.monotonic()
        with pytest.raises(EngineGone, match=words):
            for _ in range(100):
                llm.generate("Hello", Params(max_tokens=300, ignore_eos=True))
        assert time.monotonic() - began < seconds
    finally:
        llm.close()
    assert not Path(f"/proc/{pid}").exists()


def test_rounded_weights_are_kept_for_each_rank_and_found_again(tmp_path, forked_here):
    asked = Params(temperature=0.0, max_tokens=12)
    given = {"kv_bytes": 1 << 22, "kernels": best(), "weights": "int8", "weight_cache": str(tmp_path)}
    with small(DEMO, **given) as llm:
        first = llm.generate("What is 17 + 25?", asked)[0].ids
    files = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert len(files) == 2, "each rank has a share of its own"
    with small(DEMO, **given) as llm:
        assert llm.generate("What is 17 + 25?", asked)[0].ids == first
    with small(DEMO, tensor=1, **given) as llm:
        llm.generate("What is 17 + 25?", asked)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}.items() > files.items()


def test_load_error_of_a_rank_is_reported_with_its_number(tmp_path):
    tiny.random_model("llama-odd-heads-biases").save_pretrained(tmp_path / "odd")
    before = ranks_of(os.getpid())
    with pytest.raises(ConfigError, match=r"2 ranks cannot share 5 heads"):
        small(tmp_path / "odd")
    assert ranks_of(os.getpid()) == before


# The engine's own process


class Engine:
    def __init__(self, folder, path=DEMO, **more):
        sizes = {"kv_bytes": 1 << 22, "max_context": 400, "kernels": "torch"}
        self.socket = str(folder / "e")
        write_config(
            engine_config(model=str(path), socket=self.socket, tensor=2, **{**sizes, **more}), folder / "c.json"
        )
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "engine", str(folder / "c.json")],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self):
        _, said = self.popen.communicate(timeout=60)
        return self.popen.returncode, said


@pytest.fixture
def engine(tmp_path):
    made = []

    def start(**more):
        made.append(Engine(tmp_path, **more))
        return made[-1]

    yield start
    for one in made:
        left = ranks_of(one.popen.pid)
        one.popen.kill()
        one.popen.communicate()
        wait_until(lambda left=left: not any(Path(f"/proc/{pid}").exists() for pid in left), 5, "ranks end too")


async def connected(engine, states=None):
    client = EngineClient(engine.socket, on_state=lambda state: states is not None and states.append(state))
    task = asyncio.create_task(client.run())
    await asyncio.wait_for(client.wait_ready(), 120)
    return client, task


def ask(count):
    return Submit("a", (300, 301, 302), Sampling(temperature=0.0), count, ignore_eos=True)


async def read(client, submit, also=lambda got: None):
    got = []
    async for delta in client.generate(submit):
        got += delta.ids
        also(got)
    return got


def test_an_engine_of_two_ranks_reports_both_serves_records_and_ends_at_sigterm(engine, tmp_path):
    process, states = engine(record=str(tmp_path / "record")), []

    async def main():
        client, task = await connected(process, states)
        (pid,) = ranks_of(process.popen.pid)
        assert os.getpgid(pid) == os.getpgid(process.popen.pid), "a supervisor ends the whole group"
        assert len(await read(client, ask(20))) == 20
        task.cancel()
        return pid

    pid = asyncio.run(main())
    phases = [state.phase for state in states if state.kind == "loading"]
    assert any("of 2 ranks are done" in phase for phase in phases), phases
    process.popen.send_signal(signal.SIGTERM)
    code, said = process.end()
    (line,) = said.splitlines()  # no rank had anything to say
    assert code == 0 and line.startswith("slipway engine: memory of rank 0 on cpu: weights ")
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), 5, "the rank ends with its engine")
    assert replay([str(tmp_path / "record")]) == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=NIGHTLY)])
def test_lost_rank_is_reported_and_requests_can_resume(engine, number):
    process = engine()

    async def main():
        client, task = await connected(process)
        (pid,) = ranks_of(process.popen.pid)
        with pytest.raises(Interrupted) as caught:
            await read(client, ask(390), lambda got: len(got) == 3 and os.kill(pid, number))
        assert len(caught.value.emitted) >= 3
        task.cancel()
        return pid

    pid = asyncio.run(asyncio.wait_for(main(), 100))
    code, said = process.end()
    assert code == EXIT_CRASH
    lines = [line for line in said.splitlines() if line.startswith("slipway engine: rank:")]
    assert len(lines) == 1 and "rank 1" in lines[0]
    assert "Traceback" not in said
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), 5, "the stopped rank is gone")


def test_an_engine_whose_model_cannot_be_shared_exits_for_good(engine, tmp_path):
    tiny.random_model("llama-odd-heads-biases").save_pretrained(tmp_path / "odd")
    code, said = engine(path=tmp_path / "odd", max_context=48).end()
    assert code == EXIT_PERMANENT and "cannot share 5 heads" in said and len(said.splitlines()) == 1


def test_error_of_one_rank_ends_the_engine_with_its_number(engine):
    """Rank 1 is to run on CPUs that are not there; rank 0 has no trouble of its own."""
    process = engine(rank_cpus=(Place(process_cpus=(9000,)),))
    code, said = process.end()
    assert code == EXIT_PERMANENT
    assert "rank 1: process_cpus=[9000]" in said and len(said.splitlines()) == 1


def test_ranks_end_with_an_engine_that_was_killed(engine):
    process = engine()

    async def main():
        _, task = await connected(process)
        task.cancel()

    asyncio.run(main())
    pids = ranks_of(process.popen.pid)
    process.popen.kill()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 5, "ranks see their engine gone")


def test_rank_0_does_not_wait_for_a_rank_that_exited_early():
    """gloo alone would, for as long as a slow start may take."""
    never, left, world = threading.Event(), [], object()
    with pytest.raises(RuntimeError, match="another rank has exited"):
        _run_abortable(never.wait, lambda abandon: abandon())
    with pytest.raises(RuntimeError, match="another rank has exited"):
        _run_abortable(never.wait, lambda abandon: threading.Timer(0.05, abandon).start())
    assert _run_abortable(lambda: world, left.append) is world
    left[0]()  # too late to matter
    with pytest.raises(ValueError, match="gloo"):
        _run_abortable(lambda: (_ for _ in ()).throw(ValueError("gloo")), left.append)
    never.set()


def test_abort_callback_is_called_if_a_rank_was_already_lost(tmp_path):
    ranks = Ranks.__new__(Ranks)
    ranks._changed, ranks._failure, called = threading.Condition(), RankLost("rank 1 is gone"), []
    ranks.set_abort(lambda: called.append("now"))
    assert called == ["now"]
