"""Tests of the sampling kernels that test_ops.py does not cover.

They compare exact thresholds of the truncation with float64 by brute force, and test rows that are not finite and the
code paths of rare rows."""

import math

import numpy as np
import pytest
import torch

from kernels.jit import installed
from kernels.sampling import penalties as penalties_file
from kernels.sampling import sample as sample_file
from kernels.sampling import truncation
from kernels.sampling.columns import FIELDS, DeviceColumns, join_float64, split_float64
from kernels.sampling.gumbel import noise_of
from kernels.sampling.penalties import PENALTIES
from kernels.sampling.sample import sample
from kernels.sampling.token_mask import TOKEN_MASK
from kernels.sampling.top_logprobs import TOP_LOGPROBS
from kernels.sampling.truncation import brackets

pytestmark = [
    pytest.mark.skipif(not installed(), reason="Triton is not installed"),
    # kernels rely on these operations; numpy warns about them in the interpreter
    pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning"),
]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def columns_of(rows, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0):
    """A slot for each row; values of one row or of each."""

    def column(values, dtype=np.float64):
        return torch.from_numpy(np.broadcast_to(np.asarray(values, dtype), (rows,)).copy()).to(DEVICE)

    columns = DeviceColumns.of(torch.zeros(len(FIELDS), rows, dtype=torch.int32, device=DEVICE))
    with np.errstate(divide="ignore"):
        border = column(np.log(np.asarray(min_p, np.float64)))
    columns.temperature.copy_(column(temperature))
    columns.top_k.copy_(column(top_k))
    for place, part in zip(
        (columns.top_p_low, columns.top_p_high, columns.log_min_p_low, columns.log_min_p_high),
        (*split_float64(column(top_p)), *split_float64(border)),
        strict=True,
    ):
        place.copy_(part)
    columns.seed_low.copy_(torch.arange(rows) * 7919 + seed)
    columns.seed_high.copy_(torch.arange(rows) - 3)
    return columns


class Found:
    """Result of `sample` for rows of logits. Each row has its own slot, in a different order from the rows."""

    def __init__(self, logits, columns, cuts=True):
        logits = torch.tensor(np.asarray(logits, np.float32)).to(DEVICE)
        rows, self.vocab = logits.shape
        self.slot = torch.arange(rows - 1, -1, -1, dtype=torch.int32, device=DEVICE)
        self.lengths = torch.arange(5, 5 + rows, dtype=torch.int32, device=DEVICE)
        result = sample(logits, self.slot, self.lengths, columns, cuts)
        self.ids, self.scores, self.counts, self.floor, self.last = (part.cpu().numpy() for part in result)
        line = self.slot.long()
        divisor = columns.temperature[line].cpu().numpy()[:, None]
        with np.errstate(invalid="ignore"):
            self.s = logits.cpu().numpy() / np.where(divisor == 0, np.float32(1), divisor)
        noise = noise_of(columns.seed_low[line], columns.seed_high[line], self.lengths, self.vocab).cpu().numpy()
        self.noisy = self.s + np.where(divisor == 0, 0, noise)
        self.parameters = [
            (float(t), int(k), float(p), float(d))
            for t, k, p, d in zip(
                columns.temperature[line],
                columns.top_k[line],
                join_float64(columns.top_p_low[line], columns.top_p_high[line]),
                join_float64(columns.log_min_p_low[line], columns.log_min_p_high[line]),
                strict=True,
            )
        ]

    def kept(self, row):
        """Ids between floor and last, of tokens that are possible."""
        s, token = self.s[row], np.arange(self.vocab)
        inside = (s > self.floor[row]) | ((s == self.floor[row]) & (token <= self.last[row]))
        return np.flatnonzero(inside & (s > -np.inf))


