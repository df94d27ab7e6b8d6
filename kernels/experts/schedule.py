"""Tokens that each expert computes in one step, as a list of tiles that the programs of all experts take one by one.

A pair is a token and one of its experts: number token · top_k + place. Pairs are sorted by expert, and by token within
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
MAX_ROWS = 128


def tile_rows(tokens: int, top_k: int, num_experts: int) -> int:
    """Return the number of rows of a tile for a step with this number of tokens."""
    return next((rows for pairs, rows in TILES if tokens * top_k <= pairs * num_experts), MAX_ROWS)


def max_tiles(pairs: int, num_experts: int, rows: int) -> int:
    """Return the maximum number of tiles: one for each expert with a pair, one more for each `rows` further pairs."""
    used = min(pairs, num_experts)
    return used + (pairs - used) // rows


def empty_schedule(expert_ids: Tensor, num_experts: int, rows: int) -> tuple[Tensor, Tensor]:
    pairs, device = expert_ids.numel(), expert_ids.device
    tiles = max_tiles(pairs, num_experts, rows)
    order = torch.empty((pairs,), dtype=torch.int32, device=device)
    return order, torch.empty((tiles, FIELDS), dtype=torch.int32, device=device)


def _reference(expert_ids: Tensor, num_experts: int, rows: int) -> tuple[Tensor, Tensor]:
    """expert_ids: [tokens, top_k] int32, the experts of each token; those from `num_experts` on compute nothing → pairs
    int32 [tokens · top_k], in order of the experts, and -1 for those that are not computed, and tiles int32 [max_tiles,
    3]: an expert, the place of the tile's first pair and the end of its places; zeros where unused."""
    pairs, tiles = empty_schedule(expert_ids, num_experts, rows)
    flat = expert_ids.flatten()
    order = flat.sort(stable=True)
    pairs.copy_(order.indices.masked_fill(order.values >= num_experts, -1))
    found, end = [], 0
    for expert, own in enumerate(flat[flat < num_experts].bincount(minlength=num_experts).tolist()):
        first, end = end, end + own
        found += [(expert, place, min(place + rows, end)) for place in range(first, end, rows)]
    tiles.zero_()
    if found:
        tiles[: len(found)] = torch.tensor(found, dtype=torch.int32, device=tiles.device)
    return pairs, tiles


