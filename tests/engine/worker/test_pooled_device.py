"""Tests of pooling models with the fused kernels in Triton's interpreter.

They compare each architecture with transformers and each kind of pooling with the torch runner, with chunked and with
batched prompts. Prompts are short because the interpreter takes some hundredths of a second per token."""

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from engine.api.config import TaskConfig
from engine.api.errors import NOT_FINITE
from engine.api.messages import Pooling, Sampling
from engine.arguments import engine_config
from engine.core.plan import NewRow, Row, StepPlan, StepResult
from engine.distributed.world import SINGLE, World
from engine.kv.layout import blocks_of, layout
from engine.layers.model import TextModel, make_pages
from engine.models.checkpoint import read_checkpoint
from engine.models.parts import Attention, ResidualBlock
from engine.worker.device_parts import device_parts
from engine.worker.pooled import PooledRunner
from engine.worker.states import allocate_states
from engine.worker.table import RequestTable
from kernels.jit import installed
from tests.engine.layers.conftest import Threads, ThreadWorld
from tests.engine.layers.pooled_cases import CASES, EACH_PART, save, values
from tests.engine.layers.test_encoders import Saved, prompt, task_of
from tests.engine.test_pooling import late, modules
from tests.tiers import thinned

pytestmark = [
    pytest.mark.skipif(not installed(), reason="Triton is not installed"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]
EMBED, TOKENS = Pooling("embed"), Pooling("token_embed", activate=False)
AUTO = TaskConfig()
BLOCK = 4


@dataclass
class Prompt:
    ids: list[int]
    pooling: Pooling
    segments: tuple[int, ...] = ()
    done: int = 0
    table: list[int] = field(default_factory=list)


class Steps:
    """A runner that is given plans, as a scheduler would give them, with shuffled blocks and poisoned pages."""

    def __init__(
        self,
        path: Path,
        *,
        kernels: str = "triton",
        task: TaskConfig = AUTO,
        world: World = SINGLE,
        change: Callable[[ResidualBlock], ResidualBlock] = lambda branch: branch,
    ) -> None:
        config = engine_config(
            model=str(path),
            kv_bytes=1,
            max_context=64,
            block_tokens=BLOCK,
            max_running=6,
            max_step_tokens=160,
            kernels=kernels,
        )
        checkpoint = read_checkpoint(path, task=task)
        blocks = tuple(tuple(map(change, block)) for block in checkpoint.model.blocks)
        checkpoint = replace(checkpoint, model=replace(checkpoint.model, blocks=blocks))
        form = layout(checkpoint.model, block_tokens=BLOCK, element_bytes=4, ranks=world.size)
        fused = kernels == "triton"
        self.model = TextModel(checkpoint.model, form, world, torch.float32, "cpu", invariant=fused)
        self.model.load(checkpoint)
        self.form = form
        pages = make_pages(form, 600, torch.float32, torch.device("cpu")).fill_(3.0)
        table = RequestTable(slots=6, max_context=64, layout=form, vocab=checkpoint.model.embed.vocab)
        if fused:
            self.runner = device_parts(config, checkpoint, self.model, form, table).runner(pages)
        else:
            states = allocate_states(self.model.states, 6, 0, torch.device("cpu"), drafts=False)
            self.runner = PooledRunner(self.model, form, pages, table, states)
        self.prompts: dict[int, Prompt] = {}
        self._free = np.random.default_rng(0).permutation(np.arange(1, 600)).tolist()
        self._number = 0
        self.blocks: dict[int, tuple[tuple[int, ...], ...]] = {}  # slot -> block tables of its last row

    def start(self, counts: dict[int, int], new: dict[int, Prompt], dropped: tuple[int, ...] = ()) -> Any:
        """Start a step and return its handle. `counts`: slot -> number of tokens to compute."""
        self._number += 1
        self.prompts = {slot: one for slot, one in self.prompts.items() if slot not in dropped} | new
        entered = tuple(
            NewRow(slot, tuple(one.ids), len(one.ids), Sampling(), (), len(one.ids), one.pooling, one.segments)
            for slot, one in new.items()
        )
        rows = tuple(self._row(slot, count) for slot, count in counts.items())
        with torch.inference_mode():
            return self.runner.start(StepPlan(self._number, entered, dropped, rows), {})

    def step(self, counts: dict[int, int], new: dict[int, Prompt], dropped: tuple[int, ...] = ()) -> StepResult:
        return self.start(counts, new, dropped)()

    def _row(self, slot: int, count: int) -> Row:
        one = self.prompts[slot]
        one.done += count
        fresh = blocks_of(one.done, BLOCK) - len(one.table)
        blocks = tuple(tuple(self._free.pop() for _ in range(fresh)) for _ in self.form.groups)
        one.table += [0] * fresh
        self.blocks[slot] = blocks
        return Row(slot, one.done - count, count, False, blocks)

    def pool(
        self, prompts: list[list[int]], pooling: Pooling, segments: list[tuple[int, ...]] | None = None
    ) -> list[torch.Tensor]:
        """All in one step."""
        new = {
            slot: Prompt(ids, pooling, () if segments is None else segments[slot]) for slot, ids in enumerate(prompts)
        }
        found = self.step({slot: len(one.ids) for slot, one in new.items()}, new, tuple(self.prompts))
        return [values(found, row) for row in range(len(prompts))]


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory):
    made: dict[str, Saved] = {}

    def get(name: str) -> Saved:
        if name not in made:
            made[name] = Saved(save(name, tmp_path_factory.mktemp("fused") / name), CASES[name][0])
        return made[name]

    return get


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float = 2e-5) -> None:
    assert got.shape == want.shape
    scale = want.abs().max()
    assert (got - want).abs().max() <= tolerance * scale + 1e-6, (got - want).abs().max() / scale


