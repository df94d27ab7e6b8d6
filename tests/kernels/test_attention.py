"""Compare attention kernels with float64 attention, one query at a time. Page entries that no row may read are NaN.

test_ops.py checks each operation alone; here are random steps that mix decode rows, prefill rows and padding, and
checks of the memory that a step must not change.
"""

import random
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import accumulate

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels.attention import decode as decode_module
from kernels.attention import schedule as schedule_module
from kernels.attention.decode import DECODE_ATTENTION
from kernels.attention.encoder import ENCODER_ATTENTION
from kernels.attention.prefill import PREFILL_ATTENTION
from kernels.attention.schedule import DECODE_SCHEDULE, decode_items, split_keys
from kernels.jit import installed, recorded
from kernels.op import Make
from kernels.tuning import forced
from tests.tiers import thinned

pytestmark = [pytest.mark.skipif(not installed(), reason="Triton is not installed")]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LAYERS, LAYER = 3, 1
UNTOUCHED = 123.0
NAN = float("nan")
# Splits and tiles of a size that a few hundred keys have many of.
SMALL = {
    "decode_schedule": {"base": 16},
    "decode_attention": {"tile": 16},
    "prefill_attention": {"block": 64, "tile": 32},
}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Memory that an operation asks for holds NaN."""
    empty = torch.empty

    def full(*shape, **options):
        made = empty(*shape, **options)
        return made.fill_(NAN) if made.is_floating_point() else made.fill_(-1)

    monkeypatch.setattr(torch, "empty", full)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(schedule_module, "COUNTED", 16)
    with ExitStack() as stack:
        for op, values in SMALL.items():
            stack.enter_context(forced(op, values))
        yield


@dataclass
class Step:
    """Rows of (tokens to compute, length), the keys and values of all positions, and pages with those still in use."""

    rows: list
    heads: int = 4
    kv_heads: int = 2
    dim: int = 32
    block_tokens: int = 4
    window: int | None = None
    softcap: float | None = None
    with_sinks: bool = False
    alibi: bool = False
    reach: int = 0  # of the biases; 0: there are none
    spans: tuple = ()  # row, begin, end
    key_starts: tuple = ()  # start position of each row, or empty
    dtype: torch.dtype = torch.float32
    fp8: bool = False
    padding: int = 0  # padding tokens after the rows
    seed: int = 0
    scale: float = field(init=False)

    def __post_init__(self):
        make = Make(torch.device("cpu"), self.dtype, self.seed)
        self.scale = 0.7 * self.dim**-0.5
        self.k_scale, self.v_scale = (0.25, 3.0) if self.fp8 else (1.0, 1.0)
        stored = torch.float8_e4m3fn if self.fp8 else self.dtype
        self.starts = list(accumulate((count for count, _ in self.rows), initial=0))
        tokens = self.starts[-1] + self.padding
        self.q = make.normal(tokens, self.heads, self.dim)
        self.sinks = make.normal(self.heads, dtype=torch.float32) if self.with_sinks else None
        self.slopes = 2.0 ** -torch.linspace(0, 8, self.heads) if self.alibi else None
        self.biases = make.normal(self.heads, 2 * self.reach + 1, dtype=torch.float32) if self.reach else None
        self.kv = [make.normal(2, length, self.kv_heads, self.dim).to(stored) for _, length in self.rows]
        for kv, begin in zip(self.kv, self.key_starts, strict=bool(self.key_starts)):
            kv[:, :begin] = 200.0  # another attention's: numbers, and large
        size = self.block_tokens
        blocks = sum(-(-length // size) for _, length in self.rows)
        slots = len(self.rows) + 2
        width = max((-(-length // size) for _, length in self.rows), default=0) + 3
        free = (make.permutation(blocks + 2) + 1).tolist()
        nobody = free.pop()
        pages = torch.full((blocks + 3, LAYERS, 2, size, self.kv_heads, self.dim), NAN)
        pages[0] = 55.0  # of released blocks: read with weight 0, so finite (`make_pages`)
        self.table = torch.full((slots, width), nobody, dtype=torch.int32)
        self.slot = make.permutation(slots)[: len(self.rows)]
        for (count, length), slot, kv in zip(self.rows, self.slot.tolist(), self.kv, strict=True):
            needed = 0 if self.window is None or self.spans else max(0, length - count - self.window + 1)
            for block in range(-(-length // size)):
                if (block + 1) * size <= needed:
                    self.table[slot, block] = 0  # released
                    continue
                self.table[slot, block] = free.pop()
                held = kv[:, block * size : (block + 1) * size].float()
                pages[self.table[slot, block], LAYER] = 55.0  # entries after the end of a row are stale but finite
                pages[self.table[slot, block], LAYER, :, : held.shape[1]] = held
        self.pages = pages.to(stored)
        self.query_start = torch.tensor(self.starts, dtype=torch.int32)
        self.lengths = torch.tensor([length for _, length in self.rows], dtype=torch.int32)
        self.begin_of = torch.tensor(self.key_starts, dtype=torch.int32) if self.key_starts else None
        self.span_of = torch.zeros((tokens, 2), dtype=torch.int32)
        for row, begin, end in self.spans:
            first = self.starts[row] + begin - (self.rows[row][1] - self.rows[row][0])
            self.span_of[first : first + end - begin] = torch.tensor([begin, end], dtype=torch.int32)

    def on(self, tensor):
        return None if tensor is None else tensor.to(DEVICE)

    def out(self):
        return torch.full(self.q.shape, UNTOUCHED, dtype=self.dtype, device=DEVICE)

    def given(self):
        return tuple(
            self.on(x) if isinstance(x, torch.Tensor) else x
            for x in (self.q, self.pages, LAYER, self.table, self.slot, self.query_start, self.lengths)
        )

    def schedule(self):
        rows = self.on(self.query_start), self.on(self.lengths)
        return DECODE_SCHEDULE(*rows, self.kv_heads, self.window, self.on(self.begin_of))

    def decode(self, out=None, schedule=None):
        out = self.out() if out is None else out
        options = (self.scale, self.window, self.softcap, self.on(self.sinks), self.k_scale, self.v_scale)
        schedule = self.schedule() if schedule is None else schedule
        last = self.on(self.begin_of), self.on(self.slopes), None, self.on(self.biases)
        (same,) = DECODE_ATTENTION(*self.given(), schedule, out, *options, *last)
        assert same is out
        return out

    def prefill(self, out=None):
        out = self.out() if out is None else out
        spans = self.on(self.span_of) if self.spans else None
        options = (self.scale, self.window, self.softcap, self.on(self.sinks), spans, self.k_scale, self.v_scale)
        last = self.on(self.begin_of), self.on(self.slopes), None, self.on(self.biases)
        (same,) = PREFILL_ATTENTION(*self.given(), out, *options, *last)
        assert same is out
        return out

    def wanted(self):
        """Return the expected output, computed one query at a time in float64. Other entries stay unchanged."""
        out = self.out().cpu().double()
        group = self.heads // self.kv_heads
        for row, (count, length) in enumerate(self.rows):
            k, v = (x.repeat_interleave(group, 1) for x in self.kv[row].double())
            key = torch.arange(length)
            for i in range(count):
                token, position = self.starts[row] + i, length - count + i
                begin, end = self.span_of[token].tolist()
                seen = (key <= position) & (key > position - (self.window or length))
                seen |= (key >= begin) & (key < end)
                seen &= key >= (self.key_starts[row] if self.key_starts else 0)
                scores = torch.einsum("hd,lhd->lh", self.q[token].double(), k[seen] * self.k_scale) * self.scale
                if self.softcap is not None:
                    scores = torch.tanh(scores / self.softcap) * self.softcap
                if self.slopes is not None:
                    scores += (key[seen] - position).unsqueeze(1) * self.slopes.double()
                if self.biases is not None:
                    near = (key[seen] - position).clamp(-self.reach, self.reach)
                    scores += self.biases.double().T[near + self.reach]
                weights = scores.exp()
                sink = 0.0 if self.sinks is None else self.sinks.double().exp()
                total = (weights.sum(0) + sink).unsqueeze(1)
                out[token] = torch.einsum("lh,lhd->hd", weights, v[seen] * self.v_scale) / total
        return out


def close(got, want, dtype=torch.float32):
    allowed = {torch.float32: 2e-5, torch.float16: 1e-2}[dtype]
    got = got.cpu().double()
    assert not got.isnan().any()
    error = (got - want).abs() / want.abs().clamp(min=1.0)
    most = float(error.max()) if error.numel() else 0.0
    assert most < allowed, f"differs by {most:.2g}"


def drawn(seed, kinds, begun=False, alibi=False, reach=0):
    """A step of rows of these kinds, with everything else drawn. begun: a row may begin anywhere up to its first
    token."""
    draw = random.Random(seed)
    rows = []
    for kind in kinds(draw):
        length = draw.choice((1, 2, 15, 16, 17, 40, 129, draw.randrange(1, 150)))
        count = {"padded": 0, "decode": 1, "prefill": draw.randrange(2, max(3, min(40, length + 1)))}[kind]
        rows.append((count, 0) if kind == "padded" else (count, max(length, count)))
    key_starts = ()
    if begun:
        places = [(0, length - count, draw.randrange(length - count + 1)) for count, length in rows]
        key_starts = tuple(map(draw.choice, places))
    return Step(
        rows,
        key_starts=key_starts,
        kv_heads=(kv_heads := draw.choice((1, 2, 3))),
        heads=kv_heads * draw.choice((1, 2, 3, 4, 7, 8, 16)),
        dim=draw.choice((32, 64, 80, 96, 112, 128, 192, 256)),
        block_tokens=draw.choice((1, 3, 16, 32)),
        window=draw.choice((None, None, 1, 5, 33, 1000)),
        softcap=draw.choice((None, None, 2.0)),
        with_sinks=draw.random() < 0.4,
        alibi=alibi,
        reach=reach,
        fp8=draw.random() < 0.2,
        padding=draw.choice((0, 3)),
        seed=seed,
    )


def mixed(draw):
    return [draw.choice(("decode", "prefill", "padded")) for _ in range(draw.randrange(1, 6))]


@pytest.mark.parametrize("seed", thinned(range(20), range(5)))
def test_mixed_step_equals_attention_per_query(seed, small):
    step = drawn(seed, mixed)
    close(step.prefill(step.decode()), step.wanted())


@pytest.mark.parametrize("seed", thinned(range(300, 312), range(300, 303)))
def test_bias_of_alibi_is_added_in_a_mixed_step(seed, small):
    step = drawn(seed, mixed, begun=seed % 3 == 0, alibi=True)
    close(step.prefill(step.decode()), step.wanted())


@pytest.mark.parametrize("seed", thinned(range(400, 412), range(400, 403)))
def test_biases_of_distances_are_added_in_a_mixed_step(seed, small):
    step = drawn(seed, mixed, begun=seed % 2 == 0, reach=(1, 20, 128, 1000)[seed % 4])
    close(step.prefill(step.decode()), step.wanted())


@pytest.mark.parametrize("seed", thinned(range(200, 212), range(200, 203)))
def test_row_reads_no_key_before_its_start(seed, small):
    step = drawn(seed, mixed, begun=True)
    close(step.prefill(step.decode()), step.wanted())


@pytest.mark.parametrize("seed", range(100, 104))
def test_decode_writes_only_rows_of_one_token_and_prefill_only_the_others(seed, small):
    step = drawn(seed, lambda draw: ["decode", "padded", "prefill", "decode", "prefill"])
    single = torch.zeros(step.q.shape[0], dtype=torch.bool)
    several = single.clone()
    for (count, _), start in zip(step.rows, step.starts, strict=False):
        (single if count == 1 else several)[start : start + count] = True
    decoded, prefilled = step.decode().cpu(), step.prefill().cpu()
    assert (decoded[~single] == UNTOUCHED).all() and (decoded[single] != UNTOUCHED).all()
    assert (prefilled[~several] == UNTOUCHED).all() and (prefilled[several] != UNTOUCHED).all()


@pytest.mark.parametrize(("dim", "heads", "kv_heads"), [(64, 7, 1), (128, 8, 2), (256, 2, 2), (96, 40, 1)])
def test_lengths_around_tile_boundaries(dim, heads, kv_heads):
    rows = [(1, 64), (1, 129), (3, 65), (66, 66), (1, 257)]
    step = Step(rows, heads=heads, kv_heads=kv_heads, dim=dim, block_tokens=16, window=70, with_sinks=True)
    close(step.prefill(step.decode()), step.wanted())


@pytest.mark.parametrize("fp8", [False, True])
def test_half_precision(fp8):
    step = Step([(1, 70), (40, 90)], dim=64, heads=6, block_tokens=16, dtype=torch.float16, fp8=fp8)
    close(step.prefill(step.decode()), step.wanted(), torch.float16)


def test_all_8_bit_codes_are_read_exactly():
    """A row of one key is its value, whatever the scores."""
    step = Step([(1, 1)], heads=1, kv_heads=1, dim=256, block_tokens=1, fp8=True)
    codes = torch.arange(256, dtype=torch.uint8)
    codes[[127, 255]] = 0  # no numbers
    step.pages[step.table[step.slot[0], 0], LAYER] = codes.view(torch.float8_e4m3fn).view(1, 1, 1, 256)
    want = codes.view(torch.float8_e4m3fn).float() * step.v_scale
    assert torch.equal(step.decode().cpu().view(-1), want)
    step = Step([(2, 2)], heads=1, kv_heads=1, dim=256, block_tokens=1, fp8=True, window=1)
    for block in range(2):
        step.pages[step.table[step.slot[0], block], LAYER] = codes.view(torch.float8_e4m3fn).view(1, 1, 1, 256)
    assert torch.equal(step.prefill().cpu().view(2, -1), want.expand(2, -1))


def test_against_torch():
    step = Step([(1, 300), (150, 150), (40, 230)], heads=8, kv_heads=2, dim=64, block_tokens=16)
    got = step.prefill(step.decode()).cpu()
    for (count, length), start, kv in zip(step.rows, step.starts, step.kv, strict=False):
        query = step.q[start : start + count].transpose(0, 1)
        k, v = kv.transpose(1, 2)
        mask = torch.ones(count, length, dtype=torch.bool).tril(length - count)
        want = scaled_dot_product_attention(query, k, v, attn_mask=mask, scale=step.scale, enable_gqa=True)
        close(got[start : start + count], want.transpose(0, 1).double())


@pytest.mark.parametrize("window", [None, 25])
def test_tokens_of_a_span_see_each_other_both_ways(window, small):
    spans = ((0, 41, 47), (0, 60, 99), (1, 2, 9), (1, 9, 12))
    step = Step([(60, 100), (12, 12), (3, 5)], spans=spans, window=window, heads=6, with_sinks=True)
    close(step.prefill(), step.wanted())


@pytest.mark.parametrize("window", [None, 25])
def test_span_is_clipped_at_the_start_of_its_row(window, small):
    spans = ((0, 41, 47), (0, 60, 99), (1, 9, 12))
    step = Step([(60, 100), (12, 20), (3, 5)], spans=spans, key_starts=(40, 8, 2), window=window, heads=6)
    step.span_of[:6, 0] = 12  # from before 40
    close(step.prefill(), step.wanted())


def test_keys_before_the_start_have_no_effect(small):
    """Bit for bit, whatever keys and values are there."""
    rows, key_starts = [(1, 90), (40, 130), (1, 300), (7, 64)], (41, 77, 13, 57)
    step = Step(rows, key_starts=key_starts, block_tokens=16, with_sinks=True)
    want = step.prefill(step.decode())
    for slot, begin in zip(step.slot.tolist(), key_starts, strict=True):
        for position in range(begin):
            step.pages[step.table[slot, position // 16], LAYER, :, position % 16] = -7.0 * position
    assert torch.equal(step.prefill(step.decode()), want)


def test_row_without_keys_is_not_written(small):
    step = Step([(1, 40), (1, 17), (1, 0), (1, 33)], key_starts=(40, 16, 0, 50))
    out = step.decode()
    assert (out[[0, 2, 3]] == UNTOUCHED).all()
    close(out[1], step.kv[1][1, 16].repeat_interleave(2, 0).double())


def test_single_token_rows_may_share_a_block_table(small):
    """So do a decoder's tokens read their source: all of it, each by itself."""
    sources = Step([(1, 150), (1, 40)], block_tokens=16, heads=6)
    want, lines = sources.decode(), sources.slot
    order = [0, 0, 1, 0, 1]
    sources.slot = lines[order]
    sources.query_start = torch.arange(6, dtype=torch.int32)
    sources.lengths = sources.lengths[order]
    sources.q = sources.q[order]
    assert torch.equal(sources.decode(), want[order])


