"""Tests of the worker on a GPU: no device synchronization, graph replay equals eager launches, KV pool size."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.api.config import EngineConfig, graph_ladder
from engine.api.messages import Sampling
from engine.arguments import engine_config
from engine.worker.build import build_worker
from engine.worker.worker import Worker
from tests.engine.configs import with_arguments
from tests.engine.worker.generating import BLOCK, GREEDY, VOCAB, Requests, silent

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(scope="module")
def model() -> Any:
    config = transformers.Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
    )
    torch.manual_seed(1)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def config(model: Any, tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    path: Path = tmp_path_factory.mktemp("gpu") / "model"
    model.save_pretrained(path)
    return engine_config(
        model=str(path),
        device="cuda",
        dtype="float32",
        kv_dtype="float32",
        kv_bytes=1 << 28,
        max_context=256,
        block_tokens=BLOCK,
        max_running=32,
        max_step_tokens=256,
        kernels="triton",
        graph_sizes=graph_ladder(32),
        graph_bytes=1 << 30,
    )


@pytest.fixture(params=[("float32", "stored"), ("bfloat16", "stored"), ("bfloat16", "fp8")], ids="-".join)
def worker(config: EngineConfig, request: pytest.FixtureRequest) -> Iterator[Worker]:
    dtype, weights = request.param
    made = build_worker(with_arguments(config, dtype=dtype, kv_dtype=dtype, weights=weights), silent)
    yield made
    made.close()


def test_tokens_are_those_of_transformers(config: EngineConfig, model: Any) -> None:
    worker = build_worker(config, silent)
    requests = Requests(worker, [5, 40, 17])
    found = requests.generate(20)
    for prompt, tokens in zip(requests.ids, found, strict=True):
        wanted = model.generate(torch.tensor([prompt]), max_new_tokens=21, do_sample=False, eos_token_id=None)
        assert tokens == wanted[0, len(prompt) :].tolist()
    worker.close()


def test_a_steady_step_never_waits_for_the_device(worker: Worker) -> None:
    for sampling in (GREEDY, Sampling(seed=3), Sampling(top_p=0.9, top_k=50, repetition_penalty=1.1, seed=4)):
        requests = Requests(worker, [9] * 7, sampling)
        requests.prefill().result()
        requests.decode().result()
        torch.cuda.synchronize()
        worker._thread.submit(torch.cuda.set_sync_debug_mode, "error").result()
        try:
            handles = [requests.decode() for _ in range(4)]
            for handle in handles:
                handle.started.result()  # the launches, not the tokens
        finally:
            worker._thread.submit(torch.cuda.set_sync_debug_mode, "default").result()
        for handle in handles:
            handle.result()


def test_a_captured_step_is_the_step_itself(config: EngineConfig) -> None:
    for lengths in ([3], [3, 8, 20], [5] * 9):
        found = []
        for sizes in (graph_ladder(32), ()):
            made = build_worker(with_arguments(config, graph_sizes=sizes, invariant=True), silent)
            found.append(Requests(made, lengths, Sampling(seed=5, logprobs=0)).generate(12))
            made.close()
        assert found[0] == found[1]


@pytest.mark.parametrize(
    ("dtype", "weights"), [("float32", "stored"), ("bfloat16", "stored"), ("bfloat16", "fp8"), ("float16", "fp8")]
)
def test_an_invariant_request_is_the_same_in_any_batch_bit_for_bit(
    config: EngineConfig, dtype: str, weights: str
) -> None:
    asked = with_arguments(config, dtype=dtype, kv_dtype=dtype, weights=weights, invariant=True)
    made = build_worker(asked, silent)
    scores = []
    for others in (0, 1, 7, 31):
        requests = Requests(made, [33] + [11] * others, GREEDY)
        requests.ids[0] = list(range(33))
        handles = [requests.prefill(), *(requests.decode() for _ in range(6))]
        scores.append([handle.result().logprobs[0][0].logprob for handle in handles])
    assert all(score == scores[0] for score in scores)
    made.close()


def test_pages_of_8_bits_keep_most_tokens(config: EngineConfig) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no fp8")
    found = []
    for kv_dtype in ("bfloat16", "fp8"):
        made = build_worker(with_arguments(config, dtype="bfloat16", kv_dtype=kv_dtype), silent)
        handle = Requests(made, [60], GREEDY).prefill()
        found.append(handle.result().logprobs[0][0].logprob)
        made.close()
    assert found[0] == pytest.approx(found[1], abs=0.05)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_weights_in_fp8_take_a_byte_a_number_and_cost_little(config: EngineConfig, dtype: str) -> None:
    """Torch's product in bfloat16, our own in the others, or weights that are widened."""
    found, held = [], []
    for weights in ("stored", "fp8"):
        asked = with_arguments(config, dtype=dtype, kv_dtype=dtype, weights=weights)
        made = build_worker(asked, silent)
        found.append(Requests(made, [60], GREEDY).prefill().result().logprobs[0][0].logprob)
        held.append(made.memory_usage["mlp"])
        made.close()
    assert found[0] == pytest.approx(found[1], abs=0.1)
    outputs, numbers = 3 * (2 * 512 + 256), 3 * 3 * 256 * 512
    assert held == [numbers * (4 if dtype == "float32" else 2), numbers + 4 * outputs]


def test_a_measured_pool_fits_beside_what_was_measured(config: EngineConfig) -> None:
    free, _ = torch.cuda.mem_get_info()
    sized = {"kv_measured": True, "kv_bytes": free, "weight_bytes": 1 << 28, "workspace_bytes": 1 << 29}
    made = build_worker(with_arguments(config, **sized), silent)
    assert 0.5 * free < made.kv_bytes < free
    Requests(made, [200]).generate(3)
    made.close()


def test_nothing_is_compiled_after_the_start(worker: Worker) -> None:
    import triton

    compiled = []
    triton.knobs.compilation.listener = lambda **facts: compiled.append(facts["src"].name)
    try:
        for sampling in (
            GREEDY,
            Sampling(seed=1),
            Sampling(top_p=0.5, top_k=7, min_p=0.01, seed=1),
            Sampling(repetition_penalty=1.2, frequency_penalty=0.3, logprobs=3, seed=1),
        ):
            for lengths in ([1], [2, 30], [100], [7] * 20):
                Requests(worker, lengths, sampling).generate(2)
    finally:
        triton.knobs.compilation.listener = None
    assert not compiled
