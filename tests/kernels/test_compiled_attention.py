"""The compiled attention of a CPU over pages of every type and heads of every size, in every variant: against torch's
attention in float64 over the numbers that the pages hold, and bit for bit against itself in other company."""

import math
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from kernels.cpu import bodies
from kernels.cpu.library import usable
from kernels.cpu.pages import from_native, to_native
from kernels.cpu.program import Team
from kernels.page_codes import decode, vector_bytes

LAYERS, LAYER = 2, 1
TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8)
POISON = 12345.0


@pytest.fixture(scope="module", params=usable())
def team(request):
    made = Team(request.param, 2)
    yield made
    made.close()


def eight_bits(x):
    """[…, dim] → […, dim + 4] int8: whole numbers of the largest over 127, and that as a float32."""
    scale = (x.abs().amax(-1, keepdim=True) / 127).float()
    whole = torch.where(scale > 0, x / scale, 0.0).round().clamp(-127, 127).to(torch.int8)
    return torch.cat((whole, scale.contiguous().view(torch.int8)), -1)


def four_bits(x):
    """[…, dim] → […, bytes] uint8: 16 steps from the smallest to the largest of each 32 dims, written out per group."""
    codes, scales, minima = [], [], []
    for group in (x[..., at : at + 32].float() for at in range(0, x.shape[-1], 32)):
        scales.append(((group.amax(-1) - group.amin(-1)) / 15).half())
        minima.append(group.amin(-1).half())
        scale, least = scales[-1].float().unsqueeze(-1), minima[-1].float().unsqueeze(-1)
        codes.append(torch.where(scale > 0, (group - least) / scale, 0.0).round().clamp(0, 15))
    codes = torch.cat(codes, -1).to(torch.int16)
    packed = (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)
    return torch.cat((packed, torch.stack(scales + minima, -1).view(torch.uint8)), -1)