def oracle(s, k, p, border):
    """Return the kept ids of fp32 s by sorting in float64, and the distance between prefix mass and top_p."""
    order = np.argsort(-s.astype(np.float64), kind="stable")
    wide = s[order].astype(np.float64)
    count = int((wide >= wide[0] + border).sum())
    count = max(1, min(count, k) if k else count)
    near = math.inf
    if p < 1:
        sums = np.cumsum(np.exp((s[order][:count] - s[order][0]).astype(np.float64)))
        near = float(np.abs(sums / sums[-1] - p).min())
        count = min(count, int((sums < p * sums[-1]).sum()) + 1)
    kept = order[:count]
    return np.sort(kept[s[kept] > -np.inf]), near


def assert_exact(found):
    """The kept tokens are the reference's, and the best of them is drawn. Returns how many rows could be compared."""
    compared = 0
    for row, (t, k, p, border) in enumerate(found.parameters):
        assert t > 0, "greedy rows have no cuts"
        want, near = oracle(found.s[row], k, p, border)
        if near < 1e-6:
            continue
        compared += 1
        what = f"row {row}: T {t}, top_k {k}, top_p {p}, log min_p {border}"
        assert found.kept(row).tolist() == want.tolist(), what
        if k or p < 1 or border > -math.inf:
            assert found.counts[row] == len(want), what
        best = found.noisy[row][want].max()
        assert found.ids[row] in want and found.noisy[row][found.ids[row]] >= best - 1e-5, what
        assert abs(found.scores[row] - best) < 1e-4, what
    return compared


