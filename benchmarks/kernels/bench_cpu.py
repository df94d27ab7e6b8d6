"""Time the compiled kernels of a CPU, next to torch's own operations with the same number of threads.

Operations are timed at their `cpu_cases` and attention on batches of whole steps (kernels/attention/batches.py), with
packed weights and arranged pages, as in a model. Both sides take turns. The minimum time measures the kernels; mean and
deviation also include the effect of other processes.
"""

import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.kernels.timing import collect_samples, format_figure, sampler
from kernels.attention.batches import Rows, batch, kind
from kernels.attention.common import gather_kv, paged_inputs
from kernels.attention.prefill import num_scores
from kernels.cpu import bodies
from kernels.cpu.bodies import NativePages
from kernels.cpu.pages import to_native
from kernels.cpu.program import Team
from kernels.op import Make
from kernels.ops import OPS
from kernels.page_codes import encode
from kernels.report import table

CPU = torch.device("cpu")
ATTENTION = "attention"
CODED = {"int8": torch.int8, "int4": torch.uint8}
PAGES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16} | CODED
SHAPES = {  # heads, kv_heads, dim
    "qwen2.5-0.5b": (14, 2, 64),
    "qwen3-0.6b": (16, 8, 128),
}
BATCHES = ("8q1s1k", "8q1s4k", "q1s16k", "4q5s2k", "q512", "q512s4k", "q512+8q1s2k")
HEAD = ("op", "case", "kind", "min us", "mean", "max", "std", "GB/s", "GFLOP/s", "torch min", "mean", "x torch")


@dataclass(frozen=True)
class Spread:
    """Microseconds of a call."""

    min: float
    mean: float
    max: float
    std: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Spread":
        return cls(min(samples), statistics.fmean(samples), max(samples), statistics.pstdev(samples))


@dataclass(frozen=True)
class Workload:
    """A call of the compiled kernels, and the call of torch that computes the same."""

    op: str
    case: str
    kind: str
    compiled_call: Callable[[], Any]
    torch_call: Callable[[], Any]
    bytes: int
    flops: int


@dataclass(frozen=True)
class Timed:
    op: str
    case: str
    kind: str
    time: Spread
    peer: Spread
    bytes: int
    flops: int

    def cells(self) -> tuple[str, ...]:
        spread = tuple(format_figure(value) for value in asdict(self.time).values())
        rates = (
            format_figure(self.bytes / self.time.min / 1e3),
            format_figure(self.flops / self.time.min / 1e3) if self.flops else "",
        )
        peer = format_figure(self.peer.min), format_figure(self.peer.mean), f"{self.peer.min / self.time.min:.2f}"
        return self.op, self.case, self.kind, *spread, *rates, *peer