@pytest.mark.parametrize("name", thinned(CASES, EACH_PART))
@pytest.mark.sampled(2)
def test_every_architecture_that_pools_equals_transformers(name, saved, shows):
    """Prompts of several lengths in one step, one token among them."""
    checkpoint = saved(name)
    prompts = [prompt(length, length) for length in (11, 1, 5)]
    found = Steps(checkpoint.path).pool(prompts, Pooling(task_of(checkpoint.kind), activate=False))
    for ids, one in zip(prompts, found, strict=True):
        close(one, checkpoint.output(ids))
    shows(checkpoint.path, "Triton interpreted")


@pytest.mark.parametrize(
    "name", thinned(["bert-score", "modernbert", "gemma3-both-ways", "qwen3-score"], ["modernbert"])
)
def test_a_prompt_is_the_same_bit_for_bit_whatever_stands_beside_it(name, saved):
    pooling = Pooling(task_of(CASES[name][0]))
    prompts = [prompt(length, length) for length in (3, 11, 1, 7)]
    steps = Steps(saved(name).path)
    together = steps.pool(prompts, pooling)
    for ids, one in zip(prompts, together, strict=True):
        assert torch.equal(steps.pool([ids], pooling)[0], one)


@pytest.mark.parametrize("name", thinned(["bert-score", "nomic"], ["bert-score"]))
def test_segments_have_rows_of_their_own(name, saved):
    """Segment ids are not mixed up with a prompt without segments or with earlier prompts of the same slots."""
    checkpoint = saved(name)
    pooling = Pooling(task_of(checkpoint.kind), activate=False)
    ids, other = prompt(9, 4), prompt(5, 5)
    steps = Steps(checkpoint.path)
    for cut in (8, 3):
        plain, parted = steps.pool([other, ids], pooling, [(), (cut, 9 - cut)])
        close(parted, checkpoint.output(ids, [0] * cut + [1] * (9 - cut)))
        close(plain, checkpoint.output(other))
    parted, plain = steps.pool([other, ids], pooling, [(4, 1), (9,)])
    close(parted, checkpoint.output(other, [0] * 4 + [1]))
    close(plain, checkpoint.output(ids))


