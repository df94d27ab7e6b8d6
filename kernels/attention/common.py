"""Definition of the attention operations in torch, and parts that their Triton bodies share.

    out = softmax(c · tanh(scale · q kᵀ / c) + mask) v      (without `softcap` c: softmax(scale · q kᵀ + mask) v)

Position p sees positions max(begin, p - window + 1) … p, or with `chunk` positions max(begin, floor(p / chunk) · chunk)
… p, where `begin` is 0 or the row's element of `key_starts`. Earlier keys belong to another attention: in a decoder
with cross-attention, the keys of the encoder input precede the decoder's own keys. A head's sink is an additional logit
in the denominator with value zero (arXiv:2309.17453, learned as in gpt-oss). With `slopes` (ALiBi, arXiv:2108.12409),
the head's slope · (key - p) is added to the score of each key, after the softcap; with `biases` (T5, arXiv:1910.10683),
[heads, 2 · reach + 1], the head's bias for the distance key - p, which is limited to -reach … reach. Query heads come
in groups of heads / kv_heads that share keys and values. Pages: [blocks, layers, 2, block_tokens, kv_heads, dim]; in
float8_e4m3fn they hold x / k_scale and x / v_scale, in 8 or 4 bits codes and scales (kernels/page_codes.py).

In Triton the state of an unfinished softmax is (acc, top, total): sums of 2^(s - top) v and of 2^(s - top), where s is
the score times log2(e) and `top` the largest so far. The initial top is -1e30, because differences of -inf are NaN. All
products and sums that must be equal in several kernels are written as one `fma`, which leaves the compiler no choice.
"""

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from kernels.jit import cuda_capability_geq, jit, tl
from kernels.op import Make
from kernels.page_codes import decode, encode, head_dim, is_coded