@jit(varying=("count_pairs", "count_tiles", "rows"))
def expert_schedule_kernel(
    expert_ids,
    pairs,
    tiles,
    count_pairs,
    count_tiles,
    rows,
    NUM_EXPERTS: tl.constexpr,
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
        number = tl.load(expert_ids + pair, real, 0)
        counts += tl.histogram(number, BINS, mask=real & (number < NUM_EXPERTS))
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
    for unused in range(used + own, count_tiles, NUM_EXPERTS):
        tl.store(tiles + unused * 3 + tl.arange(0, 4), 0, tl.arange(0, 4) < 3)
    if own == NUM_EXPERTS - 1:
        for at in range(end, count_pairs, BLOCK):
            rest = at + tl.arange(0, BLOCK)
            tl.store(pairs + rest, -1, rest < count_pairs)
    if end > first:
        at_pair = first
        for at in range(0, count_pairs, BLOCK):
            pair = at + tl.arange(0, BLOCK)
            mine = (tl.load(expert_ids + pair, pair < count_pairs, -1) == own).to(tl.int32)
            tl.store(pairs + at_pair + tl.cumsum(mine, 0) - 1, pair, mine > 0)
            at_pair += tl.sum(mine, 0)


def _triton(expert_ids: Tensor, num_experts: int, rows: int) -> tuple[Tensor, Tensor]:
    if not expert_ids.is_contiguous():
        raise ValueError("expert_ids: must be contiguous; call .contiguous()")
    pairs, tiles = empty_schedule(expert_ids, num_experts, rows)
    launch(
        expert_schedule_kernel,
        (num_experts if len(pairs) else 0,),
        expert_ids,
        pairs,
        tiles,
        len(pairs),
        len(tiles),
        rows,
        NUM_EXPERTS=num_experts,
        BINS=max(BINS, power_of_2(num_experts)),
        BLOCK=COUNTED,
    )
    return pairs, tiles


def drawn_expert_ids(make: Make, tokens: int, num_experts: int, top_k: int, only: int | None = None) -> Tensor:
    """Draw distinct experts for each token. only: the first expert of every token."""
    weights = make.normal(tokens, num_experts, dtype=torch.float32)
    if only is not None and not make.meta:
        weights[:, only] = torch.inf
    return weights.argsort(1, descending=True)[:, :top_k].int().contiguous()


def _inputs(
    make: Make, tokens: int, num_experts: int, top_k: int, rows: int, only: int | None = None, zero_experts: int = 0
) -> Args:
    return drawn_expert_ids(make, tokens, num_experts + zero_experts, top_k, only), num_experts, rows


def _served(tokens: int, num_experts: int, top_k: int) -> Case:
    sizes = {
        "tokens": tokens,
        "num_experts": num_experts,
        "top_k": top_k,
        "rows": tile_rows(tokens, top_k, num_experts),
    }
    return Case(f"{top_k}-of-{num_experts}-{tokens}", sizes, bench=True)


EXPERT_SCHEDULE = Op(
    name="expert_schedule",
    reference=_reference,
    triton=_triton,
    inputs=_inputs,
    cases=(
        Case("one", {"tokens": 1, "num_experts": 8, "top_k": 2, "rows": 16}),
        Case("odd", {"tokens": 37, "num_experts": 11, "top_k": 3, "rows": 4}),
        Case("crowd", {"tokens": 65, "num_experts": 5, "top_k": 1, "rows": 16, "only": 3}),
        Case("exact", {"tokens": 64, "num_experts": 4, "top_k": 2, "rows": 16, "only": 0}),
        Case("sparse", {"tokens": 3, "num_experts": 130, "top_k": 16, "rows": 16}),
        Case("long", {"tokens": 700, "num_experts": 6, "top_k": 3, "rows": 64, "only": 5}),
        Case("all", {"tokens": 17, "num_experts": 3, "top_k": 3, "rows": 16}),
        Case("alone", {"tokens": 20, "num_experts": 1, "top_k": 1, "rows": 16}),
        Case("skipped", {"tokens": 37, "num_experts": 5, "top_k": 4, "rows": 4, "zero_experts": 6}),
        Case("all-skipped", {"tokens": 9, "num_experts": 2, "top_k": 1, "rows": 4, "zero_experts": 3, "only": 4}),
        Case("single-rows", {"tokens": 9, "num_experts": 4, "top_k": 2, "rows": 1}),
        Case("empty", {"tokens": 0, "num_experts": 8, "top_k": 2, "rows": 16}),
        *(_served(tokens, 128, 8) for tokens in (1, 256, 4096)),
        _served(256, 512, 16),
    ),
    tolerance={torch.float32: 0.0, torch.bfloat16: 0.0},
    traffic=lambda expert_ids, num_experts, rows: (
        2 * nbytes(expert_ids) + 4 * FIELDS * max_tiles(expert_ids.numel(), num_experts, rows)
    ),
)


def drawn_schedule(
    make: Make, tokens: int, num_experts: int, top_k: int, rows: int | None = None, only: int | None = None
) -> tuple[Tensor, Tensor, int]:
    """Return pairs and tiles of drawn experts, and the rows of a tile (default: as served)."""
    expert_ids = drawn_expert_ids(make, tokens, num_experts, top_k, only)
    rows = rows or tile_rows(tokens, top_k, num_experts)
    schedule = empty_schedule if make.meta else EXPERT_SCHEDULE.reference
    return *schedule(expert_ids, num_experts, rows), rows