@pytest.mark.parametrize("name", thinned(["bert", "modernbert", "nomic", "gemma3-both-ways"], ["gemma3-both-ways"]))
def test_a_later_token_changes_an_earlier_one(name, saved):
    """With bidirectional attention a token affects earlier tokens of its own prompt and of no other prompt."""
    ids = prompt(4, 9)
    changed = [*ids[:-1], 3 + (ids[-1] - 2) % 90]
    before, after, again = Steps(saved(name).path).pool([ids, changed, ids], TOKENS)
    assert not torch.allclose(before[0], after[0], atol=1e-3) and torch.equal(before, again)


def test_a_window_reaches_as_far_to_either_side(saved):
    """Three positions, as local_attention is 6, of a model of one layer."""
    path = saved("modernbert").path.parent / "windows"
    config = transformers.ModernBertConfig.from_pretrained(saved("modernbert").path)
    config.layer_types, config.num_hidden_layers = ["sliding_attention"], 1
    transformers.ModernBertModel(config).eval().save_pretrained(path)
    checkpoint, ids = Saved(path, "ModernBertModel"), prompt(20, 2)
    changed = [*ids[:9], 3 + (ids[9] - 2) % 90, *ids[10:]]
    before, after = Steps(path).pool([ids, changed], TOKENS)
    close(before, checkpoint.output(ids))
    reached = (before != after).any(1).nonzero().flatten().tolist()
    assert reached == list(range(6, 13))


@dataclass
class Turns(ThreadWorld):
    """Ranks that take turns, as there is one interpreter: the others go on while one waits for them."""

    lock: threading.Lock

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        self.lock.release()
        try:
            return super().all_gather(x)
        finally:
            self.lock.acquire()


@pytest.mark.parametrize("name", thinned(["bert-score", "gemma3-both-ways"], ["bert-score"]))
def test_two_ranks_compute_what_one_computes(name, saved):
    checkpoint, ids, threads, lock = saved(name), prompt(7, 5), Threads(2), threading.Lock()
    pooling = Pooling(task_of(checkpoint.kind), activate=False)

    def work(rank: int) -> torch.Tensor:
        with lock:
            return Steps(checkpoint.path, world=Turns(threads, rank, 2, lock)).pool([ids], pooling)[0]

    with ThreadPoolExecutor(2) as ranks:
        for got in ranks.map(work, range(2)):
            close(got, checkpoint.output(ids))


# Compare every kind of pooling with the torch runner


def both(path: Path, task: TaskConfig = AUTO) -> tuple[Steps, Steps]:
    return Steps(path, task=task), Steps(path, kernels="torch", task=task)


@pytest.mark.parametrize("pool", ["cls", "last", "mean", "max"])
@pytest.mark.sampled(2)
def test_each_pool_is_the_one_of_torch(pool, saved):
    prompts = [prompt(length, length) for length in (5, 1)]
    ours, torchs = both(saved("bert").path, TaskConfig(pool=pool))
    for pooling in (EMBED, Pooling("embed", activate=False)):
        for got, want in zip(ours.pool(prompts, pooling), torchs.pool(prompts, pooling), strict=True):
            close(got, want)


@pytest.mark.parametrize("name", ["bert-classifier", "bert-score", "modernbert-mean", "modernbert-tokens"])
@pytest.mark.sampled(2)
def test_probabilities_of_labels_are_those_of_torch(name, saved):
    prompts = [prompt(length, length) for length in (5, 1)]
    ours, torchs = both(saved(name).path)
    for activate in (None, False):
        pooling = Pooling(task_of(CASES[name][0]), activate=activate)
        for got, want in zip(ours.pool(prompts, pooling), torchs.pool(prompts, pooling), strict=True):
            close(got, want)


