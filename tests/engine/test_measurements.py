"""Measurements of `LLM`: metrics, operations and memory traffic of steps, and profiles."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.api.config import StepCosts
from engine.api.errors import ConfigError
from engine.llm import LLM, Params
from engine.metrics.reader import Counter, Gauge, Histogram, MetricValue

DEMO = Path(__file__).parents[2] / "manifests" / "demo"
CONFIG = json.loads((DEMO / "config.json").read_text())
HIDDEN, LAYERS, MLP, VOCAB = (
    CONFIG[name] for name in ("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size")
)
HEADS, KV_HEADS, DIM = (CONFIG[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
MATRICES = LAYERS * (HIDDEN * DIM * (HEADS + 2 * KV_HEADS) + HEADS * DIM * HIDDEN + 3 * HIDDEN * MLP)
COSTS = StepCosts(
    token=2 * MATRICES,
    sample=2 * HIDDEN * VOCAB,
    attention=((0, 4 * LAYERS * HEADS * DIM),),
    dense=4 * (MATRICES + HIDDEN * VOCAB),
    state=((0, 2 * 4 * LAYERS * KV_HEADS * DIM),),
)
GREEDY = Params(temperature=0.0, max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiles") / "new"


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(DEMO, kv_bytes=1 << 22, max_context=128, step_costs=COSTS, profiler=str(folder), threads=1) as made:
        yield made


def number(metrics: list[MetricValue], name: str, **labels: str) -> float:
    (found,) = [
        one
        for one in metrics
        if isinstance(one, Counter | Gauge) and one.name == name and labels.items() <= one.labels.items()
    ]
    return found.value


def test_operations_and_bytes_equal_a_count_by_hand(llm: LLM) -> None:
    """A prompt of 7 tokens in one step, then 4 steps with one token each"""
    before = llm.get_metrics()
    llm.generate([[2, 3, 5, 7, 11, 13, 17]], GREEDY)
    after = llm.get_metrics()

    def gain(name: str) -> float:
        return number(after, name) - number(before, name)

    keys = sum(range(1, 8)) + 8 + 9 + 10 + 11
    each = 2 * MATRICES * 11 + 2 * HIDDEN * VOCAB * 5
    assert gain("slipway_flops_total") == each + keys * 4 * LAYERS * HEADS * DIM
    read = 5 * 4 * (MATRICES + HIDDEN * VOCAB) + (7 + 8 + 9 + 10 + 11) * 8 * LAYERS * KV_HEADS * DIM
    assert gain("slipway_read_bytes_total") == read
    assert 0 < gain("slipway_step_seconds_total") < 60


def test_metrics_count_a_run(llm: LLM) -> None:
    """OBS-01: a cold prompt, then the same prompt from the prefix cache except its last token"""
    prompt = [[*range(100, 132)]]  # two blocks
    start = llm.get_metrics()
    llm.generate(prompt, GREEDY)
    cold = llm.get_metrics()
    llm.generate(prompt, GREEDY)
    warm = llm.get_metrics()

    def gain(name: str, first: list[MetricValue], second: list[MetricValue], **labels: str) -> float:
        return number(second, name, **labels) - number(first, name, **labels)

    for first, second, cached in ((start, cold, 0), (cold, warm, 31)):
        by_source = "slipway_prompt_tokens_by_source_total"
        assert gain("slipway_prompt_tokens_total", first, second) == 32
        assert gain(by_source, first, second, source="local_compute") == 32 - cached
        assert gain(by_source, first, second, source="local_cache_hit") == cached
        assert gain("slipway_recomputed_tokens_total", first, second) == (1 if cached else 0)
        assert gain("slipway_generation_tokens_total", first, second) == 5
        assert gain("slipway_requests_total", first, second, finished_reason="length") == 1
    steps = [one for one in warm if isinstance(one, Histogram) and one.name == "slipway_iteration_tokens"]
    assert steps[0].sum == number(warm, "slipway_prompt_tokens_total") + number(warm, "slipway_generation_tokens_total")
    assert steps[0].count == steps[0].buckets["+Inf"] and number(warm, "slipway_engine_up") == 1


def test_a_profile_has_each_step_and_the_operations_within_it(llm: LLM, folder: Path) -> None:
    """Both files have the same steps"""
    llm.start_profile()
    with pytest.raises(ConfigError, match="already running"):
        llm.start_profile()
    llm.generate([[2, 3, 5], [4, 6]], GREEDY)
    steps, operations = llm.stop_profile()
    assert steps.parent == operations.parent == folder
    events = json.loads(steps.read_text())["traceEvents"]
    run = [event for event in events if event["name"].startswith("step ")]
    assert len(run) == 5 and run[0]["args"] == {"rows": 2, "tokens": 5, "prompt_tokens": 5, "new": 2}
    assert all(event["args"]["tokens"] == 2 for event in run[1:])
    ends = [event["ts"] + event["dur"] for event in run]
    assert all(end <= event["ts"] + 1e-3 for end, event in zip(ends, run[1:], strict=False))
    names = {event.get("name") for event in json.loads(operations.read_text())["traceEvents"]}
    assert {event["name"] for event in run} <= names
    with pytest.raises(ConfigError, match="not running"):
        llm.stop_profile()


def test_costs_and_profiles_are_off_by_default() -> None:
    with LLM(DEMO, kv_bytes=1 << 22, max_context=64, threads=1) as llm:
        assert not [one for one in llm.get_metrics() if "flops" in one.name]
        with pytest.raises(ConfigError, match="profiler is off; set profiler"):
            llm.start_profile()
