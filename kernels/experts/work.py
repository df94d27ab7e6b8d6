"""Tokens that each expert computes in one step, as a list of tiles that the programs of all experts take one by one.

A pair is a token and one of its experts: number token · chosen + rank. Pairs are sorted by expert, and by token within
an expert. The pairs of each expert are cut into tiles of `rows`; only the last tile may be shorter. The maximum number
of tiles depends on the number of tokens alone, so the list is built without waiting for the device, and a step with it
can be captured. One list serves both products of a layer. The tile of a pair does not affect its result.
"""

import torch
from torch import Tensor

from kernels.jit import jit, launch, power_of_2, tl
from kernels.op import Args, Case, Make, Op, nbytes

FIELDS = 3  # numbers for each tile
COUNTED = 2048  # pairs that are counted at once
BINS = 128  # minimum size of a histogram: one bin for each thread
# Rows of a tile, by the maximum average number of pairs of an expert. An expert's weights are read once for each of its
# tiles, so most experts should have one. Rows without a pair cost little up to the number of rows that a device
# multiplies while it reads the next weights: 125 rows at 600 TFLOP/s and 4.8 TB/s.
TILES = ((8, 16), (64, 64))
MOST_ROWS = 128


def tile_rows(tokens: int, chosen: int, count: int) -> int:
    """Return the number of rows of a tile for a step with this number of tokens."""
    return next((rows for pairs, rows in TILES if tokens * chosen <= pairs * count), MOST_ROWS)


def most_tiles(pairs: int, count: int, rows: int) -> int:
    """Return the maximum number of tiles: one for each expert with a pair, one more for each `rows` further pairs."""
    used = min(pairs, count)
    return used + (pairs - used) // rows


def empty_work(numbers: Tensor, count: int, rows: int) -> tuple[Tensor, Tensor]:
    pairs, device = numbers.numel(), numbers.device
    tiles = most_tiles(pairs, count, rows)
    order = torch.empty((pairs,), dtype=torch.int32, device=device)
    return order, torch.empty((tiles, FIELDS), dtype=torch.int32, device=device)


def _reference(numbers: Tensor, count: int, rows: int) -> tuple[Tensor, Tensor]:
    """numbers: [tokens, chosen] int32, the experts of each token, below `count` → pairs int32 [tokens · chosen], in
    order of the experts, and tiles int32 [most_tiles, 3]: an expert, the place of the tile's first pair and the end of
    its places; zeros where unused."""
    pairs, tiles = empty_work(numbers, count, rows)
    flat = numbers.flatten()
    pairs.copy_(flat.sort(stable=True).indices)
    found, end = [], 0
    for expert, own in enumerate(flat.bincount(minlength=count).tolist()):
        first, end = end, end + own
        found += [(expert, place, min(place + rows, end)) for place in range(first, end, rows)]
    tiles.zero_()
    if found:
        tiles[: len(found)] = torch.tensor(found, dtype=torch.int32, device=tiles.device)
    return pairs, tiles


@jit(varying=("count_pairs", "count_tiles", "rows"))
def expert_work_kernel(
    numbers,
    pairs,
    tiles,
    count_pairs,
    count_tiles,
    rows,
    COUNT: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each expert: counts the pairs of all experts, then writes its expert's pairs and tiles."""
    own = tl.program_id(0)
    expert = tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    for at in range(0, count_pairs, BLOCK):
        pair = at + tl.arange(0, BLOCK)
        real = pair < count_pairs
        counts += tl.histogram(tl.load(numbers + pair, real, 0), BINS, mask=real)
    needed = (counts + rows - 1) // rows
    before = expert < own
    first = tl.sum(tl.where(before, counts, 0), 0)
    tile = tl.sum(tl.where(before, needed, 0), 0)
    end = first + tl.sum(tl.where(expert == own, counts, 0), 0)
    used = tl.sum(needed, 0)

    for place in range(first, end, rows):
        entry = tiles + (tile + (place - first) // rows) * 3
        tl.store(entry, own)
        tl.store(entry + 1, place)
        tl.store(entry + 2, tl.minimum(place + rows, end))
    for unused in range(used + own, count_tiles, COUNT):
        tl.store(tiles + unused * 3 + tl.arange(0, 4), 0, tl.arange(0, 4) < 3)
    if end > first:
        place = first
        for at in range(0, count_pairs, BLOCK):
            pair = at + tl.arange(0, BLOCK)
            mine = (tl.load(numbers + pair, pair < count_pairs, -1) == own).to(tl.int32)
            tl.store(pairs + place + tl.cumsum(mine, 0) - 1, pair, mine > 0)
            place += tl.sum(mine, 0)


def _triton(numbers: Tensor, count: int, rows: int) -> tuple[Tensor, Tensor]:
    if not numbers.is_contiguous():
        raise ValueError("numbers: pairs are counted one after another; use .contiguous()")
    pairs, tiles = empty_work(numbers, count, rows)
    launch(
        expert_work_kernel,
        (count if len(pairs) else 0,),
        numbers,
        pairs,
        tiles,
        len(pairs),
        len(tiles),
        rows,
        COUNT=count,
        BINS=max(BINS, power_of_2(count)),
        BLOCK=COUNTED,
    )
    return pairs, tiles


def drawn_numbers(make: Make, tokens: int, count: int, chosen: int, only: int | None = None) -> Tensor:
    """Draw distinct experts for each token. only: the first expert of every token."""
    weights = make.normal(tokens, count, dtype=torch.float32)
    if only is not None and not make.meta:
        weights[:, only] = torch.inf
    return weights.argsort(1, descending=True)[:, :chosen].int().contiguous()


def _inputs(make: Make, tokens: int, count: int, chosen: int, rows: int, only: int | None = None) -> Args:
    return drawn_numbers(make, tokens, count, chosen, only), count, rows


def _served(tokens: int, count: int, chosen: int) -> Case:
    sizes = {"tokens": tokens, "count": count, "chosen": chosen, "rows": tile_rows(tokens, chosen, count)}
    return Case(f"{chosen}-of-{count}-{tokens}", sizes, bench=True)


EXPERT_WORK = Op(
    name="expert_work",
    reference=_reference,
    triton=_triton,
    inputs=_inputs,
    cases=(
        Case("one", {"tokens": 1, "count": 8, "chosen": 2, "rows": 16}),
        Case("odd", {"tokens": 37, "count": 11, "chosen": 3, "rows": 4}),
        Case("crowd", {"tokens": 65, "count": 5, "chosen": 1, "rows": 16, "only": 3}),
        Case("exact", {"tokens": 64, "count": 4, "chosen": 2, "rows": 16, "only": 0}),
        Case("sparse", {"tokens": 3, "count": 130, "chosen": 16, "rows": 16}),
        Case("long", {"tokens": 700, "count": 6, "chosen": 3, "rows": 64, "only": 5}),
        Case("all", {"tokens": 17, "count": 3, "chosen": 3, "rows": 16}),
        Case("alone", {"tokens": 20, "count": 1, "chosen": 1, "rows": 16}),
        Case("single-rows", {"tokens": 9, "count": 4, "chosen": 2, "rows": 1}),
        Case("empty", {"tokens": 0, "count": 8, "chosen": 2, "rows": 16}),
        *(_served(tokens, 128, 8) for tokens in (1, 256, 4096)),
        _served(256, 512, 16),
    ),
    tolerance={torch.float32: 0.0, torch.bfloat16: 0.0},
    traffic=lambda numbers, count, rows: 2 * nbytes(numbers) + 4 * FIELDS * most_tiles(numbers.numel(), count, rows),
)
