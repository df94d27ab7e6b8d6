"""Models that pool against transformers in float32: the same checkpoint and tokens, everything within 1e-4.

Checkpoints are tiny, random, and saved by transformers.
"""

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.api.messages import Pooling
from engine.distributed.world import SINGLE, World
from engine.kv.layout import layout
from engine.layers.model import TextModel, make_pages
from engine.layers.pooler import PoolingState
from engine.models import dual_encoders
from engine.models.checkpoint import read_checkpoint
from engine.models.families import POOLED
from engine.worker.batch import build_batch
from kernels.cpu.library import usable
from kernels.cpu.program import Team
from tests.engine.layers.pooled_cases import CASES, VOCAB, WHOLE, reference, save
from tests.engine.layers.test_footprint import compare
from tests.tiers import paired, thinned


@dataclass(eq=False)
class Saved:
    path: Path
    kind: str

    @cache  # noqa: B019  # kept for the whole session
    def model(self) -> Any:
        kind = reference(self.kind)
        return kind.from_pretrained(self.path, attn_implementation="eager", dtype=torch.float32).eval()

    def output(self, ids: list[int], segments: list[int] | None = None) -> Tensor:
        """Hidden states [tokens, hidden], or logits."""
        more = {} if segments is None else {"token_type_ids": torch.tensor([segments])}
        with torch.no_grad():
            made = self.model()(torch.tensor([ids]), **more)
        return (made.logits if hasattr(made, "logits") else made.last_hidden_state)[0]


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    made: dict[str, Saved] = {}

    def get(name: str) -> Saved:
        if name not in made:
            made[name] = Saved(save(name, tmp_path_factory.mktemp("pooled") / name), CASES[name][0])
        return made[name]

    return get


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@dataclass
class Runner:
    """Runs whole prompts through a model, and pools them."""

    path: Path
    kernels: str = "torch"
    world: World = SINGLE
    threads: int = 2
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.checkpoint = read_checkpoint(self.path, **self.settings)
        form = layout(self.checkpoint.model, block_tokens=16, element_bytes=4, ranks=self.world.size)
        self.form = form
        team = None if self.kernels == "torch" else Team(self.kernels, self.threads)
        self.model = TextModel(self.checkpoint.model, form, self.world, torch.float32, "cpu", team)
        self.model.load(self.checkpoint)
        self.pages = make_pages(form, 64, torch.float32, torch.device("cpu"))

    def hidden(self, prompts: list[list[int]], segments: list[list[int]] | None = None) -> list[Tensor]:
        """Run all prompts in one step and return the hidden states of each, [tokens, hidden]."""
        count = np.array([len(ids) for ids in prompts])
        tokens = np.zeros((len(prompts), count.max()), np.int32)
        each = -(-int(count.max()) // 16)
        tables = [np.arange(1, 1 + len(prompts) * each).reshape(-1, each) for _ in self.form.groups]
        for row, ids in enumerate(prompts):
            tokens[row, : len(ids)] = ids
        batch = build_batch(
            np.arange(len(prompts)),
            np.zeros(len(prompts), np.int64),
            count,
            tokens=tokens,
            rope_lengths=count,
            tables=tables,
            block_tokens=16,
            segments=None if segments is None else np.concatenate(segments),
        )
        return list(self.model.forward(batch, self.pages).clone().split(count.tolist()))

    def pooled(self, prompts: list[list[int]], pooling: Pooling, cuts: tuple[int, ...] = ()) -> list[Tensor]:
        """cuts: where the states are given in pieces."""
        found = []
        for hidden in self.hidden(prompts):
            gathered = PoolingState()
            for piece in hidden.tensor_split(cuts):
                if len(piece):
                    self.model.pooler.gather(gathered, piece, pooling)
            found.append(self.model.pooler.finish(gathered, pooling))
        return found


BEST = usable()[:1]
SOME = ["bert-score", "roberta", "modernbert-mean", "nomic-tokens", "gemma3-both-ways", "gemma2", "qwen3-score"]
# All cases where torch computes and in the fastest variant, some in the others, which are made of the same source.
ALL = [
    *((name, by) for name in CASES for by in ("torch", *BEST)),
    *((name, by) for name in SOME for by in usable()[1:]),
]


ONCE = [*paired(CASES, ("torch", *BEST)), *ALL[len(CASES) * (1 + len(BEST)) :]]  # each architecture once in `make test`
EVEN = [name for name in CASES if "-odd" not in name]  # two ranks can share their heads


def task_of(kind: str) -> str:
    if "TokenClassification" in kind:
        return "token_classify"
    return "classify" if "Classification" in kind else "token_embed"


def close(got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


def test_every_architecture_that_pools_has_a_case():
    """Dual encoders have cases in tests/engine/test_image_embeddings.py."""
    families = [family for family in POOLED if family is not dual_encoders]
    assert {kind for kind, _ in CASES.values()} == {name for family in families for name in family.ARCHITECTURES}


@pytest.mark.parametrize(("name", "by"), ONCE)
def test_prompts_in_one_step_equal_transformers(name, by, saved, shows):
    checkpoint = saved(name)
    prompts = [prompt(length, length) for length in (37, 1, 16, 23)]
    got = Runner(checkpoint.path, by).pooled(prompts, Pooling(task_of(checkpoint.kind), activate=False))
    for ids, one in zip(prompts, got, strict=True):
        close(one, checkpoint.output(ids))
    if by in ("torch", *BEST):
        shows(checkpoint.path, "equals transformers" if by == "torch" else "compiled CPU")


@pytest.mark.parametrize(("name", "compiled_by"), [(name, by) for name, by in ALL if by != "torch"])
@pytest.mark.sampled(3)
def test_a_prompt_is_the_same_bit_for_bit_whatever_stands_beside_it(name, compiled_by, saved):
    pooling = Pooling(task_of(CASES[name][0]))
    prompts = [prompt(length, length) for length in (5, 41, 18, 1, 33)]
    runner = Runner(saved(name).path, compiled_by)
    together = runner.pooled(prompts, pooling)
    for ids, one in zip(prompts, together, strict=True):
        assert torch.equal(runner.pooled([ids], pooling)[0], one)
    assert torch.equal(Runner(saved(name).path, compiled_by, threads=1).pooled(prompts[1:2], pooling)[0], together[1])


@pytest.mark.parametrize("name", ["bert", "bert-score", "nomic"])
def test_segments_have_rows_of_their_own(name, kernels, saved):
    ids, other, numbers = prompt(21, 4), prompt(9, 5), [0] * 8 + [1] * 13
    runner = Runner(saved(name).path, kernels)
    hidden = runner.hidden([other, ids], [[0] * 9, numbers])[1]
    got = hidden
    if name == "bert-score":
        gathered, pooling = PoolingState(), Pooling("classify", activate=False)
        runner.model.pooler.gather(gathered, hidden, pooling)
        got = runner.model.pooler.finish(gathered, pooling)
    close(got, saved(name).output(ids, numbers))


@pytest.mark.parametrize(("name", "by"), paired([name for name in CASES if name in WHOLE], ("torch", *BEST)))
def test_a_later_token_changes_an_earlier_one(name, by, saved):
    ids = prompt(4, 9)
    runner = Runner(saved(name).path, by)
    assert runner.form.groups == ()
    before, after = runner.hidden([ids, [*ids[:-1], ids[-1] + 1 if ids[-1] < VOCAB - 1 else 3]])
    assert not torch.allclose(before[0], after[0], atol=1e-3)


@pytest.mark.parametrize("name", thinned(EVEN, ["bert-score", "modernbert", "gemma3-both-ways"]))
def test_two_ranks_compute_what_one_computes(name, kernels, saved, on_ranks, shows):
    ids, path = prompt(19, 5), saved(name).path
    pooling = Pooling(task_of(CASES[name][0]), activate=False)

    def work(world):
        return Runner(path, kernels, world, threads=1).pooled([ids], pooling)[0]

    for got in on_ranks(2, work, kernels):
        close(got, saved(name).output(ids))
    shows(path, "2 ranks")


@pytest.mark.parametrize(("name", "by"), ONCE)
def test_every_architecture_holds_what_was_planned_to_the_byte(name, by, saved, shows):
    compare(read_checkpoint(saved(name).path), by)
    shows(saved(name).path, "loads", "planned bytes = loaded bytes")


@pytest.mark.parametrize("name", ["bert-score", "modernbert", "roberta-tokens", "nomic"])
@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_weights_rounded_at_load_hold_what_was_planned(name, bits, compiled, saved):
    compare(read_checkpoint(saved(name).path), compiled, bits=bits)