def from_four_bits(x, dim):
    codes = torch.stack((x[..., : dim // 2] % 16, x[..., : dim // 2] // 16), -1).flatten(-2).float()
    factors = x[..., dim // 2 :].contiguous().view(torch.float16).float()
    count = factors.shape[-1] // 2
    return torch.cat(
        [
            codes[..., 32 * i : 32 * i + 32] * factors[..., i : i + 1] + factors[..., count + i : count + i + 1]
            for i in range(count)
        ],
        -1,
    )


def in_pages(x, dtype):
    """Keys and values [.., dim] as pages hold them, and the numbers that they then are."""
    if dtype == torch.uint8:
        return (kept := four_bits(x)), from_four_bits(kept, x.shape[-1])
    kept = eight_bits(x) if dtype == torch.int8 else x.to(dtype)
    return kept, decode(kept) if dtype == torch.int8 else kept


class Rows:
    """Rows of (count, length) with queries for the last positions and pages for all positions.

    The values of a row depend on its length alone, not on other rows. Entries that no row may read are NaN."""

    def __init__(
        self, rows, *, heads=4, kv_heads=2, dim=32, dtype=torch.float32, block=16, window=None, chunk=None, causal=True
    ):
        self.rows, self.window, self.chunk, self.dim, self.causal = rows, window, chunk, dim, causal
        self.spans = None
        self.starts = list(accumulate((count for count, _ in rows), initial=0))
        q, self.kv = [], []
        blocks = [-(-length // block) for _, length in rows]
        self.table = torch.zeros(len(rows), max(blocks), dtype=torch.int64)
        nothing = torch.full((2, kv_heads, dim), math.nan)
        stored = in_pages(nothing.nan_to_num(3e38) if dtype in (torch.int8, torch.uint8) else nothing, dtype)[0]
        if dtype == torch.int8:
            stored[..., dim:] = torch.tensor([math.nan]).view(torch.int8)
        if dtype == torch.uint8:
            stored[..., dim // 2 :] = 255  # NaN in float16
        self.pages = stored[None, None, :, None].repeat(sum(blocks) + 1, LAYERS, 1, block, 1, 1)
        order = iter((torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(1)) + 1).tolist())
        for row, (count, length) in enumerate(rows):
            draw = torch.Generator().manual_seed(length)
            drawn = torch.randn((length, heads + 2 * kv_heads, dim), generator=draw)
            q.append(drawn[length - count :, :heads])
            kv = drawn[:, heads:].unflatten(1, (2, kv_heads))
            kv, numbers = in_pages(kv, dtype)
            self.kv.append(numbers.double())
            needed = 0 if window is None else max(0, length - count - window + 1)
            needed = needed if chunk is None else (length - count) // chunk * chunk
            for number in range(blocks[row]):
                if (number + 1) * block <= needed:
                    continue  # released: the null block, which is NaN
                self.table[row, number] = next(order)
                held = kv[number * block : (number + 1) * block]
                self.pages[self.table[row, number], LAYER, :, : len(held)] = held.transpose(0, 1)
        self.q = torch.cat(q)

    def attend(self, team, *, sinks=None, slopes=None, softcap=None, pages=None, biases=None, starts=None, cross=False):
        out = torch.full((len(self.q) + 1, *self.q.shape[1:]), POISON)
        count, length = torch.tensor(self.rows).T
        bodies.attention(
            *(team, self.q, self.pages if pages is None else pages, LAYER, self.table, torch.arange(len(self.rows))),
            *(torch.tensor(self.starts), length, out, self.dim**-0.5, self.window, softcap, sinks, slopes, self.chunk),
            *(biases, None if starts is None else torch.tensor(starts)),
            causal=self.causal and not cross,
            cross=cross,
            spans=None if self.spans is None else torch.tensor(self.spans),
        )
        assert (out[-1] == POISON).all()
        return out[:-1]

    def seen(self, row):
        count, length = self.rows[row]
        query, key = torch.arange(length - count, length)[:, None], torch.arange(length)
        near = (key - query).abs() < (self.window or length)
        if self.chunk is not None:
            near &= key // self.chunk == query // self.chunk
        if self.spans is not None:
            begins, ends = torch.tensor(self.spans[self.starts[row] : self.starts[row + 1]]).T[:, :, None]
            return (near & (key <= query)) | ((key >= begins) & (key < ends))
        return near & (key <= query) if self.causal else near

    def parts(self):
        """Yield q, k, v ([1, heads, …, dim] in float64) and the mask of each row."""
        for row, (begin, end) in enumerate(zip(self.starts, self.starts[1:], strict=False)):
            k, v = self.kv[row].permute(1, 2, 0, 3).unsqueeze(1)
            yield self.q[begin:end].double().transpose(0, 1).unsqueeze(0), k, v, self.seen(row)

    def torch(self):
        return torch.cat(
            [
                scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)[0].transpose(0, 1)
                for q, k, v, seen in self.parts()
            ]
        )

    def transformers(self, sinks):
        """gpt-oss's own attention."""
        groups = self.q.shape[1] // self.kv[0].shape[2]
        module = SimpleNamespace(num_key_value_groups=groups, sinks=sinks.double(), training=False)
        found = []
        for q, k, v, seen in self.parts():
            mask = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -math.inf)
            found.append(eager_attention_forward(module, q, k, v, mask, self.dim**-0.5)[0][0])
        return torch.cat(found)


def near(got, want, tolerance=2e-6):
    assert not got.isnan().any()
    assert (got.double() - want).abs().max() / want.abs().max() < tolerance


MIXED = [(1, 1), (1, 70), (6, 40), (33, 130), (1, 64), (17, 17)]


@pytest.mark.parametrize("window", [None, 1, 5, 65, 130])
@pytest.mark.parametrize("dim", [32, 40, 64])
@pytest.mark.sampled(4)
def test_bidirectional_rows_equal_torch(team, dim, window):
    """Test lengths near the sizes of a block, a chunk and a split; the rows do not affect each other."""
    lengths = (1, 2, 16, 17, 63, 64, 65, 130, 511, 513, 700)
    rows = Rows([(length, length) for length in lengths], dim=dim, heads=4, kv_heads=4, window=window, causal=False)
    got = rows.attend(team)
    near(got, rows.torch())
    for length in (1, 65, 513):
        alone = Rows([(length, length)], dim=dim, heads=4, kv_heads=4, window=window, causal=False)
        begin = rows.starts[lengths.index(length)]
        assert torch.equal(alone.attend(team), got[begin : begin + length])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("dim", "window"), [(32, None), (40, 70), (64, None)])
@pytest.mark.sampled(5)
def test_spans_equal_torch(team, dtype, dim, window):
    """The tokens of a span see one another; spans reach over chunks, splits and pieces of work. Rows without spans, and
    tokens beside them, are as they would be alone."""
    mixed = [(1, 70), (40, 90), (600, 620), (33, 33), (17, 130)]
    rows = Rows(mixed, dim=dim, window=window, dtype=dtype)
    plain = rows.attend(team)
    of_rows = {1: [(52, 60), (60, 83)], 2: [(25, 90), (500, 569)], 3: [(0, 33)]}
    rows.spans = [
        next((span for span in of_rows.get(row, ()) if span[0] <= at < span[1]), (0, 0))
        for row, (count, length) in enumerate(mixed)
        for at in range(length - count, length)
    ]
    got = rows.attend(team)
    near(got, rows.torch())
    lone = torch.tensor([span == (0, 0) for span in rows.spans])
    assert torch.equal(got[lone], plain[lone])
    assert not torch.equal(got[~lone], plain[~lone])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("dim", [32, 64, 80, 96, 112, 128, 192, 256, 24, 20, 3])
@pytest.mark.sampled(3)
def test_heads_of_every_size_equal_torch(team, dim, dtype):
    dim += -dim % 4 if dtype == torch.uint8 else 0  # a multiple of 4 in pages of 4 bits
    for heads, kv_heads, window, block in ((4, 2, None, 16), (14, 2, 50, 16), (3, 3, 7, 32), (7, 1, None, 5)):
        rows = Rows(MIXED, heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype, window=window, block=block)
        near(rows.attend(team), rows.torch())


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("chunk", "block"), [(33, 16), (64, 16), (520, 13), (1, 16)])
@pytest.mark.sampled(3)
def test_chunks_equal_torch(team, dtype, chunk, block):
    """A row's result does not depend on the other rows, nor on the step that computes it."""
    rows = [*MIXED, (1, 1100), (40, 530)]
    options = {"dtype": dtype, "chunk": chunk, "block": block}
    got = Rows(rows, **options).attend(team)
    near(got, Rows(rows, **options).torch())
    assert torch.equal(Rows([(1, 70)], **options).attend(team), got[1:2])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("window", "block"), [(None, 16), (40, 16), (None, 13)])
@pytest.mark.parametrize("share", [1, 7])
@pytest.mark.sampled(5)
def test_sinks_equal_transformers(team, dtype, window, block, share):
    rows = Rows([*MIXED, (1, 1100)], heads=2 * share, dim=64, dtype=dtype, window=window, block=block)
    sinks = torch.linspace(-4, 6, 2 * share)
    near(rows.attend(team, sinks=sinks), rows.transformers(sinks))


def test_infinite_sinks_have_no_weight_or_all_weight(team):
    rows = Rows([*MIXED, (1, 1100)], heads=4)
    none = torch.full((4,), -math.inf)
    assert torch.equal(rows.attend(team, sinks=none), rows.attend(team))
    assert (rows.attend(team, sinks=torch.full((4,), 1e30)) == 0).all()


def with_alibi(rows, slopes):
    """torch's attention with the bias as a mask, in float64."""
    found = []
    for row, (q, k, v, seen) in enumerate(rows.parts()):
        count, length = rows.rows[row]
        distance = torch.arange(length) - torch.arange(length - count, length).unsqueeze(1)
        mask = (slopes.double().view(-1, 1, 1) * distance).masked_fill(~seen, -math.inf)
        found.append(scaled_dot_product_attention(q, k, v, attn_mask=mask[None], enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(found)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("share", "dim", "block"), [(1, 64, 16), (7, 64, 16), (3, 20, 13)])
@pytest.mark.sampled(5)
def test_alibi_equals_torch(team, dtype, share, dim, block):
    """Also with several chunks and splits, whose positions do not begin at 0."""
    rows = Rows([*MIXED, (1, 1100), (3, 600)], heads=2 * share, dim=dim, dtype=dtype, block=block)
    slopes = 2.0 ** -torch.linspace(0, 8, 2 * share)
    near(rows.attend(team, slopes=slopes), with_alibi(rows, slopes))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("share", "dim", "block"), [(1, 64, 16), (7, 64, 16), (9, 24, 13)])
@pytest.mark.sampled(5)
def test_query_with_alibi_is_identical_in_any_chunk_and_batch(team, dtype, share, dim, block):
    options = {"heads": share, "kv_heads": 1, "dim": dim, "dtype": dtype, "block": block}
    slopes, length = 0.7 ** torch.arange(1.0, share + 1), 1345
    want = Rows([(1, length)], **options).attend(team, slopes=slopes)
    for count in (2, 8, 63, 200, length):
        assert torch.equal(Rows([(count, length)], **options).attend(team, slopes=slopes)[-1:], want), count
    company = Rows([(5, 5), (1, 700), (1, length), (300, 1000)], **options)
    assert torch.equal(company.attend(team, slopes=slopes)[6:7], want)


def biased(rows, biases, starts=None, cross=False):
    """torch's attention in float64. biases: [heads, 2 · reach + 1] or None. starts: of the keys of each row, or with
    `cross` their ends."""
    found, reach = [], 0 if biases is None else biases.shape[1] // 2
    for row, (q, k, v, seen) in enumerate(rows.parts()):
        count, length = rows.rows[row]
        distance = torch.arange(length) - torch.arange(length - count, length).unsqueeze(1)
        mask = torch.zeros(seen.shape) if biases is None else biases[:, distance.clamp(-reach, reach) + reach]
        if starts is not None:
            early = torch.arange(length) < starts[row]
            seen = early.expand(seen.shape) if cross else seen & ~early
        mask = mask.double().masked_fill(~seen, -math.inf)
        found.append(scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(found)


def drawn_biases(heads, reach):
    return torch.randn((heads, 2 * reach + 1), generator=torch.Generator().manual_seed(reach))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("share", "dim", "block", "reach"), [(1, 64, 16, 128), (7, 64, 16, 1), (3, 20, 13, 21)])
@pytest.mark.sampled(5)
def test_biases_of_distances_equal_torch(team, dtype, share, dim, block, reach):
    """Rows have several chunks and splits, and distances beyond the table."""
    rows = Rows([*MIXED, (1, 1100), (3, 600)], heads=2 * share, dim=dim, dtype=dtype, block=block)
    biases = drawn_biases(2 * share, reach)
    near(rows.attend(team, biases=biases), biased(rows, biases))


@pytest.mark.parametrize(("dim", "reach"), [(40, 9), (64, 700)])
def test_biases_of_bidirectional_rows_equal_torch(team, dim, reach):
    rows = Rows([(length, length) for length in (1, 17, 65, 130, 511, 700)], dim=dim, causal=False)
    biases = drawn_biases(4, reach)
    near(rows.attend(team, biases=biases), biased(rows, biases))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize(("dim", "block"), [(64, 16), (20, 13)])
@pytest.mark.sampled(3)
def test_rows_with_an_encoder_input_read_their_part_of_the_pages(team, dtype, cross, dim, block):
    """Self-attention reads the reply, and cross-attention reads the encoder input."""
    rows = Rows([(1, 2), (1, 70), (6, 40), (33, 130), (1, 64), (17, 18), (1, 1300), (9, 700)], dim=dim, block=block,
                dtype=dtype)  # fmt: skip
    starts = [1, 63, 3, 97, 13, 1, 1100, 65]
    near(rows.attend(team, starts=starts, cross=cross), biased(rows, None, starts, cross))


@pytest.mark.parametrize("cross", [False, True])
def test_query_with_biases_and_an_encoder_input_is_identical_in_any_chunk_and_batch(team, cross):
    options, length = {"heads": 3, "kv_heads": 1, "dim": 24, "block": 13}, 1345
    more = {"biases": None if cross else drawn_biases(3, 50), "cross": cross}
    want = Rows([(1, length)], **options).attend(team, starts=[700], **more)
    for count in (2, 63, 645):
        assert torch.equal(Rows([(count, length)], **options).attend(team, starts=[700], **more)[-1:], want), count
    company = Rows([(5, 5), (1, 700), (1, length), (300, 1000)], **options)
    assert torch.equal(company.attend(team, starts=[0 + cross, 9, 700, 20], **more)[6:7], want)


def test_slopes_of_zero_change_nothing(team):
    rows = Rows([*MIXED, (1, 1100)], heads=4)
    assert torch.equal(rows.attend(team, slopes=torch.zeros(4)), rows.attend(team))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("share", "dim", "block", "window"), [(2, 64, 16, None), (7, 64, 16, 600), (9, 24, 13, None)])