def unlike_rows(vocab, rng):
    """Peaked, flat, tied, rounded to bf16, equal and mostly impossible logits, and one far above the rest."""
    x = rng.normal(0, 1, (7, vocab)).astype(np.float32)
    x[0] *= 6
    x[1] *= 0.2
    x[2] = np.round(x[2] * 4) / 2
    x[3] = ((x[3] * 3).view(np.uint32) >> 16 << 16).view(np.float32)
    x[4] = 1.5
    x[5, rng.random(vocab) < 0.9] = -np.inf
    x[6, vocab // 3] += 40
    return x


WAYS = {"narrow": (4096, 16384), "gathered": (16, 16384), "noisy": (16, 700), "whole rows": (16, 3)}


def take(way, monkeypatch):
    few, capacity = WAYS[way]
    monkeypatch.setattr(truncation, "FEW", few)
    monkeypatch.setattr(truncation, "CAPACITY", capacity)
    monkeypatch.setattr(sample_file, "CAPACITY", capacity)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shift", [0, 2])
@pytest.mark.sampled(3)
def test_threshold_is_exact_on_every_code_path(shift, way, monkeypatch):
    take(way, monkeypatch)
    logits = unlike_rows(1031, np.random.default_rng([shift, list(WAYS).index(way)]))

    def turned(values):
        return np.roll(values, shift)

    columns = columns_of(
        len(logits),
        temperature=turned([1.0, 0.7, 1.9, 1.0, 0.3, 1.0, 1.0]),
        top_k=turned([0, 300, 0, 0, 40, 0, 700]),
        top_p=turned([0.93, 1.0, 0.9, 1.0, 0.8, 0.31, 0.99]),
        min_p=turned([0, 0, 0.002, 0.1, 0, 0, 0]),
    )
    assert assert_exact(Found(logits, columns)) >= 5


def test_every_code_path_is_taken(monkeypatch):
    """Control: the test above only means something if each code path is reached."""
    logits = torch.randn(2, 9001, generator=torch.Generator().manual_seed(0)).to(DEVICE) * 0.2
    logits[1] = logits[1].round() * 0.001 + logits[1] * 1e-5  # so close that no estimate separates its tokens
    columns, slot = columns_of(2, top_p=0.9), torch.arange(2, dtype=torch.int32, device=DEVICE)
    assert brackets(logits * 50, slot, columns).kind.tolist() == [1, 2]
    take("gathered", monkeypatch)
    known = brackets(logits, slot, columns)
    assert known.kind.tolist() == [2, 2] and known.rounds.tolist() == [1, 1]
    monkeypatch.setattr(truncation, "FEW", 600)
    known = brackets(logits, slot, columns)
    assert known.kind.tolist() == [2, 2] and known.rounds.tolist() == [0, 0], "the guess is good enough"
    pivots, total = known.pivots[0, :, :6], known.total.double()
    masses = known.masses[0].sum(1)[:, :6].double() / total[:, None]
    assert (pivots.diff() >= 0).all() and (masses > 0.9).any(1).all() and (masses < 0.9).any(1).all()


def test_long_rows_over_many_parts():
    rng = np.random.default_rng(5)
    logits = rng.normal(0, 0.5, (2, 20_011)).astype(np.float32)
    logits[0, 20_000] = 3.0
    found = Found(logits, columns_of(2, top_p=[0.97, 0.2], top_k=[0, 9000]))
    assert assert_exact(found) == 2


@pytest.mark.parametrize(
    ("p", "kept"), [(1e-12, 1), (0.001, 1), (0.25, 250), (0.3, 300), (0.5, 500), (0.9991, 1000), (1 - 1e-12, 1000)]
)
def test_top_p_keeps_the_first_of_equal_tokens(p, kept):
    found = Found(np.full((1, 1000), 7.0), columns_of(1, top_p=p))
    assert found.kept(0).tolist() == list(range(kept)) and found.counts[0] == kept


def test_top_p_ends_with_the_token_that_reaches_it():
    """With ½, ¼, ⅛, ⅛ a top_p of one half keeps one token, and any larger value keeps two."""
    logits = np.log([[0.5, 0.25, 0.125, 0.125]] * 4)
    found = Found(logits, columns_of(4, top_p=[0.7501, 0.75 - 1e-5, 0.5 + 1e-5, 0.5 - 1e-5]))
    assert [found.kept(row).tolist() for row in range(4)] == [[0], [0, 1], [0, 1], [0, 1, 2]]


@pytest.mark.parametrize("k", [1, 2, 3, 4, 998, 999])
def test_top_k_keeps_the_first_of_equal_tokens(k):
    logits = np.zeros((1, 1000))
    logits[0, [900, 400]] = 2.0, 1.0
    found = Found(logits, columns_of(1, top_k=k))
    others = [token for token in range(1000) if token not in (900, 400)]
    assert found.kept(0).tolist() == sorted([900, 400, *others][:k])


def test_min_p_of_one_keeps_all_equally_likely_tokens():
    logits = np.zeros((2, 5000))
    logits[0, [17, 4800, 333]] = 1.0
    logits[1, 4999] = np.nextafter(np.float32(0), np.float32(1))
    found = Found(logits, columns_of(2, min_p=1.0))
    assert found.kept(0).tolist() == [17, 333, 4800] and found.kept(1).tolist() == [4999]


def test_top_p_applies_to_the_rest_of_min_p_and_top_k():
    logits = np.log([[0.4, 0.2, 0.2, 0.1, 0.1]] * 3)
    found = Found(logits, columns_of(3, top_p=0.6, top_k=[2, 0, 0], min_p=[0, 0.4, 0]))
    assert [found.kept(row).tolist() for row in (2, 1, 0)] == [[0], [0, 1], [0, 1]]


def test_logits_that_only_the_temperature_makes_equal_are_equal():
    steps = np.arange(1, 50, dtype=np.float32) * np.float32(2**-23) + np.float32(1.9)
    even = steps[1:].view(np.int32) % 2 == 0  # where a search by halves may end just there
    same = np.flatnonzero((np.diff(steps / np.float32(1.5)) == 0) & even)[0]
    low, high = steps[same : same + 2]
    assert low < high
    found = Found([[0, low, high, 0]] * 2, columns_of(2, temperature=1.5, top_k=1))
    assert found.kept(0).tolist() == [1]
    far = high - np.float32(1000 * 2**-23)
    assert Found([[low, high, far]], columns_of(1, temperature=1.5, top_k=1)).kept(0).tolist() == [0]
    found = Found([[0, low, high, 0]] * 2, columns_of(2, temperature=1.5, min_p=1.0))
    assert found.kept(0).tolist() == [1, 2]


def test_threshold_of_min_p_is_not_rounded():
    """In float32 the threshold would be -1 in both rows."""
    found = Found([[0.0, -1.0]] * 2, columns_of(2, min_p=np.exp([-1 + 1e-9, -1 - 1e-9])))
    assert [found.kept(row).tolist() for row in (1, 0)] == [[0], [0, 1]]


def test_top_k_is_exact_at_a_pivot(monkeypatch):
    take("gathered", monkeypatch)
    logits = np.random.default_rng(9).normal(0, 1, (1, 1031)).astype(np.float32)
    slot = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    known = brackets(torch.from_numpy(logits).to(DEVICE), slot, columns_of(1, top_k=500))
    counts = known.counts[0, 0, 0, :6].tolist()
    assert len({*counts}) == 6
    k = [count + more for count in counts[1:5] for more in (-1, 0, 1)]
    found = Found(np.repeat(logits, len(k), 0), columns_of(len(k), top_k=k[::-1]))
    assert found.counts.tolist() == k and assert_exact(found) == len(k)


def test_minus_zero_is_zero():
    found = Found([[-0.0, 0.0, -1.0], [0.0, -0.0, -1.0]], columns_of(2, top_k=1))
    assert [found.kept(row).tolist() for row in range(2)] == [[0], [0]]
    assert Found([[-1.0, -0.0, 0.0]], columns_of(1, temperature=0.0), cuts=False).ids.tolist() == [1]


@pytest.mark.parametrize("cut", [{}, {"top_p": 0.5, "top_k": 3, "min_p": 0.1}, {"temperature": 0.0}])
def test_nonfinite_rows_do_not_affect_others(cut):
    logits = np.random.default_rng(2).normal(0, 1, (6, 4200))
    fine = Found(logits, columns_of(6, **cut))
    logits[0, 4199] = np.nan
    logits[1, 7] = np.inf
    logits[2] = -np.inf
    logits[3] = np.copysign(np.nan, -1)
    logits[4] = -np.inf
    logits[4, 100] = np.nan
    found = Found(logits, columns_of(6, **cut))
    assert np.isnan(found.scores[[0, 1, 3, 4]]).all() and found.scores[2] == -np.inf
    assert found.ids[:5].tolist() == [0] * 5 and found.counts[:5].tolist() == [0] * 5
    assert found.ids[5] == fine.ids[5] and found.scores[5] == fine.scores[5]


@pytest.mark.parametrize("cut", [{}, {"top_p": 0.5}, {"top_k": 1}, {"temperature": 0.0}])
def test_one_token_is_drawn(cut):
    found = Found([[0.0], [-50.0]], columns_of(2, **cut))
    assert found.ids.tolist() == [0, 0] and np.isfinite(found.scores).all()


def test_first_of_equal_scores_wins_across_tiles():
    logits = np.zeros((2, 9000))
    logits[0, [8999, 4096, 4095]] = 5.0
    logits[1, [8191, 8192]] = 5.0
    assert Found(logits, columns_of(2, temperature=0.0), cuts=False).ids.tolist() == [4095, 8191]
    logits = np.zeros((2, 9000))
    logits[:, 8000:8600] = 1e9  # noise is less than such a number's last place
    logits[0, 5] = 1e9
    assert Found(logits, columns_of(2, top_k=601)).ids.tolist() == [5, 8000]


@pytest.mark.parametrize("scale", [0.1, 3.0, 3000.0])
def test_tokens_whose_noise_is_not_computed_could_not_win(scale):
    """Nor are NaN, infinite or masked logits among those that are skipped."""
    logits = np.random.default_rng(7).normal(0, scale, (8, 9001)).astype(np.float32)
    logits[5, 8000] = np.nan
    logits[6, 8100] = np.inf
    logits[7, :8999] = -np.inf
    found = Found(logits, columns_of(8, temperature=[0.01, 0.3, 1, 1, 1.8, 1, 1, 1], seed=11), cuts=False)
    for row in (0, 1, 2, 3, 4, 7):
        best = found.noisy[row].max()
        assert found.noisy[row][found.ids[row]] >= best - 1e-6 * (1 + abs(best)), row
        assert abs(found.scores[row] - best) <= 1e-5 * (1 + abs(best))
    assert np.isnan(found.scores[5:7]).all()


def test_fp16_logits_are_read_exactly():
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(1)).half().to(DEVICE)
    columns, slot = columns_of(3, top_p=[0.9, 1.0, 0.5]), torch.arange(3, dtype=torch.int32, device=DEVICE)
    for want, got in zip(
        sample(logits.float(), slot, slot, columns, True), sample(logits, slot, slot, columns, True), strict=True
    ):
        assert torch.equal(want, got)


