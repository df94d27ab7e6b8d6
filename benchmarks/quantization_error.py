"""Measure the accuracy that a model loses when its weights are rounded to 8 or 4 bits.

    python -m benchmarks.quantization_error [--checkpoint DIR --random] [--bits int8 int4]

The tokens are held-out conversations of the demo model, scored in its answers, or random tokens, which work with any
checkpoint (`--random`, required for other checkpoints than the demo). Reports for stored and rounded weights:
perplexity, share of positions with the same most likely token, and mean |difference| of the log probability of the
actual token. Writes JSON.
"""

import argparse
import json
import math
import random
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.machine import facts
from engine.api.config import WeightBits
from engine.llm import LLM, Params

DEMO = Path(__file__).parent.parent / "manifests" / "demo"
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Text:
    """Token ids, and the first scored position."""

    ids: list[int]
    start: int


@dataclass(frozen=True)
class Score:
    """Log probability of the token, and most likely token, of each scored position."""

    logprobs: list[float]
    best: list[int]


@dataclass(frozen=True)
class Cost:
    perplexity: float
    same_best: float
    logprob_change: float


def conversations(count: int, without: Collection[str] = ()) -> list[Text]:
    """Return `count` held-out conversations of each skill of the demo model, except the skills in `without`."""
    from tokenizers import Tokenizer

    from tools.demo.packing import encode
    from tools.demo_corpus import SKILLS, held_out_samples

    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    pieces = [
        encode(tokenizer, sample)
        for skill in SKILLS
        if skill not in without
        for sample in held_out_samples(skill, count)
    ]
    return [Text(list(piece.ids), piece.trained.index(True)) for piece in pieces]


def random_texts(vocab: int, count: int, length: int = 128) -> list[Text]:
    rng = random.Random(0)
    return [Text([rng.randrange(vocab) for _ in range(length)], 1) for _ in range(count)]


def score(checkpoint: Path, texts: Sequence[Text], bits: WeightBits) -> Score:
    ids = [text.ids for text in texts]
    longest = max(map(len, ids)) + 1
    with LLM(checkpoint, weights=bits, max_context=longest, prefix_cache=False) as llm:
        made = llm.generate(ids, Params(temperature=0.0, max_tokens=1, prompt_logprobs=1))
    logprobs, best = [], []
    for text, generation in zip(texts, made, strict=True):
        for found in (generation.prompt_logprobs or ())[text.start :]:
            if found is not None:
                logprobs.append(found.logprob)
                best.append(found.top_ids[0])
    return Score(logprobs, best)


def cost(stored: Score, rounded: Score) -> Cost:
    count = len(stored.logprobs)
    return Cost(
        perplexity=math.exp(-sum(rounded.logprobs) / count),
        same_best=sum(a == b for a, b in zip(stored.best, rounded.best, strict=True)) / count,
        logprob_change=sum(abs(a - b) for a, b in zip(stored.logprobs, rounded.logprobs, strict=True)) / count,
    )


def compare(checkpoint: Path, texts: Sequence[Text], bits: Sequence[WeightBits]) -> dict[str, Cost]:
    stored = score(checkpoint, texts, "stored")
    return {"stored": cost(stored, stored)} | {one: cost(stored, score(checkpoint, texts, one)) for one in bits}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=DEMO, help="folder (default: the demo model)")
    parser.add_argument("--random", action="store_true", help="random tokens instead of conversations")
    parser.add_argument("--count", type=int, default=20, help="conversations of each skill, or random texts")
    parser.add_argument("--bits", nargs="+", choices=("int8", "int4"), default=("int8", "int4"))
    parser.add_argument("--out", type=Path, help="JSON file; default benchmarks/results/quantization-error-….json")
    options = parser.parse_args()
    if options.checkpoint != DEMO and not options.random:
        parser.error("the conversations are for the demo model; use --random with another checkpoint")
    vocab = json.loads((options.checkpoint / "config.json").read_text())["vocab_size"]
    texts = random_texts(vocab, options.count) if options.random else conversations(options.count)
    found = compare(options.checkpoint, texts, options.bits)
    print(f"{options.checkpoint.name}, {sum(len(text.ids) - text.start for text in texts)} positions scored")
    print("weights   perplexity   same best token   |change of log probability|")
    for name, one in found.items():
        print(f"{name:8s} {one.perplexity:11.4f}   {one.same_best:14.2%}   {one.logprob_change:12.5f}")
    kind = "random" if options.random else "conversations"
    path = options.out or RESULTS / f"quantization-error-{options.checkpoint.name}-{kind}.json"
    value = {"cost": {name: asdict(one) for name, one in found.items()}, "machine": asdict(facts())}
    path.write_text(json.dumps(value, indent=1) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