def test_vectors_of_tokens_go_through_their_projection(tmp_path):
    late(tmp_path / "late")
    prompts = [prompt(length, length) for length in (5, 1)]
    ours, torchs = both(tmp_path / "late")
    pooling = Pooling("token_embed")
    for got, want in zip(ours.pool(prompts, pooling), torchs.pool(prompts, pooling), strict=True):
        assert got.shape[1] == 16
        close(got, want)


def test_a_decoder_scores_by_the_probability_of_yes(tmp_path):
    from tests.engine.layers.conftest import random_model

    random_model("qwen3").save_pretrained(tmp_path)
    words = {"version": "1.0", "model": {"type": "BPE", "vocab": {"no": 5, "yes": 9}, "merges": []}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(words))
    prompts = [prompt(length, length) for length in (3, 1)]
    ours, torchs = both(tmp_path, TaskConfig(task="score"))
    for activate in (None, False):
        pooling = Pooling("classify", activate=activate)
        for got, want in zip(ours.pool(prompts, pooling), torchs.pool(prompts, pooling), strict=True):
            close(got, want)


def test_vectors_are_cut_before_they_are_normalised(saved, tmp_path):
    path = save("qwen3", tmp_path / "qwen3")
    modules(path, {"pooling_mode_lasttoken": True})
    (ids,), (whole,) = [prompt(5)], Steps(path).pool([prompt(5)], Pooling("embed", activate=False))
    steps = Steps(path, task=TaskConfig(dimensions=(8, 16)))
    (cut,) = steps.pool([ids], Pooling("embed", dimensions=8))
    close(cut, whole[:8] / whole[:8].norm())
    (plain,) = steps.pool([ids], Pooling("embed", dimensions=16, activate=False))
    assert torch.equal(plain, whole[:16])


def attention(**changed: Any) -> Callable[[ResidualBlock], ResidualBlock]:
    def change(branch: ResidualBlock) -> ResidualBlock:
        body = branch.body
        return replace(branch, body=replace(body, **changed)) if isinstance(body, Attention) else branch

    return change


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("bert-odd", attention(softcap=2.0, scale=0.7)),
        ("gemma3-both-ways", attention(rope=None)),
        ("bert-odd", lambda branch: replace(branch, scale=0.4)),
        ("modernbert", lambda branch: replace(branch, scale=0.4)),
    ],
    ids=["softcap", "head norms without rope", "scaled sums that are normed", "scaled sums"],
)
@pytest.mark.sampled(2)
def test_unpublished_encoder_variants_equal_torch(name, change, saved):
    prompts = [prompt(length, length) for length in (7, 1)]
    ours, torchs = (Steps(saved(name).path, kernels=kernels, change=change) for kernels in ("triton", "torch"))
    for got, want in zip(ours.pool(prompts, TOKENS), torchs.pool(prompts, TOKENS), strict=True):
        close(got, want)


def test_rows_of_a_step_may_have_different_pooling_options(saved):
    steps, ids = Steps(saved("bert").path), [prompt(length, length) for length in (7, 4, 1, 9, 5)]
    asked = [EMBED, Pooling("token_embed"), Pooling("embed", activate=False), TOKENS, Pooling("embed", dimensions=9)]
    new = {slot: Prompt(one, pooling) for slot, (one, pooling) in enumerate(zip(ids, asked, strict=True))}
    found = steps.step({slot: len(ids[slot]) for slot in (3, 0, 4, 1, 2)}, new)
    for row, slot in enumerate((3, 0, 4, 1, 2)):
        assert torch.equal(values(found, row), steps.pool([ids[slot]], asked[slot])[0])


# Prompts in pieces