def test_penalties_of_sequences_longer_than_a_chunk(monkeypatch):
    """Repeated tokens, within a chunk, across chunks and across programs, in the prompt and after it."""
    monkeypatch.setattr(penalties_file, "CHUNK", 16)
    monkeypatch.setattr(penalties_file, "PROGRAMS", 3)
    rng = np.random.default_rng(0)
    tokens = torch.from_numpy(rng.integers(0, 9, (3, 400)).astype(np.int32)).to(DEVICE)
    tokens[1, :] = 4
    logits = torch.randn(3, 11, generator=torch.Generator().manual_seed(1)).to(DEVICE)

    def column(*values, dtype=torch.float32):
        return torch.tensor(values, dtype=dtype, device=DEVICE)

    args = (
        *(column(2, 0, 1, dtype=torch.int32), column(0, 1, 2, dtype=torch.int32)),
        *(column(399, 400, 33, dtype=torch.int32), tokens, column(100, 31, 33, dtype=torch.int32)),
        *(column(1.0, 1.3, 0.8), column(0.37, 0.1, 0.5), column(0.0, 0.7, 0.9)),
        torch.zeros(3, 11, dtype=torch.int32, device=DEVICE),
    )
    want, _ = PENALTIES.reference(logits.clone(), *args)
    got, counts = PENALTIES(logits.clone(), *args)
    assert torch.equal(want, got) and not counts.any()
    assert not torch.equal(got[0], logits[0]) and torch.equal(got[1, 5:], logits[1, 5:])