@pytest.mark.sampled(5)
def test_query_is_identical_in_any_chunk_and_batch(team, dtype, share, dim, block, window):
    """Decoded in splits by itself, at the end of chunks of every size, and among others: bit for bit."""
    options = {"heads": share, "kv_heads": 1, "dim": dim, "dtype": dtype, "block": block, "window": window}
    sinks, length = torch.linspace(0, 3, share), 1345
    alone = Rows([(1, length)], **options)
    want = alone.attend(team, sinks=sinks)
    near(want, alone.transformers(sinks))
    for count in (2, 8, 63, 200, length):
        assert torch.equal(Rows([(count, length)], **options).attend(team, sinks=sinks)[-1:], want), count
    company = Rows([(5, 5), (1, 700), (1, length), (300, 1000)], **options)
    assert torch.equal(company.attend(team, sinks=sinks)[6:7], want)
    single = Team(team.variant, 1)
    assert torch.equal(alone.attend(single, sinks=sinks), want)
    single.close()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("block", [1, 3, 16])
def test_page_layout_round_trip(dtype, block):
    dim = 36 if dtype == torch.uint8 else 5
    pages = Rows([(1, 40)], dim=dim, dtype=dtype, block=block).pages
    native = to_native(pages)
    assert native.shape == pages.shape and native.dtype == dtype
    assert torch.equal(from_native(native).view(torch.int8), pages.view(torch.int8))
    bytes_of = native[3, LAYER, :].flatten(1).unflatten(1, (2, -1))  # [k or v, kv_heads, …] of one block
    size = dim // 2 if dtype == torch.uint8 else dim
    keys = bytes_of[0, :, : size * block].unflatten(1, (size, block))
    values = bytes_of[1, :, : size * block].unflatten(1, (block, size))
    assert torch.equal(keys.permute(2, 0, 1), pages[3, LAYER, 0, ..., :size])
    assert torch.equal(values.transpose(0, 1), pages[3, LAYER, 1, ..., :size])


