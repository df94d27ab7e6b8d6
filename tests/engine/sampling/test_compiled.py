"""Compare sampling with compiled kernels and with torch, token by token, in every variant that this CPU supports."""

import itertools

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.api.messages import Sampling
from engine.sampling.compiled import compiled_processors
from engine.sampling.pipeline import LOGIT_PROCESSORS, Prepared
from kernels.cpu.library import usable
from kernels.cpu.program import Team
from tests.engine.sampling.conftest import Bench, Request

VOCAB = 1037
SWITCHES = (
    {"temperature": 0.7},
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.9, "presence_penalty": -0.4},
    {"logit_bias": {3: 4.5, 1036: 2.0, 7: -100.0}},
    {"bad_words": ((4,), (3, 3, 9), (5, 1036))},
    {"min_tokens": 6},
    {"allowed_token_ids": tuple(range(0, VOCAB, 3))},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"logprobs": 3},
    {"logprobs": 4, "logprobs_mode": "processed"},
    {"logprob_ids": (7, 0, 1036, 7, 5)},
)


@pytest.fixture(scope="module", params=usable())
def team(request):
    made = Team(request.param, 3)
    yield made
    made.close()


def requests(seed: int) -> list[Request]:
    """Every combination of the switches, half of them greedy and a third with a grammar's mask, in any order."""
    rng = np.random.default_rng(seed)
    found = []
    for number, chosen in enumerate(itertools.product((False, True), repeat=len(SWITCHES))):
        asked = {"temperature": float(number % 2), "seed": number}
        for is_on, values in zip(chosen, SWITCHES, strict=True):
            if is_on and not (number % 2 == 0 and "temperature" in values):
                asked |= values
        reply = tuple(map(int, rng.integers(0, 9, rng.integers(0, 9))))
        mask = rng.random(VOCAB) < 0.5 if number % 3 == 0 else None
        found.append(Request(Sampling(**asked), tuple(map(int, rng.integers(0, 9, 4))), reply, (0, 5, 1036), mask))
    return [found[at] for at in rng.permutation(len(found))]


def shaped(seed: int, asked: list[Request]) -> np.ndarray:
    logits = np.random.default_rng(seed).normal(0, 3, (len(asked), VOCAB))
    for row, request in enumerate(asked):
        if row % 4 == 0 and request.sampling.logprobs is None:
            logits[row] = np.round(logits[row])  # many equal logits, among which torch's topk chooses arbitrarily
    logits[::7, ::2] = -np.inf
    return logits.astype(np.float32)


def same(given, wanted) -> None:
    assert given.ids == wanted.ids and given.failed == wanted.failed
    assert given.logprobs.keys() == wanted.logprobs.keys()
    for row, found in given.logprobs.items():
        other = wanted.logprobs[row]
        assert (found.token, found.rank) == (other.token, other.rank)
        possible = sum(value > -np.inf for value in other.top_logprobs)  # after them torch returns arbitrary tokens
        assert found.top_ids[:possible] == other.top_ids[:possible]
        np.testing.assert_allclose(found.logprob, other.logprob, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(found.top_logprobs, other.top_logprobs, rtol=1e-5, atol=1e-5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("part", range(8))
def test_tokens_equal_torch_for_every_combination(team, part):
    asked = requests(1)[part::8]
    logits = shaped(part, asked)
    wanted = Bench(VOCAB, len(asked)).sample(logits, asked)
    same(Bench(VOCAB, len(asked), team).sample(logits, asked), wanted)
    assert len(set(wanted.ids)) > 20


def test_row_does_not_depend_on_other_rows(team):
    asked = requests(2)[::64]
    logits = shaped(9, asked)
    together = Bench(VOCAB, 64, team).sample(logits, asked)
    for row, one in enumerate(asked):
        alone = Bench(VOCAB, 64, team).sample(logits[row : row + 1], [one])
        assert alone.ids == together.ids[row : row + 1]
        assert alone.logprobs.get(0) == together.logprobs.get(row)


def test_processed_logits_equal_torch_bit_for_bit(team):
    asked = requests(3)[::2]
    rows = Bench(VOCAB, len(asked)).rows(asked)
    logits = torch.from_numpy(shaped(4, asked))
    wanted, given = logits.clone(), logits.clone()
    for stage in LOGIT_PROCESSORS:
        edit = stage(rows)
        assert edit is not None
        edit(wanted)
    for edit in compiled_processors(rows, team):
        edit(given)
    assert torch.equal(given, wanted) and not torch.equal(given, logits)


def test_unused_stages_are_not_called(team):
    rows = Bench(VOCAB, 4, team).rows([Request(Sampling()), Request(Sampling(temperature=0.0))])
    assert compiled_processors(rows, team) == []


class Largest(TorchDispatchMode):
    """The largest tensor that torch makes or looks through."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for one in (*args, *(result if isinstance(result, tuple | list) else (result,))):
            if isinstance(one, torch.Tensor):
                self.seen[str(function)] = max(self.seen.get(str(function), 0), one.numel())
        return result


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_torch_makes_no_vocabulary_sized_copy(team, temperature):
    """Use all logit processors, truncation and processed logprobs; 60 rows make vocabulary-sized tensors detectable."""
    asked = Request(
        Sampling(
            temperature=temperature,
            repetition_penalty=1.3,
            frequency_penalty=0.9,
            presence_penalty=0.3,
            logit_bias={3: 4.5},
            bad_words=((4,), (3, 3, 9)),
            min_tokens=6,
            allowed_token_ids=tuple(range(0, VOCAB, 3)),
            top_k=20,
            top_p=0.9,
            min_p=0.01,
            logprobs=3,
            logprobs_mode="processed",
        ),
        (1, 2, 3),
        (4, 5, 6),
        (9,),
        np.ones(VOCAB, bool),
    )
    rows = Bench(VOCAB, 60, team)
    logits = torch.from_numpy(shaped(5, [asked] * 60))
    with Largest() as largest:
        prepared = Prepared(rows.rows([asked] * 60), rows.noise)
        sampled = prepared.finish(logits)
    assert not sampled.failed and len(sampled.logprobs) == 60
    # the kernels' inputs are as large as the tables: 60 slots of 40 tokens
    assert max(largest.seen.values()) < 60 * VOCAB // 8, largest.seen
