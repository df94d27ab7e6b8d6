"""Log probabilities for rows that request them: of the drawn token, with its rank, and of the most likely tokens.

    logprob = (x - largest x) - log Σ exp(x - largest x)

x is the model's logit, or for processed logprobs s = logit / temperature of the kept tokens and -∞ of the others. No
softmax of the vocabulary is written: a tile finds its largest x, its sum, the number of x above the drawn token's, and
its `top` most likely tokens one after another; a second launch merges the tiles. Between equal x the lower id wins.
"""

import torch
from torch import Tensor

from kernels.cpu import logit_processors
from kernels.jit import jit, launch, power_of_2, row_stride, tl
from kernels.op import Args, Case, Make, Op, nbytes
from kernels.sampling.float_order import key_value, order_key
from kernels.sampling.token_mass import scaled

MAX_TOP = 20  # likely tokens of one call
TILE = 4096
_LANES = 32  # places of a tile's tokens


def _reference(
    logits: Tensor,
    at: Tensor,
    users: Tensor,
    ids: Tensor,
    slot: Tensor,
    temperature: Tensor,
    floor: Tensor,
    last: Tensor,
    top: int,
    processed: bool,
) -> tuple[Tensor, Tensor]:
    """logits: [.., vocab] of any float type; at, users: [n] int32, the row of the logits and the row of the step; ids:
    [rows] int32; slot: [rows] int32; temperature: [slots] fp32; floor: [rows] fp32 and last: [rows] int32, see
    sample.py; top: 0 … 20, at most the vocabulary → logprobs fp32 [n, 1 + top], the drawn token's first, and
    int32 [n, 1 + top], its rank and the ids of the others."""
    x, user = logits[at.long()].float(), users.long()
    if processed:
        divisor = temperature[slot[user].long()]
        x = x / torch.where(divisor == 0, 1.0, divisor)[:, None]
        token, edge = torch.arange(x.shape[1], device=x.device), floor[user][:, None]
        kept = (x > edge) | ((x == edge) & (token <= last[user][:, None]))
        x = x.masked_fill(~kept, -torch.inf)
    table = x.log_softmax(1)
    drawn = ids[user].long()[:, None]
    rank = (x > x.gather(1, drawn)).sum(1, keepdim=True) + 1
    order = x.sort(dim=1, descending=True, stable=True).indices[:, :top]
    values = torch.cat((table.gather(1, drawn), table.gather(1, order)), 1)
    return values, torch.cat((rank, order), 1).int()


@jit
def _values(logits, token, keep, t, threshold, last, PROCESSED: tl.constexpr):
    """Return x of some tokens of a row."""
    x = tl.load(logits + token, keep, float("-inf")).to(tl.float32)
    if PROCESSED:
        x = scaled(x, t)
        x = tl.where((x > threshold) | ((x == threshold) & (token <= last)), x, float("-inf"))
    return x


@jit(varying=("top",))
def top_of_tile_kernel(
    logits,
    at,
    users,
    ids,
    slot,
    temperature,
    floor,
    last,
    largest,
    sums,
    above,
    found,
    top,
    logits_row,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
    PROCESSED: tl.constexpr,
):
    """One program for each tile of a requested row. found: [n, TILES, LANES] int64: key and id in one number."""
    asking, tile = tl.program_id(0), tl.program_id(1)
    user = tl.load(users + asking)
    t = tl.load(temperature + tl.load(slot + user))
    t = tl.where(t == 0.0, 1.0, t)
    threshold, final = tl.load(floor + user), tl.load(last + user)
    own = logits + tl.load(at + asking).to(tl.int64) * logits_row
    token = tile * TILE + tl.arange(0, TILE)
    x = _values(own, token, token < VOCAB, t, threshold, final, PROCESSED)
    drawn = tl.load(ids + user) + tl.arange(0, 1)
    mine = tl.max(_values(own, drawn, drawn >= 0, t, threshold, final, PROCESSED), 0)
    best = tl.max(x, 0)
    level = tl.where(best == float("-inf"), 0.0, best)
    out = asking * TILES + tile
    tl.store(largest + out, best)
    tl.store(sums + out, tl.sum(tl.exp(x - level), 0))
    tl.store(above + out, tl.sum((x > mine).to(tl.int32), 0))
    both = (order_key(x).to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)
    both = tl.where(token < VOCAB, both, -0x8000000000000000)
    for number in range(top):
        most = tl.max(both, 0)
        tl.store(found + out * LANES + number, most)
        both = tl.where(both == most, -0x8000000000000000, both)


