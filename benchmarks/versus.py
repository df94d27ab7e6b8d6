"""Compare Slipway with a peer: same checkpoint, prompts, machine and arithmetic, in alternating rounds.

    python -m benchmarks.versus --peer transformers --shape qwen2.5-0.5b --concurrency 16 --requests 48 --rounds 3

Each side generates the same number of tokens for every prompt (greedy, end tokens ignored), with at most `concurrency`
requests at a time. Slipway admits the next request when one ends. transformers' `generate` takes batches of
`concurrency` padded to their longest prompt, and a batch ends with its longest reply; tokens past a request's own
limit are not counted. `--lengths equal` gives every request the same lengths, so that neither padding nor early ends
play a part and only the arithmetic is compared. Prints medians, ranges and the ratio; writes JSON.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from appliance.bench.workload import Lengths
from benchmarks.machine import facts
from benchmarks.shapes import SHAPES, make

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Job:
    """One request: prompt token ids and the exact number of tokens to generate."""

    prompt: list[int]
    tokens: int


def jobs(count: int, *, lengths: str, vocab: int, seed: int, limit: int) -> list[Job]:
    """Requests with the length mix of `slipway bench`, cut at `limit`, or all of 128 tokens in and out."""
    rng = random.Random(seed)
    prompt, reply = Lengths(100, 0.9, limit), Lengths(180, 0.9, limit)
    made = []
    for _ in range(count):
        into, out = (prompt.draw(rng), reply.draw(rng)) if lengths == "mixed" else (128, 128)
        made.append(Job([rng.randrange(10, vocab) for _ in range(into)], out))
    return made


Side = Callable[[list[Job]], None]


def slipway(checkpoint: Path, concurrency: int, threads: int, limit: int, kernels: str) -> Side:
    from engine.llm import LLM, Params

    settings = {} if kernels == "auto" else {"kernels": kernels}
    llm = LLM(
        checkpoint,
        threads=threads,
        max_running=concurrency,
        max_context=2 * limit + 8,
        prefix_cache=False,
        **settings,
    )

    def run(work: list[Job]) -> None:
        wishes = [Params(temperature=0.0, max_tokens=job.tokens, ignore_eos=True) for job in work]
        got = llm.generate([job.prompt for job in work], wishes)
        assert [len(generation.ids) for generation in got] == [job.tokens for job in work], (
            "a reply does not have the requested length"
        )

    return run


def transformers(checkpoint: Path, concurrency: int, threads: int, limit: int) -> Side:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()

    @torch.inference_mode()
    def batch(work: list[Job]) -> None:
        width, new = max(len(job.prompt) for job in work), max(job.tokens for job in work)
        ids = torch.zeros(len(work), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, job in enumerate(work):
            ids[row, width - len(job.prompt) :] = torch.tensor(job.prompt)
            mask[row, width - len(job.prompt) :] = 1
        model.generate(
            ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0
        )

    def run(work: list[Job]) -> None:
        for at in range(0, len(work), concurrency):
            batch(work[at : at + concurrency])

    return run


PEERS = {"transformers": transformers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=PEERS, default="transformers", help="server to compare with")
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-0.5b", help="shape of the random checkpoint")
    parser.add_argument("--checkpoints", type=Path, default=Path("/tmp/slipway-shapes"), help="folder of checkpoints")
    parser.add_argument("--concurrency", type=int, default=16, help="concurrent requests")
    parser.add_argument("--requests", type=int, default=48, help="requests per round")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each server")
    parser.add_argument(
        "--lengths", choices=("mixed", "equal"), default="mixed", help="mix of requests (default: mixed)"
    )
    parser.add_argument("--limit", type=int, default=512, help="longest prompt and longest reply, in tokens")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of each server")
    parser.add_argument("--kernels", nargs="+", default=["auto"], help="CPU kernels of Slipway (auto)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the workload")
    parser.add_argument("--out", type=Path, help="JSON file; default benchmarks/results/versus-….json")
    options = parser.parse_args()

    checkpoint = make(options.shape, options.checkpoints / options.shape)
    vocab = SHAPES[options.shape]["vocab_size"]
    work = jobs(options.requests, lengths=options.lengths, vocab=vocab, seed=options.seed, limit=options.limit)
    wanted = sum(job.tokens for job in work)
    prompt = sum(len(job.prompt) for job in work)
    print(
        f"{options.shape}, float32, {options.threads} threads: {len(work)} requests, {prompt} tokens in, {wanted} out"
    )
    sides = {
        **{
            "slipway" if kernels == "auto" else f"slipway {kernels}": slipway(
                checkpoint, options.concurrency, options.threads, options.limit, kernels
            )
            for kernels in options.kernels
        },
        options.peer: PEERS[options.peer](checkpoint, options.concurrency, options.threads, options.limit),
    }
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for run in sides.values():
        run([Job(job.prompt[:8], 4) for job in work[: options.concurrency]])  # excludes first-call costs
    for round_ in range(options.rounds):
        for name, run in sides.items():
            torch.set_num_threads(options.threads)
            start = time.perf_counter()
            run(work)
            rates[name].append(wanted / (time.perf_counter() - start))
            print(f"round {round_ + 1}  {name:14s} {rates[name][-1]:8.1f} new tokens/s", flush=True)
    report(options, rates, {"requests": len(work), "prompt_tokens": prompt, "new_tokens": wanted})


def report(options: argparse.Namespace, rates: dict[str, list[float]], sizes: dict[str, int]) -> None:
    median = {name: statistics.median(values) for name, values in rates.items()}
    for name, values in rates.items():
        print(f"{name:14s} median {median[name]:8.1f} new tokens/s  [{min(values):.1f} – {max(values):.1f}]")
    ratios = {name: rate / median[options.peer] for name, rate in median.items() if name != options.peer}
    for name, ratio in ratios.items():
        print(f"ratio {name} / {options.peer}: {ratio:.2f}")
    path = options.out or RESULTS / f"versus-{options.peer}-{options.shape}-{options.lengths}.json"
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
    settings = {key: value for key, value in settings.items() if key not in ("out", "checkpoints")}
    value = {"settings": settings, "sizes": sizes, "tokens_per_s": rates, "ratios": ratios, "machine": asdict(facts())}
    path.write_text(json.dumps(value, indent=1) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
