"""Compare embedding throughput on a CPU with transformers: same checkpoint, tokens and threads, alternating rounds.

    python -m benchmarks.encoders CHECKPOINT [--texts 64] [--lengths 8 16 32 64 128] [--batch 32] [--rounds 7]

Prints texts per second (median, range) and the largest difference between the vectors of both. Lengths are drawn from
`--lengths` with a fixed seed. transformers pads its batches and gets texts sorted by length, as in
sentence-transformers.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from engine.api.messages import Pooling
from engine.llm import LLM

Vectors = list[np.ndarray]


def peer(path: Path, batch: int) -> Callable[[list[list[int]]], Vectors]:
    """transformers with fused attention, mean pooling without padding, and unit length."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(path, attn_implementation="sdpa", dtype=torch.float32).eval()

    def embed(prompts: list[list[int]]) -> Vectors:
        order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
        found: dict[int, np.ndarray] = {}
        for at in range(0, len(order), batch):
            some = order[at : at + batch]
            width = max(len(prompts[number]) for number in some)
            ids = torch.tensor([prompts[number] + [0] * (width - len(prompts[number])) for number in some])
            mask = torch.tensor([[1] * len(prompts[n]) + [0] * (width - len(prompts[n])) for n in some])
            with torch.inference_mode():
                hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
            pooled = (hidden * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
            found |= zip(some, torch.nn.functional.normalize(pooled, dim=1).numpy(), strict=True)
        return [found[number] for number in range(len(prompts))]

    return embed


def drawn(texts: int, lengths: Sequence[int], vocab: int) -> list[list[int]]:
    draw = random.Random(7)
    return [[draw.randrange(1000, vocab) for _ in range(draw.choice(lengths))] for _ in range(texts)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8, 16, 32, 64, 128])
    parser.add_argument("--batch", type=int, default=32, help="batch size of transformers")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    embed = peer(options.checkpoint, options.batch)
    with LLM(options.checkpoint, threads=options.threads) as llm:
        prompts = drawn(options.texts, options.lengths, llm.vocab)
        sides = {
            llm.config.hardware.kernels: lambda: llm.pool(prompts, Pooling("embed")),
            "transformers": lambda: embed(prompts),
        }
        took: dict[str, list[float]] = {name: [] for name in sides}
        last: dict[str, Vectors] = {}
        for number in range(options.rounds + 1):
            for name, side in sides.items():
                start = time.perf_counter()
                last[name] = side()
                if number:  # the first one warms up
                    took[name].append(time.perf_counter() - start)
    tokens = sum(map(len, prompts))
    print(f"{options.texts} texts of {tokens} tokens, {options.threads} threads, {options.rounds} rounds")
    for name, times in took.items():
        rates = sorted(options.texts / each for each in times)
        print(f"{name:>12}: {statistics.median(rates):8.1f} texts/s ({rates[0]:.1f} … {rates[-1]:.1f})")
    ours, theirs = (np.stack(vectors) for vectors in last.values())
    print(f"largest difference of vector elements: {np.abs(ours - theirs).max():.1e}")


if __name__ == "__main__":
    main()
