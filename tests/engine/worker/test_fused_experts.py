"""The worker on a model with experts, by fused kernels: the tokens of transformers, steps of padded sizes, the same
numbers in any batch; in Triton's interpreter, and on a GPU captured too."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.api.config import EngineConfig, graph_ladder
from engine.api.messages import Sampling
from engine.arguments import engine_config
from engine.kv.layout import layout
from engine.models.checkpoint import read_checkpoint
from engine.worker.build import build_worker
from engine.worker.warm import warm_steps
from kernels.experts.schedule import tile_rows
from kernels.jit import interpreted
from tests.engine.configs import with_arguments
from tests.engine.worker.generating import BLOCK, GREEDY, VOCAB, Requests, silent
from tests.tiers import thinned

ON_GPU = torch.cuda.is_available()
in_interpreter = pytest.mark.skipif(not interpreted(), reason="kernels are compiled here, or Triton is not installed")


def on_gpu(test: Any) -> Any:
    return pytest.mark.gpu(pytest.mark.skipif(not ON_GPU, reason="no CUDA device")(test))


@pytest.fixture(scope="module")
def model() -> Any:
    """Return a Qwen2-MoE model: every second layer has routed experts and one shared expert."""
    config = transformers.Qwen2MoeConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=80,
        num_experts=12,
        num_experts_per_tok=3,
        decoder_sparse_step=2,
        num_hidden_layers=4 if ON_GPU else 2,  # the interpreter takes seconds for each layer
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    torch.manual_seed(1)
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter if parameter.ndim == 1 else 0))
    return made


@pytest.fixture(scope="module")
def config(model: Any, tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    path: Path = tmp_path_factory.mktemp("experts") / "model"
    model.save_pretrained(path)
    return engine_config(
        model=str(path),
        device="cuda" if ON_GPU else "cpu",
        kv_bytes=1 << 24,
        max_context=128,
        block_tokens=BLOCK,
        max_running=32,
        max_step_tokens=128,
        kernels="triton",
    )


def started(config: EngineConfig, **changed: Any) -> Any:
    return build_worker(with_arguments(config, **changed), silent)


@pytest.fixture
def wanted(model: Any) -> Iterator[Any]:
    def tokens(prompt: list[int], count: int) -> list[int]:
        made = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=None)
        return made[0, len(prompt) :].tolist()

    return tokens


def check_tokens(worker: Any, wanted: Any, lengths: list[int], steps: int) -> None:
    requests = Requests(worker, lengths)
    found = requests.generate(steps)
    worker.close()
    for prompt, tokens in zip(requests.ids, found, strict=True):
        assert tokens == wanted(prompt, steps + 1)


@in_interpreter
@pytest.mark.parametrize("invariant", thinned([True, False], kept=[True]))
def test_tokens_are_those_of_transformers_in_steps_of_padded_sizes(config, wanted, invariant):
    """Three requests in a step of four rows. A library multiplies where sums may depend on the batch."""
    check_tokens(started(config, graph_sizes=(1, 4), invariant=invariant), wanted, [5, 40, 17], 4)


@pytest.mark.parametrize(
    ("running", "step", "context"), [(1, 512, 2048), (16, 512, 64), (3, 500, 100), (40, 33, 2048), (2, 2, 2), (1, 1, 8)]
)
def test_a_start_makes_steps_with_tiles_of_every_size_that_any_step_has(config, running, step, context):
    """A prompt that is shorter than a step still leads to warm-up steps with several prompts."""
    sized = with_arguments(config, max_running=running, max_step_tokens=step, max_context=context)
    checkpoint = read_checkpoint(config.model.path)
    form = layout(checkpoint.model, block_tokens=BLOCK, element_bytes=4)
    plans = list(warm_steps(form, checkpoint.model, sized, compiling=True))
    for plan in plans:
        assert sum(row.count for row in plan.rows) <= step and len(plan.rows) <= min(running, step)
        assert all(row.count < max(context, 2) for row in plan.rows)
    made = {tile_rows(sum(row.count for row in plan.rows), 3, 12) for plan in plans if plan.rows}
    most = min(step, running * max(1, min(step, context) - 1))
    assert made == {tile_rows(tokens, 3, 12) for tokens in range(1, most + 1)}
    slots = {row.slot for plan in plans for row in plan.rows}
    assert slots <= set(plans[-1].dropped) <= set(range(min(running, step)))


@pytest.mark.nightly("tests/engine/worker/test_worker.py::test_every_warming_step_runs_and_leaves_nothing")
@pytest.mark.slow
@in_interpreter
def test_steps_of_every_size_run_and_leave_nothing(config, wanted):
    sized = {"max_running": 4, "max_step_tokens": 12, "max_context": 8, "block_tokens": BLOCK, "invariant": True}
    worker = started(config, **sized)
    for plan in warm_steps(worker.layout, worker.model, with_arguments(config, **sized), compiling=True):
        if plan.tokens != 1:  # those are the same without experts
            worker.start(plan, {}).result()
    check_tokens(worker, wanted, [3, 2, 5], 2)


@on_gpu
def test_on_a_gpu_tokens_are_those_of_transformers(config, wanted):
    more = {"graph_sizes": graph_ladder(32), "graph_bytes": 1 << 30}
    check_tokens(started(config, invariant=True, **more), wanted, [5, 40, 17], 20)


def scores(worker: Any, others: int, steps: int) -> list[float]:
    """Return the logprobs of one request that runs in a batch with `others` other requests."""
    requests = Requests(worker, [33] + [11] * others, GREEDY)
    requests.ids[0] = list(range(33))
    handles = [requests.prefill(), *(requests.decode() for _ in range(steps))]
    return [handle.result().logprobs[0][0].logprob for handle in handles]


@pytest.mark.slow
@in_interpreter
def test_an_invariant_request_is_the_same_in_any_batch_bit_for_bit(config):
    """Compare a batch of one with a batch that is large enough for the expert kernels to use larger tiles."""
    worker = started(config, invariant=True, max_step_tokens=256)
    assert scores(worker, 0, 2) == scores(worker, 9, 2)
    worker.close()


@on_gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_gpu_too_bit_for_bit(config, dtype):
    worker = started(config, invariant=True, max_step_tokens=512, dtype=dtype, kv_dtype=dtype)
    assert scores(worker, 0, 6) == scores(worker, 1, 6) == scores(worker, 7, 6) == scores(worker, 31, 6)
    worker.close()


@on_gpu
@pytest.mark.parametrize("lengths", [[3], [3, 8, 20], [5] * 9])
def test_a_captured_step_is_the_step_itself(config, lengths):
    found = []
    for sizes in (graph_ladder(32), ()):
        worker = started(config, graph_sizes=sizes, graph_bytes=1 << 30, invariant=True)
        found.append(Requests(worker, lengths, Sampling(seed=5, logprobs=0)).generate(12))
        worker.close()
    assert found[0] == found[1]


@on_gpu
@pytest.mark.parametrize("invariant", [True, False])
def test_a_steady_step_never_waits_for_the_device_and_compiles_nothing(config, invariant):
    import triton

    worker = started(config, dtype="bfloat16", kv_dtype="bfloat16", invariant=invariant)
    compiled: list[str] = []
    triton.knobs.compilation.listener = lambda **facts: compiled.append(facts["src"].name)
    try:
        for lengths in ([9] * 7, [1], [2, 30], [90], [4] * 31):
            requests = Requests(worker, lengths)
            requests.prefill().result()
            requests.decode().result()
            torch.cuda.synchronize()
            worker._thread.submit(torch.cuda.set_sync_debug_mode, "error").result()
            handles = [requests.decode() for _ in range(4)]
            for handle in handles:
                handle.started.result()
            worker._thread.submit(torch.cuda.set_sync_debug_mode, "default").result()
            for handle in handles:
                handle.result()
    finally:
        triton.knobs.compilation.listener = None
        worker.close()
    assert not compiled