def bench(
    team: Team,
    names: Sequence[str],
    ids: Sequence[str],
    *,
    batches: Sequence[str] = (),
    pages: str = "float16",
    rounds: int,
    json_file: Path | None = None,
) -> int:
    """Print the table, in the order of the operations, and return the exit code. Raise ValueError for an invalid
    batch."""
    texts = batches or BATCHES
    parsed = [(text, batch(text)) for text in texts]
    rows = []
    with torch_threads(team.threads):
        print(f"CPU, {team.variant}, {team.threads} threads, torch {torch.__version__}", flush=True)
        attention = attention_workloads(team, parsed, pages, ids) if _named(ATTENTION, names) else ()
        for work in chain(() if batches else op_workloads(team, names, ids), attention):
            samplers = [sampler(call, [()], CPU) for call in (work.compiled_call, work.torch_call)]
            times = [Spread.of(samples) for samples in collect_samples(samplers, rounds)]
            rows.append(Timed(work.op, work.case, work.kind, *times, work.bytes, work.flops))
    if not rows:
        print("benchmarks.kernels: no operation and case matches")
        return 2
    print(table([HEAD, *(row.cells() for row in rows)], left=3))
    if json_file is not None:
        facts = {"kernels": team.variant, "threads": team.threads, "torch": torch.__version__}
        json_file.write_text(json.dumps({"facts": facts, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    return 0


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Set the number of torch's threads, and restore it on exit."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _named(name: str, texts: Sequence[str]) -> bool:
    return not texts or any(text in name for text in texts)


def op_workloads(team: Team, names: Sequence[str] = (), ids: Sequence[str] = ()) -> Iterator[Workload]:
    """Yield the CPU cases of the operations whose name and id contain one of the texts; all if there are none."""
    for op in OPS:
        for case in op.cpu_cases:
            if not (_named(op.name, names) and _named(case.id, ids)):
                continue
            assert op.compiled is not None, f"{op.name} has CPU cases but no CPU body"
            args = op.inputs(Make(CPU, torch.float32), **case.sizes)
            yield Workload(
                *(op.name, case.id, ""),
                compiled_call=partial(op.compiled, team, *op.native_layout(team, args)),
                torch_call=partial(op.peer or op.reference, *args),
                bytes=op.traffic(*args),
                flops=op.flops(*args),
            )


def attention_workloads(
    team: Team, batches: Sequence[tuple[str, Rows]], pages: str, ids: Sequence[str] = ()
) -> Iterator[Workload]:
    """Yield the batches whose id contains one of the texts; all if there are none."""
    for name, shape in SHAPES.items():
        for text, rows in batches:
            if _named(case := f"{text} {name} {pages}", ids):
                yield attention_workload(team, rows, shape, pages, case)


def attention_workload(team: Team, rows: Rows, shape: tuple[int, int, int], pages: str, case: str) -> Workload:
    """Yield the attention of one layer. For torch, the keys and values of each row are contiguous, in float32."""
    heads, kv_heads, dim = shape
    q, wide, table, slot, start, lengths, out = paged_inputs(Make(CPU, torch.float32), rows, heads, kv_heads, dim)
    kept = encode(wide, PAGES[pages]) if pages in CODED else wide.to(PAGES[pages])
    native, scale = NativePages(to_native(kept)), dim**-0.5
    keys = sum(length for _, length in rows)
    singles = sum(length for count, length in rows if count == 1)
    return Workload(
        *(ATTENTION, case, kind(rows)),
        compiled_call=partial(bodies.attention, team, q, native, 0, table, slot, start, lengths, out, scale),
        torch_call=partial(attend_densely, dense(q, wide, table[slot.long()], rows), scale),
        bytes=2 * q.nbytes + 2 * keys * kept[0, 0, 0, 0].nbytes,
        flops=4 * heads * dim * (num_scores(start, lengths, None) + singles),
    )


Dense = tuple[Tensor, Tensor, Tensor, Tensor | None]


def dense(q: Tensor, pages: Tensor, table: Tensor, rows: Rows) -> list[Dense]:
    """Group adjacent rows of equal size: q [rows, heads, tokens, dim], k and v [rows, kv_heads, length, dim], and a
    mask of the keys that each token sees, or None if it sees all."""
    found: list[Dense] = []
    at = row = 0
    for (count, length), alike in groupby(rows):
        number = len(list(alike))
        query = q[at : at + number * count].unflatten(0, (number, count)).transpose(1, 2)
        blocks = table[row : row + number, : -(-length // pages.shape[3])]
        own = [torch.stack(gather_kv(pages, 0, one, 1.0, 1.0))[:, :length].transpose(1, 2) for one in blocks]
        k, v = torch.stack(own, 1)
        seen = torch.ones(count, length, dtype=torch.bool).tril(length - count) if count > 1 else None
        found.append((query.contiguous(), k.contiguous(), v.contiguous(), seen))
        at, row = at + number * count, row + number
    return found


def attend_densely(parts: Sequence[Dense], scale: float) -> list[Tensor]:
    return [
        scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True) for q, k, v, seen in parts
    ]
