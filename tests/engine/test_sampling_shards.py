"""Tests of sampling from sharded logits: sampled tokens equal the tokens of the gathered logits."""

from dataclasses import dataclass, field
from threading import Barrier, Thread

import msgspec
import pytest
import torch

from engine.llm import LLM, Params
from engine.sampling.shards import MAX_K, best_of_shards, candidates_of_shards
from kernels.jit import interpreted
from kernels.op import Make
from kernels.sampling.sample import SAMPLE, sample
from tests.engine.test_ranks_gpu import IDS, SIZES, dense  # noqa: F401
from tests.tiers import paired

pytestmark = pytest.mark.skipif(not interpreted(), reason="kernels are compiled here, or Triton is not installed")


@dataclass
class Shared:
    """Values that the threads of a group of ranks exchange."""

    size: int
    barrier: Barrier = field(init=False)
    given: dict = field(default_factory=dict)

    def __post_init__(self):
        self.barrier = Barrier(self.size)


@dataclass(frozen=True)
class Threads:
    """A rank of a group whose ranks are threads."""

    rank: int
    shared: Shared

    @property
    def size(self):
        return self.shared.size

    def all_gather(self, x):
        self.shared.given[self.rank] = x
        self.shared.barrier.wait(timeout=100)
        gathered = torch.stack([self.shared.given[rank] for rank in range(self.size)])
        self.shared.barrier.wait(timeout=100)
        return gathered


def on_ranks(size, logits, function):
    """Return the results of function(own logits, first token, world) of all ranks."""
    shared, found, vocab = Shared(size), {}, logits.shape[1]

    def run(rank):
        first, last = rank * vocab // size, (rank + 1) * vocab // size
        found[rank] = function(logits[:, first:last].contiguous(), first, Threads(rank, shared))

    threads = [Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(size)]


def inputs(rows, vocab, **options):
    made = Make(torch.device("cpu"), torch.float32)
    return SAMPLE.inputs(made, rows, vocab, **options)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("step", [0.0, 1.0, 100.0], ids=["distinct", "ties", "equal"])
def test_best_token_of_shards_is_that_of_all_logits(size, step):
    logits, slot, lengths, columns, _ = inputs(6, 1001, step=step, temperature=(0.0, 1.0, 0.6))
    logits[2, 700], logits[3] = torch.nan, -torch.inf
    ids, scores, *_ = sample(logits, slot, lengths, columns, truncated=False)
    for own_ids, own_scores in on_ranks(
        size, logits, lambda own, first, world: best_of_shards(own, first, world, slot, lengths, columns)
    ):
        assert own_ids.tolist() == ids.tolist()
        assert torch.equal(own_scores.nan_to_num(nan=7.0), scores.nan_to_num(nan=7.0))


@pytest.mark.parametrize(("step", "vocab"), paired([0.0, 3.0, 100.0], [90, 700]))  # distinct, with ties, equal
def test_candidates_of_shards_sample_the_tokens_of_all_logits(vocab, step):
    cuts = {"top_k": (1, 3, 40, MAX_K), "top_p": (1.0, 0.9, 0.5), "min_p": (0.0, 0.05)}
    logits, slot, lengths, columns, _ = inputs(8, vocab, step=step, temperature=(1.0, 2.5), **cuts)
    wanted = sample(logits, slot, lengths, columns, truncated=True)
    for whole in on_ranks(3, logits, lambda own, first, world: candidates_of_shards(own, first, vocab, world)):
        found = sample(whole, slot, lengths, columns, truncated=True)
        assert [part.tolist() for part in found[:3]] == [part.tolist() for part in wanted[:3]]


@pytest.mark.nightly("tests/engine/test_ranks_gpu.py::test_two_ranks_sample_the_tokens_of_one")
@pytest.mark.parametrize(
    "params",
    [
        pytest.param(Params(seed=3, temperature=1.5), id="plain"),
        pytest.param(Params(seed=5, top_k=7, top_p=0.8), id="top_k"),
        pytest.param(Params(seed=6, top_p=0.7), id="top_p"),
    ],
)
def test_two_batch_invariant_ranks_sample_the_tokens_of_one(dense, params):  # noqa: F811
    given = {**SIZES, "kernels": "triton", "device": "cpu", "dtype": "float32", "threads": 1, "graph_sizes": (1, 2, 4)}
    asked = msgspec.structs.replace(params, max_tokens=3, ignore_eos=True)
    with LLM(dense, **given, invariant=True) as one, LLM(dense, **given, invariant=True, tensor=2) as two:
        assert [made.ids for made in one.generate(IDS, asked)] == [made.ids for made in two.generate(IDS, asked)]