# Contents of pages of 8 and 4 bits.


def written(team, kv, block=4, dtype=torch.int8):
    """kv: [2, tokens, kv_heads, dim] → the same as pages of 8 or 4 bits hold it, [2, tokens, kv_heads, bytes]."""
    _, tokens, kv_heads, dim = kv.shape
    blocks = -(-tokens // block) + 2
    pages = torch.full((blocks, 1, 2, block, kv_heads, vector_bytes(dim, dtype)), 77, dtype=dtype)
    qkv = torch.cat((torch.zeros(tokens, 1, dim), *kv), 1)
    bodies.qk_norm_rope_kv(team, qkv, pages, 0, torch.arange(tokens) + block, 1, None, "rms", 0.0, None, None, False)
    assert (pages[0] == 77).all() and (pages[-1] == 77).all()
    return pages[1:-1, 0].transpose(0, 1).flatten(1, 2)[:, :tokens]


@pytest.mark.parametrize("dim", [3, 24, 64])
def test_keys_and_values_are_quantized_by_their_own_maximum(team, dim):
    draw = torch.Generator().manual_seed(dim)
    kv = torch.randn((2, 9, 2, dim), generator=draw) * 10.0 ** torch.randint(-20, 20, (2, 9, 2, 1), generator=draw)
    found = written(team, kv)
    scales = found[..., dim:].contiguous().view(torch.float32)
    torch.testing.assert_close(scales, kv.abs().amax(-1, keepdim=True) / 127, rtol=1e-6, atol=0)
    assert ((decode(found) - kv).abs() <= 0.5001 * scales).all()
    assert (found[..., :dim].abs().amax(-1) == 127).all()


@pytest.mark.parametrize("dim", [4, 24, 64, 80])
def test_groups_of_keys_and_values_are_quantized_between_their_own_ends(team, dim):
    draw = torch.Generator().manual_seed(dim)
    kv = torch.randn((2, 9, 2, dim), generator=draw) * 10.0 ** torch.randint(-2, 3, (2, 9, 2, dim), generator=draw)
    kv[:, 3], kv[:, 4] = 0.25, 0.0  # all of a group the same
    found = written(team, kv, dtype=torch.uint8)
    want = four_bits(kv)
    # a tie may fall either way, where the inverse of a scale is rounded
    assert ((found.int() - want.int()).abs() <= 16).all() and (found != want).float().mean() < 0.005
    assert torch.equal(found[..., dim // 2 :], want[..., dim // 2 :])
    assert torch.equal(decode(found), from_four_bits(found, dim))
    assert torch.equal(decode(found)[:, 3:5], kv[:, 3:5])


def test_extreme_and_nonfinite_values_are_finite_in_4_bits(team):
    kv = torch.ones(2, 5, 1, 4)
    kv[:, 0], kv[:, 1], kv[:, 2] = 0.0, 1e-40, 3e38
    kv[:, 3, 0] = torch.tensor([math.nan, math.inf, -math.inf, 2.0])
    kv[:, 4, 0] = torch.tensor([-3e38, 3e38, 0.0, 1.0])
    got = decode(written(team, kv, dtype=torch.uint8))
    assert (got[:, :2] == 0).all() and got.isfinite().all() and got.half().isfinite().all()
    assert torch.equal(got[:, 2], torch.full((2, 1, 4), 32768.0))
    torch.testing.assert_close(got[:, 3, 0], torch.tensor([0.0, 0.0, 0.0, 2.0]).expand(2, 4), rtol=1e-3, atol=0)


def test_extreme_and_nonfinite_values_are_stored_finite(team):
    kv = torch.ones(2, 5, 1, 4)
    kv[:, 0], kv[:, 1], kv[:, 2] = 0.0, 1e-40, 3e38
    kv[:, 3, 0] = torch.tensor([math.nan, math.inf, -math.inf, 2.0])
    got = decode(written(team, kv))
    assert (got[:, :2] == 0).all() and got.isfinite().all()
    torch.testing.assert_close(got[:, 2], kv[:, 2])
    assert torch.equal(got[:, 3, 0], torch.tensor([0.0, 0.0, 0.0, 2.0]).expand(2, 4))


def test_pages_of_a_type_without_kernels_are_refused(team):
    pages = torch.zeros(2, 1, 2, 4, 1, 8, dtype=torch.float8_e4m3fn)
    with pytest.raises(NotImplementedError, match="int8"):
        Rows([(1, 3)], heads=1, kv_heads=1, dim=8, block=4).attend(team, pages=pages)
