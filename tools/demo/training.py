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
LONG_EVERY = 3  # one batch in three has long rows
WARM_UP, FLOOR = 0.02, 0.01  # share of the run in which the rate rises; share of the rate at the end
AVERAGE = 0.98  # decay of the averaged weights, which are saved and evaluated
REPORT_EVERY = 10  # steps
SAVE_SECONDS = 240.0
STATE = "state.pt"


@dataclass(frozen=True)
class Run:
    """Settings of a training run."""

    folder: Path
    seed: int
    steps: int | None
    minutes: float | None
    device: str
    workers: int
    resume: bool = False


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
    gradients = [weight.grad.flatten() for weight in weights if weight.grad is not None]
    flat = torch.cat([*gradients, torch.tensor([progress if rank == 0 else 0.0])])
    distributed.all_reduce(flat)
    for weight, part in zip(
        weights, (flat[:-1] / run.workers).split([weight.numel() for weight in weights]), strict=True
    ):
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
def accuracy(
    network: Network, tokenizer: Tokenizer, kind: torch.dtype, device: str, count: int = 16
) -> dict[str, float]:
    """Share of held-out samples of each skill whose every token is the most likely one: what greedy decoding writes."""
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


@dataclass
class State:
    """Everything that changes in a run."""

    network: Network
    optimizer: Optimizer
    averaged: dict[str, Tensor]
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def save(self, path: Path) -> None:
        """Write the complete state, so that `--resume` continues from here."""
        partial = path.with_suffix(".partial")
        counts = {"step": self.step, "tokens": self.tokens, "seconds": self.seconds}
        parts = {"network": self.network.state_dict(), "optimizer": self.optimizer.state(), "averaged": self.averaged}
        torch.save(parts | counts, partial)
        partial.replace(path)

    def load(self, path: Path, device: str) -> None:
        """Takes over what `save` wrote."""
        saved = torch.load(path, map_location=device, weights_only=True)
        self.network.load_state_dict(saved["network"])
        self.optimizer.resume(saved["optimizer"])
        self.averaged = saved["averaged"]
        self.step, self.tokens, self.seconds = saved["step"], saved["tokens"], saved["seconds"]


def _report(state: State, tokenizer: Tokenizer, run: Run, kind: torch.dtype) -> None:
    """Writes the state and the averaged weights, and prints their accuracy on held-out samples."""
    state.save(run.folder / STATE)
    measured = Network(state.network.shape).to(run.device)
    measured.load_state_dict(state.averaged)
    write_weights(run.folder, measured, state.averaged, tokenizer.token_to_id(END), tokenizer.token_to_id(PAD))
    shares = accuracy(measured, tokenizer, kind, run.device)
    print(f"step {state.step}: {', '.join(f'{skill} {share:.0%}' for skill, share in shares.items())}", flush=True)


def _begin(run: Run, vocab: int, kind: torch.dtype) -> State:
    """The state of a fresh run, or the saved one."""
    network = Network(Shape(vocab)).to(run.device)
    averaged = {name: weight.clone() for name, weight in network.state_dict().items()}
    state = State(network, Optimizer(network, kind), averaged)
    if run.resume:
        state.load(run.folder / STATE, run.device)
    return state


def _advance(state: State, rows: Rows, run: Run, rank: int, kind: torch.dtype, layer: Callable[..., Tensor]) -> float:
    """One step of all workers; sets the gradients, the weights and their average. Gives the loss."""
    state.network.zero_grad()
    loss = _step(state.network, rows, kind, layer)
    progress = state.step / run.steps if run.steps else state.seconds / 60 / (run.minutes or 1.0)
    state.optimizer.step(_rate(_agree(state.network, progress, run, rank)))
    for name, weight in state.network.state_dict().items():
        state.averaged[name].lerp_(weight, max(1 - AVERAGE, 1 / (state.step + 1)))
    state.step, state.tokens = state.step + 1, state.tokens + run.workers * rows.ids.numel()
    return loss


def _is_over(state: State, run: Run) -> bool:
    """Return true if the run has used its steps or minutes, by the clock of the first worker."""
    over = state.step >= run.steps if run.steps else state.seconds / 60 >= (run.minutes or 1.0)
    if run.workers > 1:
        vote = torch.tensor([over])
        distributed.broadcast(vote, 0)
        over = bool(vote)
    return over


def train(rank: int, run: Run) -> None:
    """One worker's whole run; the first one reports and writes."""
    torch.manual_seed(run.seed)
    if run.device == "cpu":
        torch.set_num_threads(1)
    if run.workers > 1:
        store = distributed.FileStore(str(run.folder / "store"), run.workers)
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=run.workers)
    tokenizer = Tokenizer.from_file(str(run.folder / "tokenizer.json"))
    kind, layer = _faster_type(run.device), _layer_function(run.device)
    state = _begin(run, tokenizer.get_vocab_size(), kind)
    feed = Feed(tokenizer, random.Random(f"{run.seed} {rank} {state.step}").randrange(2**32))
    if rank == 0:
        size = sum(weight.numel() for weight in state.network.parameters())
        print(f"{size:,} parameters, {kind}, {run.workers} workers, from step {state.step}", flush=True)
    measured, fresh, last = state.seconds, True, time.time()
    while not _is_over(state, run):
        batch = _batch(feed, (rank + state.step) % LONG_EVERY == 0, run.device)
        loss = _advance(state, batch, run, rank, kind, layer)
        now = time.time()
        state.seconds, last, fresh = state.seconds + (0.0 if fresh else now - last), now, False  # compilation is free
        if rank == 0 and state.step % REPORT_EVERY == 0:
            speed = state.tokens / max(state.seconds, 1.0)
            print(
                f"step {state.step}, {state.tokens / 1e6:.2f} M tokens, {speed:.0f} a second, loss {loss:.3f}",
                flush=True,
            )
        if rank == 0 and state.seconds - measured >= SAVE_SECONDS:
            measured = state.seconds
            _report(state, tokenizer, run, kind)
    if rank == 0:
        _report(state, tokenizer, run, kind)
    if run.workers > 1:
        distributed.barrier()
        distributed.destroy_process_group()
