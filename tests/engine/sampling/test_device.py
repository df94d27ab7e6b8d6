"""Compare sampling on the device, in the interpreter, with the torch pipeline (test_pipeline.py checks that one)."""

import msgspec
import numpy as np
import pytest
import torch

from engine.api.messages import Sampling
from engine.sampling.device import DeviceSampler
from engine.sampling.device_columns import staged
from engine.sampling.noise import Noise, row_keys
from engine.sampling.pipeline import Prepared
from engine.sampling.rows import Rows
from kernels.jit import installed
from kernels.sampling.columns import FIELDS, DeviceColumns
from kernels.sampling.gumbel import noise_of

pytestmark = [
    pytest.mark.skipif(not installed(), reason="Triton is not installed"),
    # kernels rely on these operations; numpy warns about them in the interpreter
    pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning"),
]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Both:
    """Samples the same rows with the pipeline and on the device."""

    def __init__(self, bench, vocab):
        self.table, self.vocab = bench(vocab), vocab
        self.sampler = DeviceSampler(vocab, DEVICE)

    def sample(self, logits, requests, slots=None):
        logits = torch.tensor(np.asarray(logits, np.float32))
        rows = self.table.rows(requests, slots)
        wanted = Prepared(rows, self.table.noise).finish(logits.clone())
        return wanted, self.on_device(logits.clone(), rows)

    def on_device(self, logits, rows):
        columns = self.table.columns
        whole = torch.zeros(len(FIELDS), len(columns.temperature), dtype=torch.int32, device=DEVICE)
        used = rows.slots.tolist()
        whole[:, used] = torch.from_numpy(staged(columns, used)).to(DEVICE)
        step = self.sampler.prepare(
            Rows(rows.slots, rows.lengths, columns, np.empty((0, 0), np.int32), rows.masks, DEVICE)
        )
        slot, lengths = (torch.from_numpy(part.astype(np.int32)).to(DEVICE) for part in (rows.slots, rows.lengths))
        tokens = torch.from_numpy(self.table.tokens).to(DEVICE)
        drawn = step(logits.to(DEVICE), slot, lengths, tokens, DeviceColumns.of(whole))
        assert not self.sampler.counts.any(), "counts are zero after a step"
        sampled = step.read(drawn, drawn.found.cpu().numpy())
        assert drawn.ids.tolist() == sampled.ids
        return sampled


@pytest.fixture
def both(bench):
    return lambda vocab: Both(bench, vocab)