OPTIONS = (
    {"heads": 2},
    {"heads": 2, "window": 45, "with_sinks": True, "dim": 80},
    {"heads": 3, "softcap": 2.0},
    {"heads": 2, "fp8": True, "dim": 96, "dtype": torch.float16, "with_sinks": True},
    {"heads": 3, "alibi": True},
)


LONG_ROWS = [(1, 200)] * 3 + [(1, 300)] + [(1, 210)] * 3 + [(1, 30)]


BEGUN = (*OPTIONS, {"heads": 2, "begun": True}, {"heads": 2, "begun": True, "window": 45, "with_sinks": True})


@pytest.mark.parametrize("extra", BEGUN, ids="-".join)
@pytest.mark.sampled(2)
def test_decode_row_is_identical_in_any_step(extra, small):
    """Alone it is cut up into splits, which a second kernel sums up; among long rows a chunk is one item."""
    extra = dict(extra)
    key_starts = (0, 3, 7, 37, 1, 2, 20, 13) if extra.pop("begun", False) else ()
    step = Step(LONG_ROWS, block_tokens=16, kv_heads=1, key_starts=key_starts, **extra)
    together = step.decode().cpu()
    step.rows = [row if number in (3, 7) else (0, 0) for number, row in enumerate(LONG_ROWS)]
    step.query_start = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 2], dtype=torch.int32)
    step.q = step.q[[3, 7]]
    apart = step.decode().cpu()
    assert torch.equal(together[[3, 7]], apart)
    assert not (together == UNTOUCHED).any()