def test_mask_keeps_allowed_logits():
    logits = torch.full((2, 70), math.nan, device=DEVICE)
    words = torch.tensor([[0, 1 << 31 >> 1, 3]], dtype=torch.int32, device=DEVICE)
    TOKEN_MASK(logits, torch.tensor([1], dtype=torch.int32, device=DEVICE), words)
    assert logits[0].isnan().all() and logits[1].isnan().nonzero()[:, 0].tolist() == [62, 64, 65]
    assert logits[1].isnan().logical_or(logits[1] == -math.inf).all()


def test_equal_tokens_of_different_tiles_are_listed_by_id():
    logits = torch.zeros(1, 9000, device=DEVICE)
    logits[0, [8999, 4096, 100]] = 2.0
    logits[0, 5000] = 3.0

    def whole(*values):
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    step = whole(0), whole(0), whole(100), whole(0), torch.ones(1, device=DEVICE)
    values, numbers = TOP_LOGPROBS(logits, *step, torch.tensor([-math.inf], device=DEVICE), whole(8999), 7, False)
    assert numbers.tolist() == [[2, 5000, 100, 4096, 8999, 0, 1, 2]]
    assert values[0, 0] == values[0, 2] == values[0, 4] and values[0, 1] - values[0, 2] == 1.0
    # processed: of the equal ones only those up to the last id are kept
    values, numbers = TOP_LOGPROBS(logits, *step, torch.tensor([2.0], device=DEVICE), whole(4096), 4, True)
    assert numbers.tolist() == [[2, 5000, 100, 4096, 0]] and values[0, 4] == -math.inf
    assert math.isclose(values[0, 1:4].double().exp().sum(), 1.0, abs_tol=1e-6)