LOG2_E = math.log2(math.e)
FP8, INT8, INT4 = torch.float8_e4m3fn, torch.int8, torch.uint8  # types of pages that no activations have
NO_WINDOW = 2**30  # a window that no sequence reaches
MAX_GROUP_SIZE = 64
MIN_WIDTH = 16  # elements that matrix units multiply at once
SCORE_ELEMENTS = 1 << 27  # of one slice of scores in the reference


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    slopes: Tensor | None = None,
    biases: Tensor | None = None,
) -> Tensor:
    """q: [tokens, heads, dim]; k, v: [length, kv_heads, dim]; seen: [tokens, length] bool; sinks: [heads]; slopes:
    [heads] and biases: [heads, 2 · reach + 1], for tokens that are the last ones of the keys → fp32. Every token sees a
    key."""
    step = max(1, SCORE_ELEMENTS // max(1, q.shape[1] * k.shape[0]))
    key = torch.arange(k.shape[0], device=q.device)

    def added(at: int) -> Tensor | None:
        """Return what is added to the scores of the tokens from `at` on, [heads, tokens, length]."""
        distance = key - key[k.shape[0] - q.shape[0] :][at : at + step].unsqueeze(1)
        if biases is not None:
            return distance_biases(biases, distance)
        return None if slopes is None else slopes.view(-1, 1, 1) * distance

    pieces = [
        _attend(
            *(q[at : at + step].float(), k.float(), v.float(), seen[at : at + step], scale, softcap, sinks), added(at)
        )
        for at in range(0, q.shape[0], step)
    ]
    return torch.cat(pieces) if pieces else q.float()


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """bias: [heads, tokens, length]."""
    scores = torch.einsum("tkgd,lkd->kgtl", q.unflatten(1, (k.shape[1], -1)), k).flatten(0, 1) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        sink = sinks.float().view(-1, 1, 1).expand(-1, scores.shape[1], 1)
        scores = torch.cat((scores, sink), -1)
    weights = scores.softmax(-1)[..., : k.shape[0]].unflatten(0, (k.shape[1], -1))
    return torch.einsum("kgtl,lkd->tkgd", weights, v).flatten(1, 2)


def distance_biases(biases: Tensor, distance: Tensor) -> Tensor:
    """Return the bias of each head for each distance from a query to a key. biases: [heads, 2 · reach + 1], of the
    distances -reach … reach; distance: integers of any shape → [heads, *shape]."""
    reach = biases.shape[1] // 2
    return biases[:, distance.clamp(-reach, reach) + reach]


def gather_kv(pages: Tensor, layer: int, blocks: Tensor, k_scale: float, v_scale: float) -> tuple[Tensor, Tensor]:
    """Return keys and values of these blocks, [tokens, kv_heads, dim] fp32."""
    found = pages[blocks.long(), layer]  # [blocks, 2, block_tokens, kv_heads, dim]
    planes = decode(found) if is_coded(pages.dtype) else found.float()
    return planes[:, 0].flatten(0, 1) * k_scale, planes[:, 1].flatten(0, 1) * v_scale


def causal(query: Tensor, key: Tensor, window: int | None, chunk: int | None = None) -> Tensor:
    """Return which of the positions `key` each of the positions `query` sees, [queries, keys]."""
    distance = query.unsqueeze(1) - key
    seen = (distance >= 0) & (distance < (NO_WINDOW if window is None else window))
    return seen if chunk is None else seen & (key >= (query - query % chunk).unsqueeze(1))


def first_key(position: int, window: int | None, chunk: int | None) -> int:
    """Return the first position that this position sees."""
    return max(0, 0 if window is None else position - window + 1, 0 if chunk is None else position // chunk * chunk)


def check_options(window: int | None, softcap: float | None, scale: float, chunk: int | None = None) -> None:
    if chunk is not None and (chunk < 1 or window is not None):
        raise ValueError(f"chunk={chunk}, window={window}: a chunk has a position at least, and excludes a window")
    if window is not None and window < 1:
        raise ValueError(f"window={window}: a position sees itself at least; None is no window")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap={softcap}: must be above 0; None is no softcap")
    if scale <= 0:
        raise ValueError(f"scale={scale}: must be above 0")


def check_heads(x: Tensor, name: str) -> int:
    """Return the row stride of x in elements. Raise ValueError unless the heads of a row are contiguous."""
    if x.shape[0] and (x.stride(2) != 1 or x.stride(1) != x.shape[2]):
        raise ValueError(f"{name}: the heads of a row must be contiguous, not at strides {x.stride()[1:]}")
    return x.stride(0)


def check_pages(q: Tensor, pages: Tensor) -> None:
    if pages.dtype not in (q.dtype, FP8, INT8, INT4):
        raise ValueError(f"pages: {pages.dtype} where q is {q.dtype}; use {q.dtype}, float8_e4m3fn, int8 or uint8")
    if not pages.is_contiguous() or pages.shape[2] != 2 or head_dim(pages) != q.shape[-1] or q.shape[-1] % 8:
        raise ValueError(
            f"pages {tuple(pages.shape)}: must be contiguous, [blocks, layers, 2, block_tokens, kv_heads, dim], with "
            f"dim a multiple of 8 and the one of q, {tuple(q.shape)}"
        )
    check_group(q.shape[1], pages.shape[4])


def check_group(heads: int, kv_heads: int) -> None:
    if heads % kv_heads or heads // kv_heads > MAX_GROUP_SIZE:
        raise ValueError(
            f"{heads} heads of q for {kv_heads} of keys: must be a multiple, from 1 to {MAX_GROUP_SIZE} times as many"
        )


def compute_type(q: Tensor, pages: Tensor) -> object:
    """Return the type of the operands of products. float16 represents each 8-bit float exactly, and weights better."""
    types = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
    return tl.float16 if pages.dtype.itemsize == 1 and q.dtype.itemsize == 2 else types[q.dtype]


def paged_inputs(
    make: Make,
    rows: Sequence[tuple[int, int]],
    heads: int,
    kv_heads: int,
    dim: int,
    block_tokens: int = 16,
    layers: int = 1,
    kept: torch.dtype | None = None,
    window: int | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, ...]:
    """rows: tokens to compute and length of each; (0, 0) is a padded one. Blocks before the window or chunk of a row's
    first token are released. kept: type of the pages, default that of q.

    → q, pages, table, slot, query_start, lengths, out."""
    tokens = sum(count for count, _ in rows)
    q = make.normal(tokens, heads, dim)
    pages = make.normal(_num_blocks(rows, block_tokens), layers, 2, block_tokens, kv_heads, dim)
    places = page_places(make, rows, block_tokens, window, chunk)
    if kept is not None:
        pages = encode(pages, kept) if is_coded(kept) else pages.to(kept)
    return q, pages, *places, make.normal(tokens, heads, dim)


def page_inputs(
    make: Make, rows: Sequence[tuple[int, int]], dim: int, block_tokens: int, layers: int
) -> tuple[Tensor, int, Tensor, Tensor, Tensor, Tensor]:
    """Return pages with one vector of a token, layer, table, slot, query_start and lengths, for `rows` of
    paged_inputs."""
    pages = make.normal(_num_blocks(rows, block_tokens), layers, 1, block_tokens, 1, dim)
    return pages, layers - 1, *page_places(make, rows, block_tokens)


def _num_blocks(rows: Sequence[tuple[int, int]], block_tokens: int) -> int:
    return 1 + sum(-(-length // block_tokens) for _, length in rows)


def page_places(
    make: Make,
    rows: Sequence[tuple[int, int]],
    block_tokens: int,
    window: int | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return table, slot, query_start and lengths, for `rows` of paged_inputs."""
    blocks, slots = [-(-length // block_tokens) for _, length in rows], len(rows) + 2
    slot = make.permutation(slots)[: len(rows)].contiguous()
    ids = make.permutation(sum(blocks)) + 1
    table = make.zeros(slots, max(blocks, default=0) + 1, dtype=torch.int32)
    if not make.meta:
        at = 0
        for (count, length), number, line in zip(rows, blocks, slot.tolist(), strict=True):
            released = first_key(length - count, window, chunk) // block_tokens if count else 0
            table[line, released:number] = ids[at + released : at + number]
            at += number
    start = make.tensor(list(accumulate((count for count, _ in rows), initial=0)))
    return table, slot, start, make.tensor([length for _, length in rows])


def slopes_of(make: Make, heads: int) -> Tensor:
    """Return ALiBi slopes for tests and benchmarks, from 1/2 for the first head to 1/256 for the last."""
    return make.tensor([2.0 ** (-1 - 7 * head / max(1, heads - 1)) for head in range(heads)], dtype=torch.float32)


def key_counts(lengths: Tensor, key_starts: Tensor | None) -> Tensor:
    """Return the number of positions that the last token of each row reads without a window."""
    return lengths if key_starts is None else lengths - key_starts


def num_keys_read(
    query_start: Tensor, lengths: Tensor, window: int | None, single: bool, chunk: int | None = None
) -> int:
    """Return the number of keys that rows of one token (`single`) or of several tokens read. lengths: see
    `key_counts`."""
    keys = 0
    for count, length in zip(query_start.diff().tolist(), lengths.tolist(), strict=True):
        if count and (count == 1) == single:
            keys += length - first_key(length - count, window, chunk)
    return keys


def paged_traffic(
    q: Tensor,
    pages: Tensor,
    query_start: Tensor,
    lengths: Tensor,
    window: int | None,
    single: bool,
    chunk: int | None = None,
) -> int:
    """Return the bytes of the keys and values that rows read, of q and of the output. lengths: see `key_counts`; on the
    meta device, which has no values, all pages of the layer count."""
    if lengths.is_meta:
        return pages.nbytes // pages.shape[1] + 2 * q.nbytes
    token = 2 * pages[0, 0, 0, 0].nbytes
    return token * num_keys_read(query_start, lengths, window, single, chunk) + 2 * q.nbytes


def page_kind(pages: Tensor) -> str:
    """Return how kernels read pages: "wide" numbers one at a time, others in pairs of neighbouring dims."""
    kinds = {FP8: "fp8", INT8: "int8", INT4: "int4"}
    return kinds.get(pages.dtype, "wide")


def page_elements(pages: Tensor) -> Tensor:
    """Return pages in the type that kernels load: the two numbers of a pair are one element."""
    return pages.view(torch.int16) if pages.dtype in (FP8, INT8) else pages


@jit
def unpack_pair(x, place, index, keep, KIND: tl.constexpr, DIM: tl.constexpr):
    """Elements of pages, [tile, half] → the first and the second number of each pair, in half precision for fp8, else
    fp32. place: [tile, 1], where each vector begins; index: [1, half], the number of each element in its vector; keep:
    [tile, 1]."""
    if KIND == "fp8":
        return unpack_e4m3(x)
    elif KIND == "int8":
        scale = tl.load((place + DIM // 2).to(tl.pointer_type(tl.float32)), keep, 0.0)
        return ((x << 8) >> 8).to(tl.float32) * scale, (x >> 8).to(tl.float32) * scale
    else:
        # 16 pairs of a group share a scale and a minimum.
        factors = (place + DIM // 2).to(tl.pointer_type(tl.float16))
        group = tl.minimum(index // 16, (DIM + 31) // 32 - 1)
        scale = tl.load(factors + group, keep, 0.0).to(tl.float32)
        minimum = tl.load(factors + (DIM + 31) // 32 + group, keep, 0.0).to(tl.float32)
        low = (x & 15).to(tl.float32)
        high = (x >> 4).to(tl.float32)
        return tl.fma(low, scale, minimum), tl.fma(high, scale, minimum)


@jit
def unpack_e4m3(x):
    """Two e4m3 in each int16 → the first and the second of each pair, in half precision."""
    if cuda_capability_geq(8, 9):  # it has an instruction for the conversion
        # Bytes 0 1 2 3 → 0 2 1 3: the firsts of two pairs, then the seconds. Each cvt converts two numbers.
        first, second = tl.inline_asm_elementwise(
            """{
            .reg .b32 sorted;
            .reg .b16 firsts, seconds;
            prmt.b32 sorted, $2, $2, 0x3120;
            mov.b32 {firsts, seconds}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, firsts;
            cvt.rn.f16x2.e4m3x2 $1, seconds;
            }""",
            "=r,=r,r",
            [x],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        # sign, 4 bits of exponent and 3 of mantissa where a half has them; its exponent counts from 15 and not from 7
        first = (((x << 8) & -0x8000) | ((x << 7) & 0x3F80)).to(tl.float16, bitcast=True) * 256.0
        second = ((x & -0x8000) | ((x >> 1) & 0x3F80)).to(tl.float16, bitcast=True) * 256.0
    return first, second


@jit
def to_product_type(x, TYPE: tl.constexpr):
    """Convert x to the type of products. A bf16 beyond the range of float16 becomes its largest number."""
    if TYPE == tl.float16:  # noqa: SIM300
        x = tl.clamp(x.to(tl.float32), -65504.0, 65504.0)
    return x.to(TYPE)


@jit
def keys_in_chunk(ends, CHUNK: tl.constexpr):
    """Return the number of keys that a row of this length reads: those in the chunk of the last one. 0 of length 0."""
    return tl.where(ends > 0, (ends - 1) % CHUNK + 1, 0)


@jit
def soft_capped(scores, scale, softcap):
    """softcap · tanh(scale · scores / softcap) · log2(e), exact to fp32: by 1 - 2 / (e^2x + 1)."""
    grown = tl.exp2(scores * (scale / softcap * 2.0))  # scale has log2(e) in it
    return softcap * 1.4426950408889634 * (1.0 - 2.0 / (grown + 1.0))


@jit
def biased(scores, scale, slopes, key, query, SOFTCAP: tl.constexpr):
    """scale · scores + slope · (key - query) · log2(e); scores with SOFTCAP are scaled already. slopes, query: one for
    each row; key: one for each column."""
    if SOFTCAP:
        scale = 1.0
    distance = (key[None, :] - query[:, None]).to(tl.float32)
    return tl.fma(scores, scale, distance * (slopes * 1.4426950408889634)[:, None])


@jit
def with_biases(scores, scale, biases, heads, live, key, query, SOFTCAP: tl.constexpr, REACH: tl.constexpr):
    """scale · scores + bias of the head for the distance key - query · log2(e); scores with SOFTCAP are scaled already.
    biases: [heads, 2 · REACH + 1]; heads, live, query: one for each row; key: one for each column."""
    if SOFTCAP:
        scale = 1.0
    distance = tl.maximum(tl.minimum(key[None, :] - query[:, None], REACH), -REACH) + REACH
    bias = tl.load(biases + heads[:, None] * (2 * REACH + 1) + distance, live[:, None], 0.0)
    return tl.fma(scores, scale, bias * 1.4426950408889634)


@jit
def softmax_weights(scores, top, scale, SCALED: tl.constexpr):
    """Scores of one more tile, -inf where masked → its weights, the new top and the factor for the previous sums. A
    tile with a mask that hides nothing gives the same result as one without a mask: each weight is one `fma`. SCALED:
    the scores are scaled already."""
    if SCALED:
        scale = 1.0
    best = tl.maximum(top, tl.max(scores, 1) * scale)
    return tl.exp2(tl.fma(scores, scale, -best[:, None])), best, tl.exp2(top - best)


@jit
def add_scaled(acc, keep, more, add):
    """acc · keep + more · add; keep and add: one for each row."""
    return tl.fma(acc, keep[:, None], more * add[:, None])


@jit
def final_factor(top, total, sink, v_scale, SINKS: tl.constexpr):
    """Return the factor by which each row of acc is multiplied at the end."""
    if SINKS:
        sink *= 1.4426950408889634
        best = tl.maximum(top, sink)
        keep = tl.exp2(top - best)
        return v_scale * keep / tl.fma(total, keep, tl.exp2(sink - best))
    return v_scale / total


@jit
def row_of(block, query_start, rows, BLOCK_Q: tl.constexpr):
    """Return the row r that this block of queries belongs to. Its first block is query_start[r] // BLOCK_Q + r."""
    low = 0
    high = rows
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start + middle) // BLOCK_Q + middle <= block:
            low = middle
        else:
            high = middle
    return low


@jit
def row_of_token(token, query_start, rows):
    """Return the row that a token belongs to."""
    low = 0
    high = rows
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start + middle) <= token:
            low = middle
        else:
            high = middle
    return low