@jit(varying=("top",))
def top_logprobs_kernel(
    logits,
    at,
    users,
    ids,
    slot,
    temperature,
    floor,
    last,
    largest,
    sums,
    above,
    found,
    values,
    numbers,
    top,
    logits_row,
    TILES: tl.constexpr,
    TILES_UP: tl.constexpr,
    LANES: tl.constexpr,
    PROCESSED: tl.constexpr,
):
    """One program for each requested row."""
    asking = tl.program_id(0)
    user = tl.load(users + asking)
    t = tl.load(temperature + tl.load(slot + user))
    t = tl.where(t == 0.0, 1.0, t)
    own = logits + tl.load(at + asking).to(tl.int64) * logits_row
    drawn = tl.load(ids + user) + tl.arange(0, 1)
    mine = tl.max(_values(own, drawn, drawn >= 0, t, tl.load(floor + user), tl.load(last + user), PROCESSED), 0)
    tile = tl.arange(0, TILES_UP)
    keep = tile < TILES
    m = tl.load(largest + asking * TILES + tile, keep, float("-inf"))
    best = tl.max(m, 0)
    level = tl.where(best == float("-inf"), 0.0, best)
    whole = tl.log(tl.sum(tl.load(sums + asking * TILES + tile, keep, 0.0) * tl.exp(m - level), 0))
    out = asking * (top + 1)
    tl.store(values + out, (mine - level) - whole)
    tl.store(numbers + out, tl.sum(tl.load(above + asking * TILES + tile, keep, 0), 0) + 1)
    lane = tl.arange(0, TILES_UP * LANES)
    inside = (lane // LANES < TILES) & (lane % LANES < top)
    both = tl.load(found + asking * TILES * LANES + lane, inside, -0x8000000000000000)
    for number in range(top):
        most = tl.max(both, 0)
        tl.store(values + out + 1 + number, (key_value((most >> 32).to(tl.int32)) - level) - whole)
        tl.store(numbers + out + 1 + number, 0x7FFFFFFF - (most & 0x7FFFFFFF).to(tl.int32))
        both = tl.where(both == most, -0x8000000000000000, both)


def _triton(
    logits: Tensor,
    at: Tensor,
    users: Tensor,
    ids: Tensor,
    slot: Tensor,
    temperature: Tensor,
    floor: Tensor,
    last: Tensor,
    top: int,
    processed: bool,
) -> tuple[Tensor, Tensor]:
    n, vocab = at.shape[0], logits.shape[1]
    if not 0 <= top <= min(MAX_TOP, vocab):
        raise ValueError(f"top={top}: must be 0 to {min(MAX_TOP, vocab)}")
    tiles = -(-vocab // TILE)

    def fresh(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    asked = logits, at, users, ids, slot, temperature, floor, last
    parts = (
        *(fresh(n, tiles), fresh(n, tiles), fresh(n, tiles, dtype=torch.int32)),
        fresh(n, tiles, _LANES, dtype=torch.int64),
    )
    row, sizes = row_stride(logits, "logits"), {"TILES": tiles, "LANES": _LANES, "PROCESSED": processed}
    launch(top_of_tile_kernel, (n, tiles), *asked, *parts, top, row, VOCAB=vocab, TILE=TILE, warps=8, **sizes)
    values, numbers = fresh(n, 1 + top), fresh(n, 1 + top, dtype=torch.int32)
    launch(
        top_logprobs_kernel,
        (n,),
        *asked,
        *parts,
        values,
        numbers,
        top,
        row,
        TILES_UP=power_of_2(tiles),
        warps=8,
        **sizes,
    )
    return values, numbers


def _inputs(make: Make, rows: int, n: int, vocab: int, top: int, processed: bool, step: float = 0.0) -> Args:
    """step: logits are multiples of it, so that many are equal. Borders keep about half of the tokens."""
    logits = make.normal(rows, vocab, scale=2.0)
    if step:
        logits = (logits / step).round() * step
    users = make.permutation(rows)[:n].contiguous()
    floor = torch.zeros(rows, dtype=torch.float32, device=make.device)
    last = make.tensor([vocab // 2] * rows)
    ids = make.integers(0, vocab, rows)
    if not make.meta and rows:
        ids = logits.argmax(1).int()
        if not processed:
            ids[::2] = make.integers(0, vocab, len(ids[::2]))
    return (
        *(logits, users, users, ids, make.permutation(rows)),
        make.tensor([(0.0, 1.0, 0.7, 1.9)[line % 4] for line in range(rows)], torch.float32),
        *(floor, last, top, processed),
    )


TOP_LOGPROBS = Op(
    name="top_logprobs",
    reference=_reference,
    triton=_triton,
    inputs=_inputs,
    cases=(
        Case("raw", {"rows": 5, "n": 3, "vocab": 97, "top": 5, "processed": False}),
        Case("processed", {"rows": 4, "n": 4, "vocab": 97, "top": 20, "processed": True, "step": 0.25}),
        Case("tiles", {"rows": 2, "n": 2, "vocab": 8200, "top": 20, "processed": False, "step": 0.5}),
        Case("none", {"rows": 2, "n": 2, "vocab": 33, "top": 0, "processed": False}),
        Case("one", {"rows": 1, "n": 1, "vocab": 1, "top": 1, "processed": False}),
        Case("nobody", {"rows": 2, "n": 0, "vocab": 33, "top": 3, "processed": False}),
        Case("empty", {"rows": 0, "n": 0, "vocab": 32, "top": 2, "processed": True}),
        Case("256x151936", {"rows": 256, "n": 256, "vocab": 151936, "top": 20, "processed": False}, bench=True),
        Case("16x151936", {"rows": 256, "n": 16, "vocab": 151936, "top": 5, "processed": True}, bench=True),
    ),
    tolerance={torch.float32: 1e-5, torch.float16: 1e-5, torch.bfloat16: 1e-5},
    compiled=logit_processors.top_logprobs,
    cpu_cases=(Case("8x151936", {"rows": 8, "n": 8, "vocab": 151936, "top": 20, "processed": False}),),
    traffic=lambda logits, at, *rest: at.shape[0] * (logits.shape[1] * logits.element_size()) + nbytes(at),
    strided=(0,),
)
