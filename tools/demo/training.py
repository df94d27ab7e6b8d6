"""The training loop: workers with a thread each that average their gradients once a step.

On a CPU shared with other work, one thread each beats one process with two threads: nothing waits inside an operation.
"""

import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, distributed

from tools.demo.network import Network, Rows, Shape, apply_layer, scores_of_targets
from tools.demo.optimizer import Optimizer
from tools.demo.packing import LONG_ROW, SHORT_ROW, Feed, Row, encode, stack
from tools.demo.tokenizer import END, PAD
from tools.demo.written import write_weights
from tools.demo_corpus import SKILLS, held_out_samples

SHORT_ROWS, LONG_ROWS = 32, 8  # in a batch
LONG_EVERY = 3  # one batch in so many has long rows
WARM_UP, FLOOR = 0.02, 0.01  # share of the run in which the rate rises; share of the rate at the end
AVERAGE = 0.98  # of the weights over steps: what is written and measured
REPORT_EVERY, MEASURE_EVERY = 10, 150


@dataclass(frozen=True)
class Run:
    """What one training run is given."""

    folder: Path
    seed: int
    steps: int | None
    minutes: float | None
    device: str
    workers: int


def _faster_type(device: str) -> torch.dtype:
    """bfloat16 where a product in it takes less time than in float32."""
    if device == "cuda":
        return torch.bfloat16
    best = {}
    for kind in (torch.float32, torch.bfloat16):
        x, y = torch.ones(1024, 256, dtype=kind), torch.ones(256, 512, dtype=kind)
        x @ y
        began = time.perf_counter()
        for _ in range(10):
            x @ y
        best[kind] = time.perf_counter() - began
    return min(best, key=lambda kind: best[kind])


def _layer_function(device: str) -> Callable[..., Tensor]:
    """The layer, compiled where there is a compiler: about twice as fast on a CPU."""
    return torch.compile(apply_layer, dynamic=False) if device == "cuda" or shutil.which("g++") else apply_layer


def _rate(progress: float) -> float:
    return min(1.0, progress / WARM_UP) * max(FLOOR, 1 - progress)


def _agree(network: Network, progress: float, run: Run, rank: int) -> float:
    """Averages the gradients over the workers; all take the first worker's progress."""
    if run.workers == 1:
        return progress
    weights = [weight for weight in network.parameters() if weight.grad is not None]
    flat = torch.cat([*(weight.grad.flatten() for weight in weights), torch.tensor([progress if rank == 0 else 0.0])])  # type: ignore[union-attr]
    distributed.all_reduce(flat)
    for weight, part in zip(weights, (flat[:-1] / run.workers).split([weight.numel() for weight in weights]), strict=True):
        weight.grad = part.view_as(weight)
    return float(flat[-1])


def _batch(feed: Feed, long: bool, device: str) -> Rows:
    scale = 8 if device == "cuda" else 1
    if long:
        return stack(feed.long_rows(LONG_ROWS * scale), LONG_ROW, device)
    return stack(feed.short_rows(SHORT_ROWS * scale), SHORT_ROW, device)


def _step(network: Network, rows: Rows, kind: torch.dtype, layer: Callable[..., Tensor]) -> float:
    """Gradients of the mean loss over the batch's targets."""
    logits, targets = scores_of_targets(network, rows, kind, layer)
    loss = torch.nn.functional.cross_entropy(logits, targets)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item()


@torch.no_grad()
def accuracy(network: Network, tokenizer: Tokenizer, kind: torch.dtype, device: str, count: int = 16) -> dict[str, float]:
    """Share of held-out samples of each skill whose every token is the most likely one, which is what greedy decoding writes."""
    shares = {}
    for skill in SKILLS:
        pieces = [encode(tokenizer, sample) for sample in held_out_samples(skill, count)]
        right = 0
        for begin in range(0, count, 8):
            rows = [Row() for _ in pieces[begin : begin + 8]]
            for row, piece in zip(rows, pieces[begin : begin + 8], strict=True):
                row.add([piece])
            longest = max(len(row.ids) for row in rows)
            batch = stack(rows, longest, device)
            logits, targets = scores_of_targets(network, batch, kind)
            hits = (logits.argmax(-1) == targets).split((batch.targets >= 0).sum(-1).tolist())
            right += sum(int(hit.all()) for hit in hits)
        shares[skill] = right / count
    return shares


def _report(network: Network, averaged: dict[str, Tensor], tokenizer: Tokenizer, run: Run, kind: torch.dtype) -> str:
    """Writes the averaged weights and measures them."""
    measured = Network(network.shape).to(run.device)
    measured.load_state_dict(averaged)
    write_weights(run.folder, network, averaged, tokenizer.token_to_id(END), tokenizer.token_to_id(PAD))
    return ", ".join(f"{skill} {share:.0%}" for skill, share in accuracy(measured, tokenizer, kind, run.device).items())


def train(rank: int, run: Run) -> None:
    """One worker's whole run; the first one reports and writes."""
    torch.manual_seed(run.seed)
    if run.device == "cpu":
        torch.set_num_threads(1)
    if run.workers > 1:
        store = distributed.FileStore(str(run.folder / "store"), run.workers)
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=run.workers)
    tokenizer = Tokenizer.from_file(str(run.folder / "tokenizer.json"))
    feed = Feed(tokenizer, random.Random(f"{run.seed} {rank}").randrange(2**32))
    kind, layer = _faster_type(run.device), _layer_function(run.device)
    network = Network(Shape(tokenizer.get_vocab_size())).to(run.device)
    optimizer, averaged = Optimizer(network, kind), {name: weight.clone() for name, weight in network.state_dict().items()}
    if rank == 0:
        print(f"{sum(weight.numel() for weight in network.parameters()):,} parameters, {kind}, {run.workers} workers", flush=True)
    began, step, tokens, progress = time.time(), 0, 0, 0.0
    while progress < 1:
        batch = _batch(feed, (rank + step) % LONG_EVERY == 0, run.device)
        network.zero_grad()
        loss = _step(network, batch, kind, layer)
        if step == 0:
            began = time.time()  # compilation is over
        progress = step / run.steps if run.steps else (time.time() - began) / 60 / (run.minutes or 1.0)
        progress = _agree(network, progress, run, rank)
        optimizer.step(_rate(progress))
        for name, weight in network.state_dict().items():
            averaged[name].lerp_(weight, max(1 - AVERAGE, 1 / (step + 1)))
        step, tokens = step + 1, tokens + run.workers * batch.ids.numel()
        if rank == 0 and step % REPORT_EVERY == 0:
            speed = tokens / (time.time() - began)
            print(f"step {step}, {progress:.1%}, {tokens / 1e6:.2f} M tokens, {speed:.0f} tokens/s, loss {loss:.3f}", flush=True)
        if rank == 0 and (step % MEASURE_EVERY == 0 or progress >= 1):
            print(f"step {step}: {_report(network, averaged, tokenizer, run, kind)}", flush=True)
    if run.workers > 1:
        distributed.destroy_process_group()
