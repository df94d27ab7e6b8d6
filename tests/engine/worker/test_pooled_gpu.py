"""Models that pool on a GPU: what transformers computes, without waiting for the device or compiling on the way."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.api.config import EngineConfig, TaskConfig
from engine.api.messages import Pooling, Sampling
from engine.arguments import engine_config
from engine.core.plan import NewRow, Row, StepPlan
from engine.worker.build import build_worker
from engine.worker.worker import Worker
from tests.engine.configs import with_arguments
from tests.engine.layers.pooled_cases import values

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

VOCAB, BLOCK = 1000, 16
SIZES = {"vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertModel", {"num_attention_heads": 4}),
    "modernbert": ("ModernBertModel", {"num_attention_heads": 4, "local_attention": 32, "pad_token_id": 0}),
    "qwen3": ("Qwen3Model", {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}),
}
EMBED, TOKENS = Pooling("embed"), Pooling("token_embed", activate=False)


def silent(phase: str, fraction: float) -> None:
    """Ignore progress reports."""


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest) -> Any:
    kind, more = KINDS[request.param]
    classed = getattr(transformers, kind)
    torch.manual_seed(1)
    return classed(classed.config_class(**SIZES, **more)).eval()


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
        max_step_tokens=512,
        kernels="triton",
        task=TaskConfig(pool="mean"),
    )


@pytest.fixture(params=["float32", "bfloat16"])
def worker(config: EngineConfig, request: pytest.FixtureRequest) -> Iterator[Worker]:
    dtype = request.param
    made = build_worker(with_arguments(config, dtype=dtype, kv_dtype=dtype), silent)
    yield made
    made.close()


def prompts(*lengths: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(len(lengths))
    return [torch.randint(3, VOCAB, (length,), generator=draw).tolist() for length in lengths]


def start(worker: Worker, number: int, ids: list[list[int]], pooling: Pooling) -> Any:
    """A step of whole prompts in the first slots."""
    groups, taken, rows = worker.layout.groups, 1, []
    for slot, one in enumerate(ids):
        need = -(-len(one) // BLOCK)
        rows.append(Row(slot, 0, len(one), False, tuple(tuple(range(taken, taken + need)) for _ in groups)))
        taken += need
    new = tuple(NewRow(slot, tuple(one), len(one), Sampling(), (), len(one), pooling) for slot, one in enumerate(ids))
    return worker.start(StepPlan(number, new, (), tuple(rows)), {})


def states(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).last_hidden_state[0]


def test_states_and_vectors_are_those_of_transformers(config: EngineConfig, model: Any) -> None:
    worker = build_worker(config, silent)
    ids = prompts(5, 130, 1, 70)
    tokens, vectors = (start(worker, at, ids, pooling).result() for at, pooling in enumerate((TOKENS, EMBED)))
    for row, one in enumerate(ids):
        want = states(model, one)
        torch.testing.assert_close(values(tokens, row), want, atol=2e-3, rtol=1e-3)
        mean = torch.nn.functional.normalize(want.mean(0), dim=0)
        torch.testing.assert_close(values(vectors, row), mean, atol=1e-3, rtol=0)
    worker.close()


def test_a_steady_step_never_waits_for_the_device(worker: Worker) -> None:
    for pooling in (EMBED, TOKENS):
        start(worker, 0, prompts(9, 30, 1), pooling).result()
        torch.cuda.synchronize()
        worker._thread.submit(torch.cuda.set_sync_debug_mode, "error").result()
        try:
            handles = [start(worker, at, prompts(9, 30, 1), pooling) for at in range(4)]
            for handle in handles:
                handle.started.result()  # the launches, not the numbers
        finally:
            worker._thread.submit(torch.cuda.set_sync_debug_mode, "default").result()
        for handle in handles:
            assert set(handle.result().pooled) == {0, 1, 2}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_invariant_prompt_is_the_same_in_any_step_bit_for_bit(config: EngineConfig, dtype: str) -> None:
    made = build_worker(with_arguments(config, dtype=dtype, kv_dtype=dtype, invariant=True), silent)
    for pooling in (EMBED, TOKENS):
        found = []
        for others in (0, 1, 7, 31):
            ids = [prompts(33)[0], *prompts(*[11] * others)]
            found.append(values(start(made, others, ids, pooling).result(), 0))
        assert all(torch.equal(one, found[0]) for one in found)
    made.close()


def test_a_measured_pool_fits_beside_what_was_measured(config: EngineConfig) -> None:
    free, _ = torch.cuda.mem_get_info()
    sized = {"kv_measured": True, "kv_bytes": free, "weight_bytes": 1 << 28, "workspace_bytes": 1 << 29}
    made = build_worker(with_arguments(config, **sized), silent)
    assert made.kv_bytes < free
    assert (made.kv_bytes > 0.5 * free) == bool(made.layout.groups)
    assert len(start(made, 1, prompts(200, 200), TOKENS).result().pooled) == 2
    made.close()


def test_nothing_is_compiled_after_the_start(worker: Worker) -> None:
    import triton

    compiled = []
    triton.knobs.compilation.listener = lambda **facts: compiled.append(facts["src"].name)
    try:
        for pooling in (EMBED, TOKENS, Pooling("token_embed"), Pooling("embed", activate=False)):
            for lengths in ([1], [2, 30], [100], [7] * 20, [1] * 17):
                start(worker, len(lengths), prompts(*lengths), pooling).result()
    finally:
        triton.knobs.compilation.listener = None
    assert not compiled