@pytest.mark.parametrize("pool", thinned(["cls", "last", "mean", "max"], ["mean"]))
def test_a_prompt_of_a_decoder_may_come_in_pieces(pool, saved):
    """Two other prompts run in other slots and end earlier; a new prompt reuses one of these slots."""
    task, ids = TaskConfig(pool=pool), [prompt(length, length) for length in (14, 5, 7, 3)]
    steps = Steps(saved("qwen3").path, task=task)
    plain = Pooling("embed", activate=False)  # without normalization, so that vector lengths are compared too
    new = {slot: Prompt(ids[number], plain) for slot, number in ((4, 0), (1, 1), (2, 2))}
    found: dict[int, torch.Tensor] = {}
    first = steps.step({4: 4, 1: 4, 2: 6}, new)
    assert first.pooled == {}
    second = steps.step({1: 1, 4: 1, 2: 1}, {})
    found[1], found[2] = values(second, 0), values(second, 2)
    third = steps.step({1: 3, 4: 7}, {1: Prompt(ids[3], plain)}, (1, 2))
    assert set(third.pooled) == {0}
    found[3] = values(third, 0)
    found[0] = values(steps.step({4: 2}, {}), 0)
    wanted = Steps(saved("qwen3").path, kernels="torch", task=task).pool(ids, plain)
    for number, got in found.items():
        close(got, wanted[number])


def test_a_prompt_that_is_begun_again_forgets_what_was_gathered(saved):
    ids, steps = prompt(9, 3), Steps(saved("qwen3").path, task=TaskConfig(pool="mean"))
    want = steps.pool([ids], EMBED)[0]
    steps.step({0: 6}, {0: Prompt(prompt(9, 8), EMBED)}, (0,))
    steps.step({0: 4}, {0: Prompt(ids, EMBED)}, (0,))
    close(values(steps.step({0: 5}, {}), 0), want)


def test_the_first_positions_of_a_prompt_may_come_of_the_cache(saved):
    """Where the last token alone counts: its blocks hold what another prompt has computed."""
    ids, steps = prompt(10, 3), Steps(saved("qwen3").path, task=TaskConfig(pool="last"))
    (want,) = steps.pool([ids], EMBED)
    entered = NewRow(3, tuple(ids), 10, Sampling(), (), 10, EMBED)
    row = Row(3, 8, 2, False, steps.blocks[0])
    with torch.inference_mode():
        found = steps.runner.start(StepPlan(99, (entered,), (), (row,)), {})()
    assert torch.equal(values(found, 0), want)


@pytest.mark.parametrize("activate", thinned([None, False], [None]))
def test_numbers_of_tokens_are_kept_until_their_prompt_is_complete(activate, saved):
    """Steps are read one step later, as the loop does it."""
    pooling, ids, other = Pooling("token_embed", activate=activate), prompt(10, 3), prompt(4, 4)
    steps = Steps(saved("qwen3").path)
    want, beside = Steps(saved("qwen3").path).pool([ids, other], pooling)
    waiting = steps.start({0: 4}, {0: Prompt(ids, pooling)})
    following = steps.start({1: 4, 0: 1}, {1: Prompt(other, pooling)})
    assert waiting().pooled == {}
    last = steps.start({0: 5}, {}, (1,))
    found = following()
    assert set(found.pooled) == {0}
    close(values(found, 0), beside)
    close(values(last(), 0), want)


# Errors


def test_a_prompt_whose_numbers_are_not_finite_fails_alone(saved):
    steps, ids = Steps(saved("qwen3").path), [prompt(9, 1), prompt(4, 2)]
    spoiled = [*ids[0][:4], 96, *ids[0][5:]]
    steps.model.vocabulary.table = steps.model.vocabulary.table.clone()
    steps.model.vocabulary.table[96] = float("nan")
    new = {0: Prompt(spoiled, TOKENS), 1: Prompt(ids[1], EMBED)}
    found = steps.step({0: 7, 1: 4}, new)
    assert found.failed == {0: NOT_FINITE} and set(found.pooled) == {1}
    new = {0: Prompt(ids[1], TOKENS), 1: Prompt(spoiled, EMBED)}
    found = steps.step({0: 4, 1: 9}, new, (0, 1))
    assert found.failed == {1: NOT_FINITE} and set(found.pooled) == {0}


def test_a_plan_without_rows_changes_the_table_alone(saved):
    steps = Steps(saved("bert").path)
    assert steps.step({}, {}).pooled == {}
