"""The stages, alone and together, against the float64 reference of conftest.py (SA-01, SA-02, SA-03, SA-07)."""

import msgspec
import numpy as np
import pytest
import torch

from engine.api.messages import Sampling
from engine.sampling.allowed import allowed_token_ids
from engine.sampling.bad_words import bad_words
from engine.sampling.bias import logit_bias
from engine.sampling.grammar import grammar
from engine.sampling.min_tokens import min_tokens
from engine.sampling.penalties import repetition_penalty, reply_penalties
from engine.sampling.pipeline import LOGIT_PROCESSORS, TRUNCATION
from engine.sampling.temperature import temperature

VOCAB = 37  # prime, and not a multiple of a mask's 32 bits

ALONE = {
    "allowed": Sampling(allowed_token_ids=(36, 0, 5)),
    "bias": Sampling(logit_bias={0: -100.0, 36: 2.5, 7: 100.0}),
    "min_tokens": Sampling(min_tokens=4),
    "repetition up": Sampling(repetition_penalty=1.7),
    "repetition down": Sampling(repetition_penalty=0.6),
    "frequency": Sampling(frequency_penalty=0.8),
    "negative frequency": Sampling(frequency_penalty=-1.1),
    "presence": Sampling(presence_penalty=1.3),
    "both": Sampling(presence_penalty=-0.4, frequency_penalty=0.9, repetition_penalty=1.2),
    "bad words": Sampling(bad_words=((4,), (3, 3, 9), (3, 8), (1, 2, 3, 3, 11), (3, 9), (2, 3, 3, 12))),
    "hot": Sampling(temperature=1.9),
    "cold": Sampling(temperature=0.3),
    "nearly zero": Sampling(temperature=0.001),
    "min_p": Sampling(min_p=0.2),
    "top_k": Sampling(top_k=5),
    "top_p": Sampling(top_p=0.7),
}
REPLIES = ((), (3,), (3, 3), (5, 0, 5, 36, 3, 3), (9, 4, 4, 4))


def asking(sampling: Sampling) -> Sampling:
    """Return the parameters with processed logprobs of the whole vocabulary."""
    return msgspec.structs.replace(sampling, logprobs=-1, logprobs_mode="processed")


def distribution(logprob) -> np.ndarray:
    found = np.full(VOCAB, np.nan)
    found[list(logprob.top_ids)] = np.exp(logprob.top_logprobs)
    return found


@pytest.mark.parametrize("name", ALONE)
def test_each_stage_alone_equals_the_reference(name, bench, request_of, oracle, softmax):
    rng = np.random.default_rng(3)
    requests = [request_of(asking(ALONE[name]), (1, 2, 7), reply, (36, 5, 999)) for reply in REPLIES]
    logits = rng.normal(0, 3, (len(requests), VOCAB)).astype(np.float32)
    sampled = bench(VOCAB).sample(logits, requests)
    for row, request in enumerate(requests):
        expected = softmax(oracle(logits[row], request).processed)
        np.testing.assert_allclose(distribution(sampled.logprobs[row]), expected, rtol=2e-5, atol=1e-7)


def random_sampling(rng: np.random.Generator) -> Sampling:
    def maybe(value, off):
        return value if rng.random() < 0.4 else off

    return Sampling(
        temperature=float(rng.choice([0.0, 0.001, 0.5, 1.0, 1.6])),
        top_k=int(maybe(rng.integers(1, 45), 0)),
        top_p=float(maybe(rng.uniform(0.05, 1), 1.0)),
        min_p=float(maybe(rng.uniform(0, 0.5), 0.0)),
        seed=int(rng.integers(1 << 40)),
        presence_penalty=float(maybe(rng.uniform(-2, 2), 0.0)),
        frequency_penalty=float(maybe(rng.uniform(-2, 2), 0.0)),
        repetition_penalty=float(maybe(rng.uniform(0.5, 2), 1.0)),
        logit_bias=maybe({int(i): float(rng.normal(0, 3)) for i in rng.integers(0, VOCAB, 4)}, {}),
        allowed_token_ids=maybe(tuple(map(int, rng.integers(0, VOCAB, 12))), None),
        bad_words=maybe(tuple((int(i),) for i in rng.integers(0, VOCAB, 3)) + ((3, 1), (3, 3, 1)), ()),
        min_tokens=int(maybe(rng.integers(0, 6), 0)),
    )


@pytest.mark.parametrize("seed", range(12))
def test_all_stages_together_equal_the_reference(seed, bench, request_of, oracle, softmax):
    rng = np.random.default_rng(seed)
    requests = []
    for _ in range(23):
        mask = rng.random(VOCAB) < 0.8 if rng.random() < 0.3 else None
        reply = tuple(map(int, rng.integers(0, 6, rng.integers(0, 9))))
        requests.append(request_of(asking(random_sampling(rng)), (1, 3), reply, (0, 36), mask))
    logits = np.round(rng.normal(0, 3, (len(requests), VOCAB)), 3).astype(np.float32)
    table = bench(VOCAB)
    sampled = table.sample(logits, requests, rng.permutation(64)[: len(requests)])
    for row, request in enumerate(requests):
        expected = oracle(logits[row], request).processed
        if np.isneginf(expected).all():
            assert "no token is possible" in sampled.failed[row]
            continue
        np.testing.assert_allclose(
            distribution(sampled.logprobs[row]), softmax(expected), rtol=5e-5, atol=1e-6, err_msg=str(request)
        )
        assert np.isfinite(expected[sampled.ids[row]]), "drawn outside the cuts"
        if request.sampling.temperature == 0:
            assert sampled.ids[row] == int(np.argmax(expected.astype(np.float32)))


