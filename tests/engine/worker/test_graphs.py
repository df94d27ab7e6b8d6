"""Tests of captured steps: choice of the graph size, memory budget, output buffers."""

import copy
from dataclasses import replace

import pytest
import torch
import transformers

from appliance.planning.workspace import graphs as planned_graphs
from engine.api.config import graph_ladder, mixed_graph_ladder
from engine.api.messages import Sampling
from engine.arguments import engine_config
from engine.core.plan import NewRow, Row, StepPlan
from engine.layers.model import make_pages
from engine.worker import precompile
from engine.worker.graphs import Graphs, recorder_of
from engine.worker.precompile import parts_on
from kernels.fp8 import products_of
from kernels.jit import interpreted, recorded
from tests.tiers import thinned

CPU = torch.device("cpu")
MIB = 2**20


def graphs(*sizes):
    ran = []

    def run(size):
        ran.append(size)
        return f"outputs of {size}"

    return Graphs(sizes, run, recorder_of(CPU)), ran


def test_a_step_runs_in_the_least_size_that_holds_it():
    made, ran = graphs(1, 2, 4, 8)
    assert [made.size_for(rows) for rows in (1, 2, 3, 4, 5, 8, 9)] == [1, 2, 4, 4, 8, 8, None]
    assert made.replay(4) == "outputs of 4" and ran == [4]


def test_without_sizes_no_step_is_captured():
    assert graphs()[0].size_for(1) is None


def test_a_size_that_is_not_on_the_ladder_is_refused():
    with pytest.raises(ValueError, match=r"no graph for 3 rows; there are \[1, 2, 4, 8\]"):
        graphs(1, 2, 4, 8)[0].replay(3)


@pytest.mark.parametrize("sizes", [(2, 1), (1, 1), (0, 1)])
def test_sizes_that_no_step_could_reach_are_refused(sizes):
    with pytest.raises(ValueError, match="must be ascending and at least 1"):
        graphs(*sizes)


def test_a_device_without_graphs_captures_nothing():
    made, ran = graphs(1, 2)
    assert made.capture(10**9) == 0 and ran == [] and made.replay(2) == "outputs of 2"


