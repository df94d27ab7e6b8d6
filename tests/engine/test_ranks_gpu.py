"""Ranks on GPUs: nccl inside captured graphs and out of them. Without one the same runner in Triton's interpreter."""

import os
import signal
from pathlib import Path

import pytest
import torch

from engine.api.errors import EngineGone
from engine.llm import LLM, Params
from kernels.jit import installed
from tests.engine.translators import write

DEMO = Path(__file__).parents[2] / "manifests" / "demo"
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
SIZES = {"kv_bytes": 1 << 24, "max_context": 64, "block_tokens": 16, "max_running": 4, "max_step_tokens": 16}
GRAPHS = {"graph_sizes": (1, 2, 4), "graph_bytes": 1 << 30}
PROMPTS = ["What is 17 + 25?", "Hello", "Tell me a story about a cat"]
GREEDY = Params(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2)


def said(llm, prompts=PROMPTS, params=GREEDY):
    made = llm.generate(prompts, params)
    return [one.ids for one in made], [found.logprob for one in made for found in one.logprobs]


def assert_same(one, two, abs):
    assert one[0] == two[0]
    assert one[1] == pytest.approx(two[1], abs=abs)


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """Write a tiny checkpoint with two KV heads and biases."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen2Config(
        vocab_size=101,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    torch.manual_seed(3)
    path = tmp_path_factory.mktemp("ranks") / "dense"
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def interpreted_pair(dense):
    """One rank and two, in Triton's interpreter."""
    if torch.cuda.is_available() or not installed():
        pytest.skip("the interpreter is for hosts without a GPU")
    given = {**SIZES, "kernels": "triton", "device": "cpu", "dtype": "float32", "threads": 1, "graph_sizes": (1, 2, 4)}
    with LLM(dense, **given) as one, LLM(dense, **given, tensor=2) as two:
        yield one, two


def test_the_runner_of_a_gpu_does_on_two_ranks_what_it_does_on_one(interpreted_pair):
    """Its table, its staged plans, its sampling and its choice of graphs, with gloo between the ranks."""
    one, two = interpreted_pair
    assert_same(said(one, IDS), said(two, IDS), 1e-4)


def test_two_ranks_sample_the_tokens_of_one(interpreted_pair):
    drawn = Params(seed=5, top_k=7, top_p=0.8, max_tokens=3, ignore_eos=True)
    ids = [[made.ids for made in llm.generate(IDS, drawn)] for llm in interpreted_pair]
    assert ids[0] == ids[1]


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """Write a tiny mixture-of-experts checkpoint with a shared expert."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen2MoeConfig(
        vocab_size=101,
        hidden_size=32,
        moe_intermediate_size=20,
        shared_expert_intermediate_size=28,
        num_experts=6,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    torch.manual_seed(3)
    path = tmp_path_factory.mktemp("ranks") / "experts"
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path


IDS = [[5, 6, 7, 8, 9], [10, 11], [12, 13, 14, 15, 16, 17, 18]]


@pytest.mark.nightly("tests/engine/test_ranks_gpu.py::test_the_runner_of_a_gpu_does_on_two_ranks_what_it_does_on_one")
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available() or not installed(), reason="the interpreter is for hosts without a GPU")
def test_ranks_share_every_expert(experts):
    given = {**SIZES, "kernels": "triton", "device": "cpu", "dtype": "float32", "threads": 1, "graph_sizes": (1, 2, 4)}
    with LLM(experts, **given) as one, LLM(experts, **given, tensor=2) as two:
        assert_same(said(one, IDS), said(two, IDS), 1e-4)


@pytest.mark.gpu
@TWO
@pytest.mark.parametrize("graphs", [GRAPHS, {}], ids=["graphs", "launches"])
def test_two_gpus_share_every_expert(experts, graphs):
    given = {**SIZES, **graphs, "kernels": "triton", "device": "cuda", "dtype": "float32"}
    with LLM(experts, **given) as one, LLM(experts, **given, tensor=2) as two:
        assert_same(said(one, IDS), said(two, IDS), 2e-3)


@pytest.fixture(scope="module")
def translator(tmp_path_factory):
    sizes = {"d_model": 64, "encoder_ffn_dim": 96, "decoder_ffn_dim": 80, "max_position_embeddings": 64}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 2}
    return write(tmp_path_factory.mktemp("ranks"), "bart", **sizes, **heads).path


SOURCED = {**SIZES, "max_context": 100, "max_step_tokens": 80}


@pytest.mark.nightly("tests/engine/test_ranks_gpu.py::test_the_runner_of_a_gpu_does_on_two_ranks_what_it_does_on_one")
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available() or not installed(), reason="the interpreter is for hosts without a GPU")
def test_ranks_share_an_encoder_in_front(translator):
    given = {**SOURCED, "kernels": "triton", "device": "cpu", "dtype": "float32", "threads": 1}
    with LLM(translator, **given) as one, LLM(translator, **given, tensor=2) as two:
        assert_same(said(one, IDS), said(two, IDS), 1e-3)


@pytest.mark.gpu
@TWO
@pytest.mark.parametrize("graphs", [GRAPHS, {}], ids=["graphs", "launches"])
def test_two_gpus_share_an_encoder_in_front(translator, graphs):
    given = {**SOURCED, **graphs, "kernels": "triton", "device": "cuda", "dtype": "float32"}
    with LLM(translator, **given) as one, LLM(translator, **given, tensor=2) as two:
        assert_same(said(one, IDS), said(two, IDS), 2e-3)


@pytest.mark.gpu
@TWO
@pytest.mark.parametrize("kernels", ["triton", "torch"])
@pytest.mark.parametrize("graphs", [GRAPHS, {}], ids=["graphs", "launches"])
def test_two_gpus_equal_one(kernels, graphs):
    given = {**SIZES, "kernels": kernels, "device": "cuda", "dtype": "float32"}
    more = graphs if kernels == "triton" else {}
    with LLM(DEMO, **given, **more) as one, LLM(DEMO, **given, **more, tensor=2) as two:
        assert_same(said(one), said(two), 2e-3)
        for rows in (1, 2, 3, 4):  # every size that was captured, and one between
            assert_same(said(one, PROMPTS[:1] * rows), said(two, PROMPTS[:1] * rows), 2e-3)


@pytest.mark.gpu
@TWO
def test_on_two_gpus_too_a_row_does_not_depend_on_the_rows_beside_it():
    given = {**SIZES, **GRAPHS, "kernels": "triton", "device": "cuda", "dtype": "bfloat16", "invariant": True}
    with LLM(DEMO, **given, tensor=2) as llm:
        together = said(llm)
        alone = [said(llm, [prompt]) for prompt in PROMPTS]
    assert together[0] == [ids for one in alone for ids in one[0]]
    assert together[1] == [logprob for one in alone for logprob in one[1]]


@pytest.mark.gpu
@TWO
def test_a_killed_rank_ends_an_engine_that_waits_for_its_gpu():
    given = {**SIZES, **GRAPHS, "max_context": 512, "kernels": "triton", "device": "cuda", "dtype": "bfloat16"}
    llm = LLM(DEMO, **given, tensor=2)
    try:
        llm.generate(PROMPTS, GREEDY)
        (pid,) = llm._worker._ranks.pids
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineGone, match="rank 1"):
            for _ in range(50):
                llm.generate("Hello", Params(max_tokens=400, ignore_eos=True))
    finally:
        assert not Path(f"/proc/{pid}/stat").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text()