def test_greedy_row_ignores_truncation_but_not_logit_processors(bench, request_of):
    logits = np.tile(np.linspace(3, 0, VOCAB), (5, 1))
    cuts = {"top_k": 1, "top_p": 0.01, "min_p": 1.0}
    greedy = {"temperature": 0.0}
    requests = [
        request_of(Sampling(**greedy, **cuts)),
        request_of(Sampling(**greedy, **cuts, bad_words=((0,), (1,)))),
        request_of(Sampling(**greedy, **cuts, logit_bias={9: 50.0})),
        request_of(Sampling(**greedy, **cuts, min_tokens=1), stop_ids=(0,)),
        request_of(Sampling(**greedy, **cuts, presence_penalty=2.0), (1,), (0,)),
    ]
    assert bench(VOCAB).sample(logits, requests).ids == [0, 2, 9, 1, 1]


def test_repetition_counts_the_prompt_and_the_other_penalties_do_not(bench, request_of):
    logits = np.zeros((2, VOCAB))
    logits[:, 5], logits[:, 6] = 2.0, 1.9
    requests = [
        request_of(Sampling(temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0), (5, 5)),
        request_of(Sampling(temperature=0.0, repetition_penalty=1.5), (5, 5)),
    ]
    assert bench(VOCAB).sample(logits, requests).ids == [5, 6]


def test_a_bad_word_needs_its_whole_prefix_in_the_reply(bench, request_of):
    logits = np.zeros((3, VOCAB))
    logits[:, 9] = 1.0
    banned = Sampling(temperature=0.0, bad_words=((3, 4, 9),))
    requests = [request_of(banned, (1,), (3, 4)), request_of(banned, (1, 3), (4,)), request_of(banned, (1,), (4, 3, 4))]
    assert [i == 9 for i in bench(VOCAB).sample(logits, requests).ids] == [False, True, False]


@pytest.mark.parametrize("barred", ["mask", "allowed"])
def test_min_tokens_is_ignored_if_only_end_tokens_are_possible(barred, bench, request_of):
    mask = np.zeros(VOCAB, bool)
    mask[[4, 8]] = True
    sampling = Sampling(temperature=0.0, min_tokens=9, allowed_token_ids=(4, 8) if barred == "allowed" else None)
    request = request_of(sampling, stop_ids=(4, 8), mask=mask if barred == "mask" else None)
    logits = np.zeros((2, VOCAB))
    logits[:, 8] = 1.0
    other = request_of(sampling, stop_ids=(8,), mask=request.mask)
    assert bench(VOCAB).sample(logits, [request, other]).ids == [8, 4]


def test_unused_stages_are_not_launched(bench, request_of):
    rows = bench(VOCAB).rows([request_of(Sampling(), (1,), (2, 3)), request_of(Sampling(temperature=0.0))])
    assert grammar(rows) is None
    assert [stage(rows) for stage in LOGIT_PROCESSORS] == [None] * len(LOGIT_PROCESSORS)
    assert [cut(rows, np.arange(2)) for cut in TRUNCATION] == [None] * len(TRUNCATION)


@pytest.mark.parametrize(
    "stage",
    [allowed_token_ids, logit_bias, min_tokens, repetition_penalty, reply_penalties, bad_words, temperature],
)
def test_stage_does_not_affect_other_rows(stage, bench, request_of):
    everything = Sampling(
        temperature=0.5,
        allowed_token_ids=(3,),
        logit_bias={3: 1.0},
        min_tokens=9,
        repetition_penalty=1.5,
        presence_penalty=1.0,
        bad_words=((3,),),
    )
    rows = bench(VOCAB).rows(
        [request_of(Sampling()), request_of(everything, (1,), (3,), (4,)), request_of(Sampling(temperature=0.0))]
    )
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    before = logits.clone()
    stage(rows)(logits)
    assert torch.equal(logits[[0, 2]], before[[0, 2]])
    assert not torch.equal(logits[1], before[1])


def test_reused_slot_keeps_no_state(bench, request_of):
    table = bench(VOCAB)
    logits = np.random.default_rng(0).normal(0, 1, (1, VOCAB)).astype(np.float32)
    everything = Sampling(
        temperature=0.7,
        top_k=3,
        top_p=0.5,
        min_p=0.3,
        seed=4,
        allowed_token_ids=(3, 4),
        logit_bias={3: 100.0},
        min_tokens=9,
        repetition_penalty=1.5,
        presence_penalty=1.0,
        frequency_penalty=1.0,
        bad_words=((3,), (2, 5)),
        logprobs=3,
        prompt_logprobs=3,
    )
    table.sample(logits, [request_of(everything, (1, 2, 3, 4), (5, 6, 7, 8, 9), (1, 2))], [5])
    plain = request_of(asking(Sampling(seed=9)), (1,), (2,))
    reused = table.sample(logits, [plain], [5])
    fresh = bench(VOCAB).sample(logits, [plain], [5])
    assert reused.ids == fresh.ids and reused.logprobs == fresh.logprobs
    assert not table.columns.prompt_logprobs


def test_masks_do_not_leak_into_other_rows(bench, request_of, oracle, softmax):
    rng = np.random.default_rng(5)
    mask = np.zeros(VOCAB, bool)
    mask[[2, 31, 32, 36]] = True
    requests = [
        request_of(asking(Sampling())),
        request_of(asking(Sampling()), mask=mask),
        request_of(asking(Sampling())),
    ]
    logits = rng.normal(0, 1, (3, VOCAB)).astype(np.float32)
    sampled = bench(VOCAB).sample(logits, requests)
    for row, request in enumerate(requests):
        expected = softmax(oracle(logits[row], request).processed)
        np.testing.assert_allclose(distribution(sampled.logprobs[row]), expected, rtol=1e-5, atol=1e-9)