def assert_same(wanted, found):
    """Failures, tokens and logprobs."""
    assert found.failed == wanted.failed
    assert set(found.logprobs) == set(wanted.logprobs)
    rows = [row for row in range(len(wanted.ids)) if row not in wanted.failed]
    assert [found.ids[row] for row in rows] == [wanted.ids[row] for row in rows]
    for row in set(rows) & set(wanted.logprobs):
        want, got = wanted.logprobs[row], found.logprobs[row]
        assert (got.token, got.rank, len(got.top_ids)) == (want.token, want.rank, len(want.top_ids))
        np.testing.assert_allclose(got.logprob, want.logprob, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(got.top_logprobs, want.top_logprobs, rtol=1e-5, atol=1e-5)
        if want.top_ids == got.top_ids:  # those that were asked for are in any order
            continue
        # torch's topk takes any of the tokens that are as likely as the last one
        clear = [value > want.top_logprobs[-1] for value in want.top_logprobs]
        assert [i for i, keep in zip(got.top_ids, clear, strict=True) if keep] == [
            i for i, keep in zip(want.top_ids, clear, strict=True) if keep
        ]
        assert list(zip([-value for value in got.top_logprobs], got.top_ids, strict=True)) == sorted(
            zip([-value for value in got.top_logprobs], got.top_ids, strict=True)
        )


def random_sampling(rng, vocab):
    def maybe(value, off, chance=0.4):
        return value if rng.random() < chance else off

    ids = rng.permutation(vocab)[:12].tolist()
    return Sampling(
        temperature=float(rng.choice([0.0, 0.001, 0.5, 1.0, 1.6])),
        top_k=int(maybe(rng.choice([1, 2, 7, 45, vocab - 1, vocab + 5]), 0)),
        top_p=float(maybe(rng.choice([0.003, 0.31, 0.52, 0.87, 0.961]), 1.0)),
        min_p=float(maybe(rng.choice([0.0004, 0.07, 0.43, 1.0]), 0.0, 0.25)),
        seed=int(rng.integers(-(1 << 62), 1 << 62)),
        presence_penalty=float(maybe(rng.uniform(-2, 2), 0.0)),
        frequency_penalty=float(maybe(rng.uniform(-2, 2), 0.0)),
        repetition_penalty=float(maybe(rng.uniform(0.5, 2), 1.0)),
        logit_bias=maybe({int(i): float(rng.normal(0, 3)) for i in {1, 3, *ids[:3]}}, {}),
        allowed_token_ids=maybe(tuple(ids), None, 0.2),
        bad_words=maybe(tuple((int(i),) for i in ids[:3]) + ((3, 1), (3, 3, 1), (2, 2)), ()),
        min_tokens=int(maybe(rng.integers(0, 6), 0)),
        logprobs=maybe(int(rng.choice([0, 1, 4, 20, 21, -1])), None, 0.3),
        logprob_ids=maybe(tuple(map(int, rng.integers(0, vocab, rng.integers(1, 40)))), (), 0.3),
        logprobs_mode=str(rng.choice(["raw", "processed"])),
    )


def random_requests(rng, vocab, count, request_of):
    requests = []
    for _ in range(count):
        mask = rng.random(vocab) < 0.8 if rng.random() < 0.2 else None
        reply = tuple(map(int, rng.integers(0, min(6, vocab), rng.integers(0, 9))))
        requests.append(request_of(random_sampling(rng, vocab), (1, 3), reply, (0, vocab - 1), mask))
    return requests


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("vocab", "spread"), [(97, 0.0), (97, 0.3), (1000, 0.3), (1000, 3.0), (5000, 0.3)])
def test_random_requests_sample_as_in_the_pipeline(vocab, spread, both, request_of):
    """Many equal logits, flat and peaked rows, rows of -inf and NaN among them."""
    rng = np.random.default_rng([vocab, int(10 * spread)])
    requests = random_requests(rng, vocab, 12, request_of)
    logits = np.round(rng.normal(0, spread, (12, vocab)) * 8) / 8
    requests[5] = request_of(Sampling(top_p=0.9, logprobs=2))
    logits[3] = -np.inf
    logits[5, rng.integers(vocab)] = np.nan
    logits[6, rng.random(vocab) < 0.7] = -np.inf
    logits[8, 11] += 30
    wanted, found = both(vocab).sample(logits, requests, rng.permutation(64)[:12])
    assert set(wanted.failed) >= {3, 5}
    assert_same(wanted, found)


ALONE = {
    "nothing": Sampling(),
    "greedy": Sampling(temperature=0.0),
    "allowed": Sampling(allowed_token_ids=(36, 0, 5)),
    "bias": Sampling(logit_bias={0: -100.0, 36: 2.5, 7: 100.0}),
    "min_tokens": Sampling(min_tokens=4),
    "repetition": Sampling(repetition_penalty=1.7),
    "frequency": Sampling(frequency_penalty=0.8),
    "presence": Sampling(presence_penalty=-1.3),
    "bad words": Sampling(bad_words=((4,), (3, 3, 9), (3, 8), (1, 2, 3, 3, 11), (3, 9), (2, 3, 3, 12))),
    "hot": Sampling(temperature=1.9),
    "min_p": Sampling(min_p=0.2),
    "top_k": Sampling(top_k=5),
    "top_p": Sampling(top_p=0.7),
}


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.sampled(5)
def test_each_stage_keeps_the_distribution_of_the_pipeline(name, both, request_of):
    asking = msgspec.structs.replace(ALONE[name], logprobs=-1, logprobs_mode="processed")
    replies = ((), (3,), (3, 3), (5, 0, 5, 36), (5, 0, 5, 36, 3, 3))
    requests = [request_of(asking, (1, 2, 7), reply, (36, 5, 999)) for reply in replies]
    logits = np.random.default_rng(3).normal(0, 3, (len(requests), 37))
    assert_same(*both(37).sample(logits, requests))