@pytest.mark.parametrize("most", [1, 3, 7, 64, 100, 256, 1000])
def test_the_ladder_ends_at_the_most_rows_and_pads_little(most):
    sizes = graph_ladder(most)
    assert sizes[-1] == most and list(sizes) == sorted(set(sizes))
    for rows in range(1, most + 1):
        size = next(size for size in sizes if size >= rows)
        assert size - rows <= max(8, rows // 4)


class Pool:
    """Simulated GPU allocator with a graph pool. The pool reuses freed pieces and grows by the missing bytes.

    `beside`: bytes reserved outside the pool; `unused`: those of them that are not in use."""

    def __init__(self, beside=0, unused=0):
        self.beside, self.unused = beside, unused
        self.size = self.memory_in_use = 0

    def take(self, nbytes):
        self.memory_in_use += nbytes
        self.size = max(self.size, self.memory_in_use)

    def free(self, nbytes):
        self.memory_in_use -= nbytes

    def reserved(self):
        self.unused = 0
        return self.beside + self.size

    def record(self, launches):
        outputs = launches()
        return (lambda: None), outputs

    def reset(self):
        self.size = self.memory_in_use = 0


VOCAB, WIDTH = 128256, 28672


def steps_of(pool, *, shared):
    """Return a function that simulates a step of an 8B model: it allocates activations and fp32 logits.

    The logits stay allocated unless a shared buffer takes them."""

    def run(size):
        activations, logits = 2 * size * WIDTH, 4 * size * VOCAB
        pool.take(activations + logits)
        pool.free(activations + (logits if shared else 0))
        return size

    return run


LADDER = graph_ladder(256)
interpreter = pytest.mark.skipif(not interpreted(), reason="kernels are compiled here, or Triton is not installed")


def test_all_sizes_fit_the_memory_of_the_largest():
    pool = Pool()
    made = Graphs(LADDER, steps_of(pool, shared=True), pool)
    largest = 256 * (2 * WIDTH + 4 * VOCAB)
    assert made.capture(largest) == largest and made.sizes == LADDER
    pool = Pool()
    kept = Graphs(LADDER, steps_of(pool, shared=False), pool)
    kept.capture(largest)
    assert kept.sizes == (256,), "the simulation shows what outputs in the pool cost"


@pytest.mark.parametrize("largest", [1, 48, 128])
def test_a_budget_that_is_cut_in_the_middle_keeps_the_smaller_sizes(largest):
    pool = Pool(beside=3 * MIB, unused=MIB)
    made = Graphs(LADDER, steps_of(pool, shared=True), pool)
    budget = (largest + 1) * (2 * WIDTH + 4 * VOCAB) - 1
    assert made.capture(budget) <= budget
    assert made.sizes == tuple(size for size in LADDER if size <= largest)
    assert made.has == [size <= largest for size in LADDER]


def test_memory_that_nothing_uses_does_not_count_as_taken_before():
    pool = Pool(unused=500 * MIB)
    made = Graphs((8,), steps_of(pool, shared=True), pool)
    assert made.capture(2**30) == 8 * (2 * WIDTH + 4 * VOCAB)


def test_a_step_that_would_be_mostly_padding_is_launched():
    pool = Pool()
    made = Graphs((1, 16, 240, 256), steps_of(pool, shared=True), pool)
    made.capture(2**40)
    assert [made.size_for(rows) for rows in (1, 7, 8, 16, 17, 179, 180, 240, 241)] == [
        1, None, 16, 16, None, None, 240, 240, 256
    ]  # fmt: skip


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("graphs")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    transformers.LlamaConfig(vocab_size=500, architectures=["LlamaForCausalLM"], **sizes, **heads).save_pretrained(path)
    return engine_config(
        model=str(path), kv_bytes=1 << 20, max_context=64, max_step_tokens=32, max_running=8, block_tokens=16,
        kernels="triton", invariant=True, load="random",
    )  # fmt: skip


def runner_of(config, sizes=(), mixed=(), pages=12, recorders=Pool):
    parts, model = parts_on(CPU, config, products_of(None, invariant=True))
    made = parts.runner(make_pages(parts.layout, pages, torch.float32, CPU), sizes, mixed, lambda device: recorders())
    return made, model


@interpreter
def test_captured_steps_leave_their_outputs_in_shared_buffers_of_the_planned_size(config):
    runner, model = runner_of(config, (1, 4, 8), (4, 16))
    taken = runner.capture(2**30)
    # Rows without a token have undefined outputs, so every row gets one.
    runner._upload.slot[:8] = torch.arange(8, dtype=torch.int32)
    runner._upload.query_start[:9] = torch.arange(9, dtype=torch.int32)
    with torch.inference_mode():
        decode = {size: runner._decode_graphs._run(size) for size in (8, 4, 1)}
        mixed = {size: runner._mixed_graphs._run(size) for size in (16, 4)}
    for name in ("hidden", "logits", "lengths", "bad", "drawn"):
        for outputs in (decode, mixed):
            parts = [getattr(one, name) for one in outputs.values() if getattr(one, name) is not None]
            assert len({part.untyped_storage().data_ptr() for part in parts}) <= 1, name
    assert [len(one.logits) for one in decode.values()] == [8, 4, 1]
    assert [len(one.hidden) for one in mixed.values()] == [16, 4]
    assert decode[8].logits.isfinite().all() and decode[8].logits.any()
    planned = planned_graphs(model, sizes=(1, 4, 8), mixed=(4, 16), element_bytes=4)
    assert 8 * (500 * 4 + 32 * 4) + 16 * 32 * 4 < taken <= sum(step.value for step in planned)


def expert_config(path, *, routes):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    experts = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
    names = {"architectures": ["Qwen3MoeForCausalLM"]}
    transformers.Qwen3MoeConfig(vocab_size=500, **names, **sizes, **heads, **experts).save_pretrained(path)
    return engine_config(
        model=str(path), kv_bytes=1 << 20, max_context=64, max_step_tokens=32, max_running=8, block_tokens=16,
        kernels="triton", invariant=True, load="random", return_routed_experts=routes,
    )  # fmt: skip


@pytest.mark.parametrize(("routes", "kept"), [(True, ()), (False, (0, 2)), (True, (1,))])
def test_outputs_that_only_some_models_have_are_planned(tmp_path, monkeypatch, routes, kept):
    """Compare the plan with the outputs of captured steps on `meta` tensors, whose launches are recorded."""
    read = precompile.read_checkpoint

    def reading(*arguments, **options):
        found = read(*arguments, **options)
        return replace(found, model=replace(found.model, kept_layers=kept))

    monkeypatch.setattr(precompile, "read_checkpoint", reading)
    config = expert_config(tmp_path, routes=routes)
    parts, model = parts_on(torch.device("meta"), config, products_of(None, invariant=True))
    runner = parts.runner(make_pages(parts.layout, 12, torch.float32, torch.device("meta")), (1, 8), (16,))
    with recorded(), torch.inference_mode():
        decode, mixed = runner._decode(8), runner._mixed(16)
    assert (decode.routes is not None, decode.kept is not None) == (routes, bool(kept))
    own = [sum(one.nbytes for one in (out.routes, out.kept) if one is not None) for out in (decode, mixed)]
    plans = [
        sum(step.value for step in planned_graphs(model, sizes=(1, 8), mixed=(16,), element_bytes=4, routes=one))
        for one in (routes, False)
    ]
    plain = sum(
        step.value
        for step in planned_graphs(replace(model, kept_layers=()), sizes=(1, 8), mixed=(16,), element_bytes=4)
    )
    assert plans[0] - plain >= 2 * sum(own) > 0 and (plans[0] > plans[1]) == routes


# Seeds, truncation and a processor: sampled in the graph, and after it.
SAMPLINGS = (Sampling(seed=1), Sampling(top_p=0.8, top_k=40, seed=2), Sampling(temperature=0.0))


def steps_with_chunks(processor):
    """Yield steps in which chunks of prompts, one of them a single token that samples nothing, join decode rows."""
    own = (*SAMPLINGS, Sampling(seed=4, allowed_token_ids=(5, 6) if processor else None))
    prompts = [[(7 * slot + 3 * at) % 500 for at in range(length)] for slot, length in enumerate((5, 9, 1, 12))]
    new = [NewRow(slot, tuple(ids), len(ids), own[slot], (), len(ids)) for slot, ids in enumerate(prompts)]
    blocks = [((3 * slot, 3 * slot + 1, 3 * slot + 2),) for slot in range(4)]
    none = ((),)
    yield StepPlan(1, tuple(new[:3]), (), (
        Row(0, 0, 5, True, blocks[0]), Row(1, 0, 8, False, blocks[1]), Row(2, 0, 1, True, blocks[2])))  # fmt: skip
    yield StepPlan(2, (), (), (Row(0, 5, 1, True, none), Row(1, 8, 1, True, none), Row(2, 1, 1, True, none)))
    yield StepPlan(3, (new[3],), (), (
        Row(0, 6, 1, True, none), Row(3, 0, 10, False, blocks[3]), Row(2, 2, 1, True, none)))  # fmt: skip
    yield StepPlan(4, (), (), (Row(3, 10, 1, False, none), Row(1, 9, 1, True, none)))
    yield StepPlan(5, (), (), (Row(3, 11, 1, True, none), Row(0, 7, 1, True, none), Row(1, 10, 1, True, none)))
    yield StepPlan(6, (), (), tuple(Row(slot, at, 1, True, none) for slot, at in enumerate((8, 11, 3, 12))))
    yield StepPlan(7, (), (), tuple(Row(slot, at, 1, True, none) for slot, at in enumerate((9, 12, 4, 13))))


@interpreter
@pytest.mark.parametrize("processor", thinned([False, True], kept=[True]))
def test_padded_mixed_and_decode_steps_sample_the_tokens_of_plain_launches(config, processor):
    found = []
    for sizes, mixed in (((), ()), ((2, 4, 8), (8, 16, 32))):
        runner, _ = runner_of(config, sizes, mixed)
        with torch.inference_mode():
            results = [runner.start(plan, {})() for plan in steps_with_chunks(processor)]
        found.append(([one.sampled for one in results], runner._table.tokens[:4, :16].tolist()))
    assert found[0] == found[1]
    assert any(token > 0 for token in found[0][0][6])


class Replayed(Pool):
    """Launches a captured step again at each replay."""

    def record(self, launches):
        return launches, launches()


class LateResults:
    """Copies results to the host as late as a GPU may: when they are waited for."""

    def fetch(self, tensors):
        self.wait = lambda: [tensor.numpy().copy() for tensor in tensors]
        return copy.copy(self)


@interpreter
@pytest.mark.parametrize("slots", [(0,), (0, 1)], ids=["one", "largest"])
def test_a_captured_step_does_not_overwrite_results_that_are_still_copied(config, slots):
    runner = runner_of(config, (1, 2), recorders=Replayed)[0]
    runner.capture(2**30)
    own, starts = Sampling(temperature=0.0), range(3, 3 + len(slots))
    new = tuple(
        NewRow(slot, (9, 8, 7, 6)[:count], count, own, (), count) for slot, count in zip(slots, starts, strict=True)
    )
    rows = tuple(Row(new.slot, 0, len(new.ids), True, ((3 * new.slot, 3 * new.slot + 1),)) for new in new)

    def decoded(step):
        return StepPlan(
            step, (), (), tuple(Row(slot, at + step, 1, True, ((),)) for slot, at in zip(slots, starts, strict=True))
        )

    runner._results = LateResults()
    with torch.inference_mode():
        runner.start(StepPlan(-1, new, (), rows), {})()
        reads = [runner.start(decoded(step), {}) for step in range(4)]  # as a host that runs ahead
        found = [read().sampled for read in reads]
    tokens = runner._table.tokens
    wanted = [
        tuple(int(tokens[slot, at + step + 1]) for slot, at in zip(slots, starts, strict=True)) for step in range(4)
    ]
    assert found == wanted and len(set(found)) > 1


@pytest.mark.parametrize("most", [1, 2, 16, 100, 512, 8192])
def test_the_ladder_of_mixed_steps_ends_at_512_tokens_and_pads_little(most):
    sizes = mixed_graph_ladder(most)
    if most < 2:
        assert sizes == ()
        return
    assert sizes[-1] == min(most, 512)
    made = Graphs(sizes, lambda size: size, None)
    assert all(made.size_for(tokens) is not None for tokens in range(sizes[0] - 8, sizes[-1] + 1) if tokens > 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_replay_is_what_the_launches_give():
    device = torch.device("cuda")
    weight = torch.randn(64, 64, device=device)
    x = torch.randn(8, 64, device=device)
    made = Graphs((1, 4, 8), lambda size: torch.tanh(x[:size] @ weight), recorder_of(device))
    assert made.capture(2**30) >= 0
    for size in (1, 4, 8):
        x.copy_(torch.randn(8, 64, device=device))
        assert torch.equal(made.replay(size), torch.tanh(x[:size] @ weight))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_sizes_beyond_the_budget_are_left_out():
    device = torch.device("cuda")
    made = Graphs((1, 64), lambda size: torch.zeros(size, 2**20, device=device) + 1, recorder_of(device))
    made.capture(64 * 2**20)
    assert made.size_for(64) is None and made.size_for(1) == 1