def test_long_rows_have_both_kinds_of_items(small):
    together = items_of(Step(LONG_ROWS, kv_heads=1).schedule(), 8)[0]
    alone = items_of(Step([LONG_ROWS[3]], kv_heads=1).schedule(), 1)[0]
    assert [end - begin for row, begin, end, _ in together if row == 3] == [256, 44]
    assert [end - begin for _, begin, end, _ in alone] == [32] * 9 + [12]


def test_number_of_programs_does_not_change_the_result(small, monkeypatch):
    step = Step([(1, 150), (1, 300), (1, 9)], kv_heads=1, block_tokens=16, with_sinks=True)
    schedule = step.schedule()
    outs = []
    for programs in (1, 7):
        monkeypatch.setattr(decode_module, "resident_programs", lambda device, each, programs=programs: programs)
        outs.append(step.decode(schedule=schedule))
    assert torch.equal(*outs)


def test_one_schedule_serves_several_layers(small):
    step = Step([(1, 150), (1, 40)], block_tokens=16)
    schedule = step.schedule()
    before = schedule.clone()
    first = step.decode(schedule=schedule)
    assert torch.equal(schedule, before)
    assert torch.equal(step.decode(schedule=schedule), first)


@pytest.mark.parametrize("extra", BEGUN, ids="-".join)
@pytest.mark.sampled(2)
def test_chunked_prompt_equals_the_prompt_in_one_step(extra, small):
    extra = dict(extra)
    begin = 37 if extra.pop("begun", False) else 0
    key_starts = (begin, 137) if begin else ()
    whole = Step([(97, begin + 97), (3, 140)], block_tokens=16, kv_heads=1, key_starts=key_starts, **extra)
    at_once = whole.prefill().cpu()
    done = 0
    for count in (40, 2, 55):
        chunk = Step([(97, begin + 97), (3, 140)], block_tokens=16, kv_heads=1, key_starts=key_starts, **extra)
        chunk.q, chunk.rows = whole.q[done : done + count], [(count, begin + done + count)]
        chunk.query_start = torch.tensor([0, count], dtype=torch.int32)
        chunk.lengths = torch.tensor([begin + done + count], dtype=torch.int32)
        chunk.begin_of = None if whole.begin_of is None else whole.begin_of[:1]
        chunk.pages, chunk.table, chunk.slot = whole.pages, whole.table, whole.slot[:1]
        got = chunk.prefill().cpu()
        assert torch.equal(got, at_once[done : done + count]), f"tokens {done} to {done + count}"
        done += count


