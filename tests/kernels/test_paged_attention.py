"""Paged attention of ragged rows against a loop over single queries in float64."""

import math
import random

import pytest
import torch

from kernels import paged_attention as module
from kernels.paged_attention import Sizes, causal_reads, cross_reads, group_reads, paged_attention
from kernels.paged_kv import write_kv, write_rows

BLOCK, LAYERS, LAYER = 4, 3, 1


def spans_equal_brute_force(first, count, spans, **options):
    """Compare a row with spans with one pass for each query over the keys that it sees."""
    rows = Rows([(first, count), (3, 1), (0, 5)], **options)
    none = [[0, 0]] * count
    for begin, end in spans:
        none[begin - first : end - first] = [[begin, end]] * (end - begin)
    every = torch.tensor(none + [[0, 0]] * 6)
    limits = {"window": rows.window, "key_starts": None, "spans": every}
    reads = group_reads(causal_reads(rows.first, rows.count, rows.sizes, **limits), rows.table, LAYERS)
    got = paged_attention(rows.q, rows.k, rows.v, rows.pages, LAYER, reads, scale=0.35, softcap=None)
    wanted = rows.expected(0.35)
    keys, values = (one.double().repeat_interleave(3, 1) for one in rows.kv[0])
    for i, (begin, end) in enumerate(none):
        position = first + i
        low = 0 if rows.window is None else max(0, position - rows.window + 1)
        seen = sorted({*range(low, position + 1), *range(begin, end)})
        weights = (torch.einsum("khd,hd->hk", keys[seen], rows.q[i].double()) * 0.35).softmax(-1)
        wanted[i] = torch.einsum("hk,khd->hd", weights, values[seen])
    torch.testing.assert_close(got.double(), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("window", [None, 6])
def test_tokens_of_a_span_see_one_another(window):
    spans_equal_brute_force(0, 12, [(0, 5), (7, 12)], window=window)
    spans_equal_brute_force(9, 8, [(10, 14), (14, 17)], window=window)


def brute_force(q, keys, values, first, window, scale, softcap, sinks=None, slopes=None, begin=0, chunk=None):
    """q: [count, heads, dim] at positions first…; keys, values: [length, kv_heads, dim], all positions of the row."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    group = q.shape[1] // keys.shape[1]
    for i in range(q.shape[0]):
        position = first + i
        low = begin if window is None else max(begin, position - window + 1)
        low = low if chunk is None else max(low, position - position % chunk)
        for head in range(q.shape[1]):
            k = keys[low : position + 1, head // group].double()
            scores = k @ q[i, head].double() * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if slopes is not None:
                scores += slopes[head].double() * torch.arange(low - position, 1)
            weights = scores.exp()
            total = weights.sum() + (0.0 if sinks is None else sinks[head].double().exp())
            out[i, head] = weights / total @ values[low : position + 1, head // group].double()
    return out


class Rows:
    """Rows of (first, count), whose earlier positions are in shuffled pages; blocks out of the window are released."""

    def __init__(
        self, rows, *, heads=6, kv_heads=2, dim=8, window=None, chunk=None, seed=0, key_starts=None, dtype=torch.float32
    ):
        self.window, self.key_starts, draw = window, key_starts, torch.Generator().manual_seed(seed)
        self.chunk = chunk
        self.first, self.count = [first for first, _ in rows], [count for _, count in rows]
        total = sum(self.count)
        width = max(-(-(first + count) // BLOCK) for first, count in rows)
        blocks = torch.randperm(len(rows) * width, generator=draw) + 1
        self.table = blocks.view(len(rows), width)
        self.pages = torch.full((len(rows) * width + 1, LAYERS, 2, BLOCK, kv_heads, dim), 50.0, dtype=dtype)
        self.q = torch.randn((total, heads, dim), generator=draw)
        self.kv = [torch.randn((2, first + count, kv_heads, dim), generator=draw) for first, count in rows]
        new = [kv[:, first:] for kv, first in zip(self.kv, self.first, strict=True)]
        self.k, self.v = torch.cat([x[0] for x in new]), torch.cat([x[1] for x in new])
        for row, kv in enumerate(self.kv):
            self._write(row, 0, kv.shape[1], kv[0], kv[1])
            released = 0 if window is None else max(0, self.first[row] - window + 1) // BLOCK
            released = released if chunk is None else self.first[row] // chunk * chunk // BLOCK
            self.table[row, :released] = 0

    def _write(self, row, first, stop, k, v):
        positions = torch.arange(first, stop)
        slots = self.table[row, positions // BLOCK] * BLOCK + positions % BLOCK
        write_kv(self.pages, write_rows(slots, LAYERS, BLOCK)[LAYER], k, v)

    @property
    def sizes(self):
        return Sizes(
            block_tokens=BLOCK,
            columns=self.table.shape[1],
            page_elements=BLOCK * self.k.shape[1] * self.k.shape[2],
            device=self.table.device,
        )

    def reads(self):
        limits = {"window": self.window, "chunk": self.chunk, "key_starts": self.key_starts}
        window_reads = causal_reads(self.first, self.count, self.sizes, **limits)
        return group_reads(window_reads, self.table, LAYERS)

    def of_sources(self, scale, softcap=None):
        reads = group_reads(cross_reads(self.key_starts, self.count, self.sizes), self.table, LAYERS)
        return paged_attention(self.q, None, None, self.pages, LAYER, reads, scale=scale, softcap=softcap)

    def attention(self, scale, softcap=None, sinks=None, slopes=None):
        options = {"scale": scale, "softcap": softcap, "sinks": sinks, "slopes": slopes}
        return paged_attention(self.q, self.k, self.v, self.pages, LAYER, self.reads(), **options)

    def expected(self, scale, softcap=None, sinks=None, slopes=None):
        pieces, at = [], 0
        key_starts = self.key_starts or [0] * len(self.first)
        for first, count, kv, begin in zip(self.first, self.count, self.kv, key_starts, strict=True):
            q = self.q[at : at + count]
            keys, values = kv.to(self.pages.dtype)
            options = scale, softcap, sinks, slopes, begin, self.chunk
            pieces.append(brute_force(q, keys, values, first, self.window, *options))
            at += count
        return torch.cat(pieces)


def check(rows, scale=0.35, softcap=None, sinks=None, slopes=None):
    options = (scale, softcap, sinks, slopes)
    torch.testing.assert_close(rows.attention(*options).double(), rows.expected(*options), atol=1e-5, rtol=0)


MIXES = {
    "one token": [(0, 1)],
    "decode": [(9, 1)],
    "decode at block edges": [(3, 1), (4, 1), (5, 1), (7, 1), (8, 1)],
    "decode of very different lengths": [(0, 1), (200, 1), (3, 1), (90, 1), (199, 1)],
    "a whole prompt": [(0, 11)],
    "a later chunk": [(7, 6)],
    "everything": [(5, 1), (0, 7), (8, 3), (30, 1), (4, 4), (0, 1), (13, 2)],
}


@pytest.mark.parametrize("window", [None, 1, 3, 4, 5, 64])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("mix", MIXES)
def test_rows_equal_a_loop_over_queries(mix, window, softcap):
    check(Rows(MIXES[mix], window=window), softcap=softcap)


@pytest.mark.parametrize("chunk", [1, 3, 6, 8, 64])
@pytest.mark.parametrize("mix", MIXES)
def test_rows_within_chunks_equal_a_loop_over_queries(mix, chunk):
    check(Rows(MIXES[mix], chunk=chunk))
    check(Rows(MIXES[mix], chunk=chunk), softcap=1.5, sinks=torch.linspace(-3, 5, 6))


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_over_16_bit_pages_read_rounded_keys_of_their_own_step_too(dtype, softcap, window):
    check(Rows(MIXES["everything"], window=window, dtype=dtype), softcap=softcap)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("mix", MIXES)
def test_sinks_take_their_share_of_the_weights(mix, window, softcap):
    check(Rows(MIXES[mix], window=window), softcap=softcap, sinks=torch.linspace(-3, 5, 6))


SLOPES = torch.tensor([1.0, 0.5, 0.3, 0.1, 0.03, 0.0])


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("mix", MIXES)
def test_slopes_add_a_bias_that_falls_with_the_distance(mix, softcap):
    check(Rows(MIXES[mix]), softcap=softcap, slopes=SLOPES)


@pytest.mark.parametrize("begun", [None, [4, 0, 2, 17, 0, 0, 9]])
def test_slopes_with_sinks_windows_and_starts(begun):
    check(Rows(MIXES["everything"], window=9, key_starts=begun), sinks=torch.linspace(-3, 5, 6), slopes=SLOPES)


def test_slopes_do_not_depend_on_slices(monkeypatch):
    monkeypatch.setattr(module, "SCORE_ELEMENTS", 64)
    check(Rows(MIXES["everything"]), slopes=SLOPES)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(1, 1, 2), (5, 1, 16), (7, 7, 3), (14, 2, 64)])
def test_head_counts_and_sizes_of_all_kinds(heads, kv_heads, dim):
    check(Rows(MIXES["everything"], heads=heads, kv_heads=kv_heads, dim=dim), scale=1 / math.sqrt(dim))


@pytest.mark.parametrize("seed", range(5))
def test_random_mixes(seed):
    draw = random.Random(seed)
    rows = [
        (draw.choice([0, draw.randint(0, 60)]), draw.choice([1, 1, draw.randint(2, 20)]))
        for _ in range(draw.randint(1, 9))
    ]
    check(Rows(rows, window=draw.choice([None, draw.randint(1, 30)]), seed=seed))


BEGUN = {
    "at the row's first token": ([(9, 1), (5, 7)], [9, 5]),
    "within a block": ([(9, 1), (30, 1), (8, 3), (14, 2)], [6, 1, 7, 3]),
    "at a block": ([(9, 1), (30, 1), (8, 3), (4, 5)], [8, 4, 4, 4]),
    "all kinds": ([(200, 1), (90, 1), (3, 1), (0, 4), (6, 5)], [10, 89, 0, 0, 2]),
}


@pytest.mark.parametrize("window", [None, 3, 64])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("mix", BEGUN)
def test_rows_read_no_key_before_their_start(mix, window, softcap):
    rows, key_starts = BEGUN[mix]
    check(Rows(rows, window=window, key_starts=key_starts), softcap=softcap)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("mix", BEGUN)
def test_every_token_reads_exactly_the_encoder_input(mix, softcap):
    spans, key_starts = BEGUN[mix]
    rows = Rows(spans, key_starts=[max(1, begin) for begin in key_starts])
    pieces, at = [], 0
    for count, (keys, values), length in zip(rows.count, rows.kv, rows.key_starts, strict=True):
        each = (
            brute_force(rows.q[i : i + 1], keys, values, length - 1, None, 0.35, softcap) for i in range(at, at + count)
        )
        pieces += each
        at += count
    torch.testing.assert_close(rows.of_sources(0.35, softcap).double(), torch.cat(pieces), atol=2e-5, rtol=0)


@pytest.mark.parametrize("limit", [1, 64, 1000])
def test_small_gathers_and_slices_do_not_change_the_result(monkeypatch, limit):
    """The limits that keep temporary buffers small cut the work, not the result."""
    monkeypatch.setattr(module, "GATHER_ELEMENTS", limit)
    monkeypatch.setattr(module, "SCORE_ELEMENTS", limit)
    check(Rows(MIXES["everything"]))
    check(Rows(MIXES["everything"]), softcap=2.0)
    check(Rows(MIXES["everything"]), sinks=torch.linspace(-3, 5, 6))


def test_rows_of_similar_length_share_a_bucket_and_others_do_not():
    lengths = [400, 390, 350, 100, 98, 3, 9]
    reads = Rows([(length - 1, 1) for length in lengths]).reads()
    assert [sorted(lengths[i] for i in bucket.tokens.tolist()) for bucket in reads.window_reads.buckets] == [
        [350, 390, 400],
        [98, 100],
        [3, 9],
    ]


def test_a_windowed_row_gathers_only_the_blocks_of_its_window():
    (bucket,) = Rows([(199, 1)], window=6).reads().window_reads.buckets
    assert bucket.bias.shape[-1] == 2 * BLOCK  # positions 194 to 199 are in blocks 48 and 49


def test_other_layers_and_blocks_are_not_written():
    rows = Rows([(0, 5)])
    assert (rows.pages[:, 0] == 50).all() and (rows.pages[:, 2] == 50).all() and (rows.pages[0] == 50).all()
    assert rows.pages[rows.table[0, 1], LAYER, :, 1:].eq(50).all()


def test_numbers_that_are_not_finite_are_written_as_zero():
    pages = torch.ones(2, 1, 2, BLOCK, 1, 3)
    k = torch.tensor([[[math.nan, math.inf, 2.0]]])
    write_kv(pages, write_rows(torch.tensor([BLOCK + 2]), 1, BLOCK)[0], k, -k)
    assert pages[1, 0, 0, 2, 0].tolist() == [0, 0, 2] and pages[1, 0, 1, 2, 0].tolist() == [0, 0, -2]


def test_pages_in_half_precision_are_read_as_the_type_of_the_queries():
    rows = Rows(MIXES["everything"])
    want = rows.attention(0.3)
    rows.pages = rows.pages.bfloat16()
    got = rows.attention(0.3)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want, atol=3e-2, rtol=0)
