"""Alignment of prompts with audio, by the weights of some heads of cross-attention.

    w = softmax(scale · q kᵀ) of each head, cut to the positions of audio and to the aligned tokens
    the result is the mean over the heads of median(normalised(w))

normalised: each position has the mean 0 and the deviation 1 over the tokens. median: a filter over the positions, which
mirrors the edges. Dynamic time warping then gives the time of each token (appliance/server/speech/words.py).

Source: Whisper's reference implementation (timing.py, find_alignment), transformers generation_whisper.py
(`_extract_token_timestamps`).
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from engine.api.messages import Alignment, AlignmentOptions
from engine.core.plan import StepPlan
from engine.distributed.world import World
from engine.kv.layout import Layout, blocks_of
from engine.layers.kv import group_pages, kv_layers
from engine.lowering.operations import Attend
from engine.lowering.program import Program
from engine.models.parts import Encoder
from engine.worker.rows import PlanRows
from engine.worker.table import RequestTable
from kernels.cpu.pages import from_native
from kernels.page_codes import decode, is_coded


class Aligner:
    """Keeps the queries of prompts that are aligned until the prompt is complete. Every rank has a share of the
    heads."""

    def __init__(self, program: Program, encoder: Encoder, layout: Layout, world: World, *, native: bool) -> None:
        """native: the pages have the order of the compiled kernels."""
        assert encoder.alignment is not None, "the model has alignment heads"
        self._alignment, self._layout, self._world, self._native = encoder.alignment, layout, world, native
        attends = [op for op in program.ops if isinstance(op, Attend) and op.cross]
        self._attends = {layer: attends[layer] for layer in self._alignment.layers}
        self._places = kv_layers(layout)
        self._queries: dict[int, list[Tensor]] = {}  # by slot: of the tokens so far, in the order of steps

    def apply(self, plan: StepPlan) -> None:
        """Forget the requests that leave the table or enter it again."""
        for slot in (*plan.dropped, *(new.slot for new in plan.new)):
            self._queries.pop(slot, None)

    def run(self, rows: PlanRows, queries: Tensor, table: RequestTable, pages: Tensor) -> dict[int, Alignment]:
        """Return the alignments of the prompts that this step completes, by row. queries: [tokens, layers · heads ·
        head_dim] of the decoder's tokens."""
        wanted = table.columns.alignment
        count = rows.ends - np.maximum(rows.first, table.sources[rows.slots])
        starts = np.cumsum(count) - count
        found: dict[int, Alignment] = {}
        for row, slot in enumerate(rows.slots.tolist()):
            if slot not in wanted:
                continue
            kept = self._queries.setdefault(slot, [])
            kept.append(queries[starts[row] : starts[row] + count[row]].float().clone())
            if rows.ends[row] == table.columns.prompt_tokens[slot]:
                whole = torch.cat(self._queries.pop(slot))
                found[row] = self._aligned(whole, wanted[slot], slot, table, pages)
        return found

    def _aligned(
        self, queries: Tensor, wanted: AlignmentOptions, slot: int, table: RequestTable, pages: Tensor
    ) -> Alignment:
        source = int(table.sources[slot])
        total = queries.new_zeros(len(queries) - wanted.first, wanted.positions)
        for number, (layer, op) in enumerate(self._attends.items()):
            size = op.part.head_dim
            own = queries.view(len(queries), len(self._attends), op.heads, size)[:, number]
            keys = self._keys(op, slot, source, table.tables, pages)
            for head in self._heads(layer, op.heads):
                weights = (own[:, head] @ keys[:, head].T * op.scale).softmax(-1)
                weights = normalised(weights[wanted.first :, : wanted.positions])
                total += median_filter(weights, self._alignment.median_width)
        total = self._world.all_reduce(total) / len(self._alignment.heads)
        tokens, positions = total.shape
        return Alignment((tokens, positions), total.numpy(force=True).astype("<f4").tobytes())

    def _heads(self, layer: int, heads: int) -> list[int]:
        """Return the numbers of this rank's alignment heads of a layer. heads: of each rank."""
        first = self._world.rank * heads
        return [head - first for at, head in self._alignment.heads if at == layer and first <= head < first + heads]

    def _keys(self, op: Attend, slot: int, source: int, tables: tuple[np.ndarray, ...], pages: Tensor) -> Tensor:
        """Return the keys of the encoder input, [source, heads, head_dim]."""
        assert op.layer is not None and op.heads == op.kv_heads, "cross-attention has pages and no groups of heads"
        place = self._places[op.layer]
        blocks = tables[place.group][slot, : blocks_of(source, self._layout.block_tokens)]
        viewed = group_pages(self._layout, pages)[place.group]
        own = viewed[torch.from_numpy(blocks.astype(np.int64)).to(pages.device), place.layer : place.layer + 1]
        if self._native:
            own = from_native(own)
        if is_coded(own.dtype):
            own = decode(own)
        return own[:, 0, 0].flatten(0, 1)[:source].float()


def normalised(weights: Tensor) -> Tensor:
    """Return the weights [tokens, positions] with the mean 0 and the deviation 1 over the tokens; a position that no
    token distinguishes is 0."""
    deviation, mean = torch.std_mean(weights, 0, correction=0)
    return torch.where(deviation > 0, (weights - mean) / deviation, 0.0)


def median_filter(x: Tensor, width: int) -> Tensor:
    """Return the medians of `width` neighbouring columns of x. If x has too few columns, return it unchanged."""
    half = width // 2
    if x.shape[1] <= half:
        return x
    padded = functional.pad(x.unsqueeze(0), (half, half), mode="reflect")[0]
    shifted = [padded[:, at : at + x.shape[1]] for at in range(width)]
    # Each pass moves the largest remaining number to the end, for all columns at once: with a width of 7, 18 pairs of
    # elementwise operations take a tenth of the time of sorting.
    for last in range(width - 1, half - 1, -1):
        for at in range(last):
            low, high = shifted[at], shifted[at + 1]
            shifted[at], shifted[at + 1] = torch.minimum(low, high), torch.maximum(low, high)
    return shifted[half]