def test_strided_rows_of_a_fused_buffer_are_read_in_place(small):
    step = Step([(1, 50), (20, 33)], block_tokens=16)
    want = step.prefill(step.decode())
    fused = torch.full((21, 8 * 32), NAN, device=DEVICE)
    fused[:, 64:192] = step.on(step.q).flatten(1)
    step.q = fused[:, 64:192].unflatten(1, (4, 32))
    wide = torch.full((21, 300), UNTOUCHED, device=DEVICE)
    out = wide[:, :128].unflatten(1, (4, 32))
    assert torch.equal(step.prefill(step.decode(out)), want)
    assert (wide[:, 128:] == UNTOUCHED).all()


# The split-KV schedule.


def items_of(schedule, rows):
    schedule = schedule.cpu()
    count, several = schedule[0, :2].tolist()
    return schedule[1 + rows : 1 + rows + count].tolist(), schedule[1 : 1 + several].tolist()


@pytest.mark.parametrize("seed", thinned(range(8), range(4)))
def test_items_cover_each_key_of_a_row_once_and_in_order(seed, monkeypatch):
    monkeypatch.setattr(schedule_module, "COUNTED", 16)
    draw = random.Random(seed)
    rows = draw.choice((1, 16, 17, 25))
    counts = [draw.choice((1, 1, 1, 1, 0, 5)) for _ in range(rows)]
    longest = draw.choice((100, 5000, 200000))
    lengths = [draw.randrange(1, longest) if count else 0 for count in counts]
    window = draw.choice((None, 128, 4096))
    kv_heads = draw.choice((1, 2, 8))
    start = torch.tensor(list(accumulate(counts, initial=0)), dtype=torch.int32, device=DEVICE)
    from_where = [0] * rows
    first = None
    if seed % 2:
        from_where = [draw.choice((0, length - 1, draw.randrange(length))) if length else 9 for length in lengths]
        first = torch.tensor(from_where, dtype=torch.int32, device=DEVICE)
    schedule = DECODE_SCHEDULE(start, torch.tensor(lengths, dtype=torch.int32, device=DEVICE), kv_heads, window, first)
    items, several = items_of(schedule, rows)
    assert len(items) <= decode_items(rows, kv_heads, DEVICE)
    base = 256 if kv_heads > 2 else 128
    mine = {}
    for number, (row, begin, end, split) in enumerate(items):
        mine.setdefault(row, []).append((number, begin, end, split))
    assert sorted(mine) == [row for row, count in enumerate(counts) if count == 1]
    merged = {row: rest for row, *rest in several}
    for row, parts in mine.items():
        numbers, starts, ends, splits = zip(*parts, strict=True)
        there = lengths[row] - from_where[row]
        keys = min(there, window or there)
        split, chunk, _ = split_keys(keys, base)
        assert set(splits) == {split}
        assert starts[0] == lengths[row] - keys and ends[-1] == lengths[row]
        assert list(starts[1:]) == list(ends[:-1]), "no gap, no key twice"
        assert list(numbers) == list(range(numbers[0], numbers[0] + len(numbers)))
        sizes = {end - begin for begin, end in zip(starts[:-1], ends[:-1], strict=True)}
        assert len(sizes) <= 1 and sizes <= {split, split * chunk}
        if len(parts) == 1:
            assert row not in merged
        else:
            each = merged[row][2]
            assert merged[row] == [numbers[0], len(parts), each]
            assert sizes == {split * chunk // each}, "so many items are a chunk"


@pytest.mark.parametrize("keys", [1, 4096, 4097, 32768, 65536, 65537, 131072, 1 << 20, 1 << 24])
def test_a_row_has_at_most_128_splits_and_8_chunks(keys):
    split, chunk, splits = split_keys(keys, 256)
    assert split % 256 == 0 and (splits - 1) * split < keys <= splits * split
    assert splits <= 128 and -(-splits // chunk) <= 8
    assert split == 256 or splits > 8, "no split is longer than it has to be"


def test_single_row_is_split_among_all_programs(monkeypatch):
    monkeypatch.setattr(schedule_module, "resident_programs", lambda device, each: 132 * each)
    start, length = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([0, 1], [100000]))
    items, several = items_of(DECODE_SCHEDULE(start, length, 8, None), 1)
    assert len(items) == 98 and several == [[0, 0, 98, 13]]


def test_a_step_without_rows_has_no_items():
    start = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    schedule = DECODE_SCHEDULE(start, torch.zeros(0, dtype=torch.int32, device=DEVICE), 8, None)
    assert schedule[0].tolist() == [0, 0, 0, 0]


# Encoders.


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 9, 500])
@pytest.mark.sampled(3)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(2, 2, 32), (7, 1, 80)])
def test_encoders_against_torch(causal, window, heads, kv_heads, dim):
    make = Make(DEVICE, torch.float32, 3)
    lengths = (1, 7, 0, 64, 129)
    q, k, v = (make.normal(sum(lengths), count, dim) for count in (heads, kv_heads, kv_heads))
    start = make.tensor(list(accumulate(lengths, initial=0)))
    out = torch.full(q.shape, NAN, device=DEVICE)
    ENCODER_ATTENTION(q, k, v, start, out, dim**-0.5, causal, window)
    for first, count in zip(start.tolist(), lengths, strict=False):
        own = slice(first, first + count)
        mask = torch.ones(count, count, dtype=torch.bool, device=DEVICE)
        mask = mask.tril() if causal else mask
        if window:
            mask = mask.triu(1 - window).tril(window - 1)
        dense = (x[own].transpose(0, 1) for x in (q, k, v))
        want = scaled_dot_product_attention(*dense, attn_mask=mask, enable_gqa=True).transpose(0, 1)
        close(out[own], want.double().cpu())


