"""LoRA adapters that enter and leave slots of the device: equal to merged weights, batches, versions, recordings."""

import copy
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.api.errors import ConfigError, RequestError
from engine.api.messages import LoadAdapter, UnloadAdapter
from engine.core.records import read_records
from engine.core.replay import replay
from engine.layers.lora import LoraLayer
from engine.llm import LLM, Generation, Params
from engine.lowering.adapters import FittedAdapter
from engine.worker import adapters as store
from kernels.cpu.library import best
from tests.engine.adapters import Pairs, merge, random_pairs, write_adapter

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NAMES = ("a", "b", "c")
RANKS = {"a": 4, "b": 7, "c": 1}
SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
}
ENGINE: dict[str, Any] = {
    "kv_bytes": 1 << 20,
    "block_tokens": 4,
    "max_running": 8,
    "max_step_tokens": 24,
    "threads": 1,
    "max_active": 2,
    "max_rank": 7,
}
PROMPT = [*range(3, 20)]


class Base:
    """A tiny model, and adapters of it."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.folder = folder / "base"
        self.model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
        self.model.save_pretrained(self.folder)
        # c changes few modules, so its slot keeps matrices of another adapter, which must have no effect.
        self.pairs = {
            name: random_pairs(self.model, TARGETS if name != "c" else ("v_proj",), RANKS[name], seed=seed)
            for seed, name in enumerate(NAMES)
        }
        self.adapters = {name: write_adapter(folder / name, self.pairs[name], rank=RANKS[name]) for name in NAMES}

    def logprobs(self, pairs: Pairs, rank: int, prompt: list[int] = PROMPT) -> torch.Tensor:
        """Return the log probabilities of the model with a merged adapter, of all tokens after the first."""
        model = copy.deepcopy(self.model)
        merge(model, pairs, 8 / rank)
        with torch.no_grad():
            return model(torch.tensor([prompt])).logits[0].log_softmax(-1)[:-1]

    def expected(self, name: str) -> torch.Tensor:
        return self.logprobs(self.pairs[name], RANKS[name]) if name else self.logprobs({}, 1)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return Base(tmp_path_factory.mktemp("slots"))


@pytest.fixture(scope="module")
def right(base: Base) -> dict[str, torch.Tensor]:
    return {name: base.expected(name) for name in ("", *NAMES)}


def scored(adapter: str, **more: Any) -> Params:
    return Params(temperature=0.0, max_tokens=1, prompt_logprobs=-1, adapter=adapter, **more)


def found(generation: Generation) -> torch.Tensor:
    rows = []
    for one in (generation.prompt_logprobs or ())[1:]:
        assert one is not None
        row = torch.empty(len(one.top_ids))
        row[list(one.top_ids)] = torch.tensor(one.top_logprobs)
        rows.append(row)
    return torch.stack(rows)


def check(generation: Generation, right: torch.Tensor) -> None:
    assert generation.error is None
    torch.testing.assert_close(found(generation), right, atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recording") / "record"


@pytest.fixture(scope="module")
def engine(base: Base, recording: Path) -> Iterator[LLM]:
    """The host cache is smaller than an adapter, so each of them is read again."""
    options = {
        **ENGINE,
        "kernels": best(),
        "threads": 2,
        "host_cache": 1,
        "record": str(recording),
        "record_size": 1 << 16,
    }
    with LLM(base.folder, **options, adapters=base.adapters) as llm:
        yield llm


def test_three_adapters_in_two_slots_equal_merged_weights(engine: LLM, right: dict[str, torch.Tensor]):
    for name in (*NAMES, "", "b", "a"):
        (generation,) = engine.generate([PROMPT], scored(name))
        check(generation, right[name])
    stats = engine._loop.scheduler.stats()
    assert (stats.adapters_loaded, stats.adapters_active, stats.adapter_evictions) == (3, 2, 2)


def test_a_batch_of_more_adapters_than_slots_equals_solo_runs_bit_for_bit(engine: LLM, recording: Path):
    names = ["a", "b", "c", "", "c", "a", "b", "", "a"]
    prompts = [[(7 * row + 3 * at) % 101 for at in range(1 + 5 * row % 23)] for row in range(len(names))]
    params = [Params(temperature=0.0, max_tokens=12, logprobs=5, prompt_logprobs=-1, adapter=one) for one in names]
    together = engine.generate(prompts, params)
    for prompt, one, whole in zip(prompts, params, together, strict=True):
        (alone,) = engine.generate([prompt], one)
        assert whole.ids == alone.ids
        assert whole.prompt_logprobs == alone.prompt_logprobs
        assert whole.logprobs == alone.logprobs


def test_requests_behind_one_that_waits_for_a_slot_are_scheduled(engine: LLM):
    long = Params(temperature=0.0, max_tokens=40, ignore_eos=True, adapter="a")
    short = Params(temperature=0.0, max_tokens=2, adapter="")
    names = ["a", "b", "c", ""]
    params = [long, Params(temperature=0.0, max_tokens=40, ignore_eos=True, adapter="b"),
              Params(temperature=0.0, max_tokens=2, adapter="c"), short]  # fmt: skip
    replies = engine.generate([[5, 6, number] for number in range(len(names))], params)
    ends = [reply.timing.last_token for reply in replies if reply.timing]
    assert ends[3] < min(ends[0], ends[1]) < ends[2]


def test_a_replaced_adapter_is_used_by_new_requests_and_cached_blocks_are_not(
    engine: LLM, base: Base, right: dict[str, torch.Tensor], tmp_path: Path
):
    folder = tmp_path / "d"
    shutil.copytree(base.adapters["a"], folder)
    engine.load_adapter("d", folder)
    check(engine.generate([PROMPT], scored("d"))[0], right["a"])
    before = engine.generate([PROMPT], Params(temperature=0.0, max_tokens=1, logprobs=3, adapter="d"))[0]
    other = random_pairs(base.model, TARGETS, 5, seed=9)
    write_adapter(folder, other, rank=5)
    engine.load_adapter("d", folder)  # the same folder without `replace` reads nothing
    check(engine.generate([PROMPT], scored("d"))[0], right["a"])
    engine.load_adapter("d", folder, replace=True)
    after = engine.generate([PROMPT], Params(temperature=0.0, max_tokens=1, logprobs=3, adapter="d"))[0]
    assert after.timing is not None
    assert after.timing.cached_tokens == 0
    assert after.logprobs != before.logprobs
    check(engine.generate([PROMPT], scored("d"))[0], base.logprobs(other, 5))
    engine.unload_adapter("d")
    with pytest.raises(RequestError, match="adapter 'd': not loaded; loaded are a, b, c"):
        engine.generate([PROMPT], scored("d"))


def test_running_requests_keep_their_version(engine: LLM, base: Base, tmp_path: Path):
    folder = tmp_path / "e"
    shutil.copytree(base.adapters["a"], folder)
    engine.load_adapter("e", folder)
    params = Params(temperature=0.0, max_tokens=100, ignore_eos=True, adapter="e")
    (expected,) = engine.generate([[9, 8, 7]], params)
    write_adapter(folder, random_pairs(base.model, TARGETS, 5, seed=11), rank=5)
    replies: list[Generation] = []
    running = threading.Thread(target=lambda: replies.extend(engine.generate([[9, 8, 7]], params)))
    running.start()
    while engine._loop.scheduler.running == 0 and running.is_alive():
        pass
    engine._loop.post([LoadAdapter("e", str(folder), replace=True)])
    engine._loop.post([UnloadAdapter("e")])
    running.join()
    assert replies[0].ids == expected.ids


def test_adapters_that_cannot_be_served_are_refused(engine: LLM, base: Base, tmp_path: Path):
    wide = write_adapter(tmp_path / "wide", random_pairs(base.model, TARGETS, 8), rank=8)
    with pytest.raises(ConfigError, match="has rank 8, and slots hold up to 7: raise max_rank"):
        engine.load_adapter("wide", wide)
    with pytest.raises(ConfigError, match="no such directory"):
        engine.load_adapter("none", tmp_path / "none")
    narrow = {"model.layers.0.self_attn.q_proj": (torch.zeros(4, 31), torch.zeros(32, 4))}
    other = write_adapter(tmp_path / "other", narrow)
    with pytest.raises(ConfigError, match="is the adapter of another model"):
        engine.load_adapter("other", other)


def test_files_that_vanish_fail_only_the_requests_that_need_them(
    engine: LLM, base: Base, right: dict[str, torch.Tensor], tmp_path: Path
):
    folder = tmp_path / "f"
    shutil.copytree(base.adapters["b"], folder)
    engine.load_adapter("f", folder)
    engine.generate([[4, 5]] * 2, [Params(adapter="a"), Params(adapter="c")])  # the cache keeps the last one
    shutil.rmtree(folder)
    failed, plain = engine.generate([PROMPT, PROMPT], [scored("f"), scored("")])
    assert failed.finish == "error"
    assert "cannot be read: No such file" in (failed.error or "")
    check(plain, right[""])
    engine.unload_adapter("f")


def test_the_recording_with_swaps_can_be_replayed(engine: LLM, recording: Path):
    """The file is small, so it begins with a snapshot of the state in the middle of the run."""
    engine.generate([PROMPT] * 6, [Params(temperature=0.0, max_tokens=9, adapter=one) for one in "abcabc"])
    engine._loop.call(engine._loop._on_idle)
    engine.generate([PROMPT], Params(max_tokens=1))
    result = replay(read_records(recording))
    assert result.difference is None
    assert result.steps > 5
    assert result.dropped > 0


def test_two_ranks_swap_their_shares(base: Base, right: dict[str, torch.Tensor]):
    options = {**ENGINE, "max_active": 1, "tensor": 2, "kernels": best()}
    with LLM(base.folder, **options, adapters={"a": base.adapters["a"]}) as llm:
        llm.load_adapter("b", base.adapters["b"])
        for name in ("a", "b", "a", ""):
            check(llm.generate([PROMPT], scored(name))[0], right[name])


def test_an_adapter_in_the_host_cache_is_not_read_again(base: Base, right: dict[str, torch.Tensor], monkeypatch):
    """A slot gets a copy of matrices in the layout of the slot; an adapter that is still in its slot needs none."""
    made, filled = [], []
    prepare, fill = store.prepare_entries, LoraLayer.fill

    def noted(fitted: FittedAdapter, *rest: Any) -> Any:
        made.append(fitted.adapter.name)
        return prepare(fitted, *rest)

    monkeypatch.setattr(store, "prepare_entries", noted)
    monkeypatch.setattr(LoraLayer, "fill", lambda self, *given: filled.append(self) or fill(self, *given))
    with LLM(base.folder, **ENGINE, kernels="torch", adapters=base.adapters) as llm:
        for name in ("a", "b", "b", "c", "a", "b"):
            check(llm.generate([PROMPT], scored(name))[0], right[name])
        layers = len(llm._worker._runner._text_model.adapters.layers)
    assert made == ["a", "b", "c"] and len(filled) == 5 * layers


def test_the_host_cache_keeps_the_latest_adapters_up_to_its_size(base: Base) -> None:
    with LLM(base.folder, **{**ENGINE, "max_active": 1}, kernels="torch", adapters=base.adapters) as llm:
        host = llm._worker.adapters

        def cached(name: str) -> int:
            llm.generate([[3, 4]], Params(max_tokens=1, adapter=name))
            return host.cached_bytes

        one = cached("a")
        host._cache_bytes = 2 * one - 1
        assert cached("b") == one, "b has taken the place of a"
        host._cache_bytes = 2 * one
        assert cached("a") == 2 * one
        assert one < cached("c") < 2 * one, "c is small, and has taken the place of b, which was used before a"
        llm.unload_adapter("a")
        assert host.cached_bytes < one


def test_torch_kernels_swap_adapters(base: Base, right: dict[str, torch.Tensor]):
    with LLM(base.folder, **{**ENGINE, "max_active": 1}, kernels="torch", adapters=base.adapters) as llm:
        generations = llm.generate([PROMPT] * 4, [scored(name) for name in ("", *NAMES)])
    for name, generation in zip(("", *NAMES), generations, strict=True):
        check(generation, right[name])