def test_the_stages_come_in_the_pipelines_order(both, request_of):
    """One token that all of them meet."""
    all_of_it = Sampling(
        temperature=0.7,
        logit_bias={3: 1.5, 4: -9.0},
        repetition_penalty=1.6,
        frequency_penalty=0.7,
        presence_penalty=0.4,
        min_tokens=9,
        bad_words=((5,),),
        logprobs=-1,
        logprobs_mode="processed",
    )
    only = msgspec.structs.replace(all_of_it, allowed_token_ids=(4, 8))
    requests = [request_of(all_of_it, (1, 3), (3, 5, 3), (4, 8)), request_of(only, (1,), (4,), (4, 8))]
    wanted, found = both(37).sample(np.random.default_rng(2).normal(0, 1, (2, 37)), requests)
    assert not wanted.failed
    assert_same(wanted, found)


def test_unused_stages_are_not_launched(both, request_of):
    two = both(37)
    rows = two.table.rows([request_of(Sampling(), (1,), (2, 3)), request_of(Sampling(temperature=0.0, top_k=3))])
    step = two.sampler.prepare(rows)
    assert step.mask is None and not step.processors and not step.logprob_groups and not step.truncated


def test_more_rows_with_penalties_than_lines_of_counts(both, request_of):
    rng = np.random.default_rng(0)
    requests = [
        request_of(Sampling(temperature=0.0, frequency_penalty=1.0), (1,), tuple(rng.integers(0, 5, 7).tolist()))
        for _ in range(40)
    ]
    two = both(11)
    two.sampler.counts = two.sampler.counts[:3]
    assert_same(*two.sample(rng.normal(0, 1, (40, 11)), requests))


def test_padding_row_has_no_effect(both, request_of):
    requests = [request_of(Sampling(top_p=0.5, seed=3, logprobs=2)), request_of(Sampling(seed=4, presence_penalty=1.0))]
    two = both(97)
    logits = torch.randn(2, 97, generator=torch.Generator().manual_seed(0))
    rows = two.table.rows(requests)
    plain = two.on_device(logits.clone(), rows)
    step = two.sampler.prepare(rows)
    slot, lengths = torch.tensor([0, 1, 0], dtype=torch.int32), torch.tensor([*rows.lengths, 0], dtype=torch.int32)
    whole = torch.zeros(len(FIELDS), 64, dtype=torch.int32)
    whole[:, [0, 1]] = torch.from_numpy(staged(two.table.columns, [0, 1]))
    more = torch.cat((logits, torch.full((1, 97), torch.nan))).to(DEVICE)
    tokens = torch.from_numpy(two.table.tokens).to(DEVICE)
    drawn = step(more, slot.to(DEVICE), lengths.to(DEVICE), tokens, DeviceColumns.of(whole.to(DEVICE)))
    padded = step.read(drawn, drawn.found.cpu().numpy())
    assert (padded.ids, padded.failed, padded.logprobs) == (plain.ids, {}, plain.logprobs)


def test_reused_slot_keeps_no_state(both, request_of):
    two = both(97)
    logits = np.random.default_rng(0).normal(0, 1, (1, 97))
    first = Sampling(
        allowed_token_ids=(3, 4), logit_bias={3: 9.0}, bad_words=((3,),), frequency_penalty=2.0, min_tokens=9
    )
    two.sample(logits, [request_of(first, (1, 2), (5, 6, 7), (1,))], [5])
    assert_same(*two.sample(logits, [request_of(Sampling(seed=9, allowed_token_ids=(50, 60)), (1,), (2,))], [5]))
    assert_same(*two.sample(logits, [request_of(Sampling(seed=9, logprobs=3), (1,), (2,))], [5]))


def test_no_rows(both):
    two = both(37)
    found = two.on_device(torch.empty(0, 37), two.table.rows([]))
    assert found.ids == [] and found.failed == {} and found.logprobs == {}


def test_device_noise_equals_host_noise():
    rng = np.random.default_rng(1)
    seeds, positions = rng.integers(0, 1 << 63, 5).astype(np.uint64) * np.uint64(2) + np.uint64(1), np.arange(5) * 1000
    words = seeds.view(np.int32).reshape(-1, 2)
    low, high = (torch.from_numpy(np.ascontiguousarray(words[:, half])) for half in (0, 1))
    noise = Noise(1009, torch.device("cpu")).all_tokens(torch.from_numpy(row_keys(seeds, positions)))
    torch.testing.assert_close(noise_of(low, high, torch.from_numpy(positions), 1009), noise, rtol=0, atol=2e-6)