# Rejected arguments, and checks that must not synchronize with the device


def test_window_below_one_is_rejected():
    step = Step([(1, 5), (3, 5)])
    for window in (0, -3):
        step.window = window
        for call in (step.decode, step.prefill, step.schedule):
            with pytest.raises(ValueError, match=f"window={window}"):
                call()
        with pytest.raises(ValueError, match=f"window={window}"):
            start = step.on(step.query_start)
            k = step.on(step.q[:, :2])
            ENCODER_ATTENTION(step.on(step.q), k, k, start, step.out(), 1.0, False, window)


def test_unsupported_arguments_are_rejected():
    step = Step([(3, 5)])
    good = step.pages
    for pages in (good.double(), good.transpose(3, 4), good[..., :16], good.expand(-1, -1, -1, -1, -1, -1)[:, :, :1]):
        step.pages = pages
        with pytest.raises(ValueError, match="pages"):
            step.prefill()
    step.pages = good
    step.q = step.q.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="q: the heads of a row must be contiguous"):
        step.prefill()
    with pytest.raises(ValueError, match="5 heads of q for 2 of keys"):
        Step([(1, 5)], heads=5).decode()


@pytest.mark.parametrize(
    "op", [DECODE_SCHEDULE, DECODE_ATTENTION, PREFILL_ATTENTION, ENCODER_ATTENTION], ids=lambda o: o.name
)
def test_launch_does_not_wait_for_the_device(op, monkeypatch):
    """Tensors without contents have no answer."""
    monkeypatch.undo()
    for case in op.cases:
        args = op.inputs(Make(torch.device("meta"), torch.bfloat16), **case.sizes)
        with recorded() as launches:
            op(*args)
        assert launches or case.id == "empty"
