"""The engines that `benchmarks.cpu` puts side by side: one module each, named in `MODULES`, that can `load` a model.

A side runs in a process of its own (`python -m benchmarks.sides`), with the interpreter that has its packages; nothing
here but `slipway` imports the project. `load(checkpoint, bits, variant, threads, most)` returns what measures a job in
tokens a second.

What is timed is the same for all: of a decode job, from the last request's first token to that request's last; of a
prefill, from its start to its first token. Rounds of one job repeat the same prompts, which a side may keep in its
cache: decoding is measured, not their prefill. A prefill job's prompts are new in every round.
"""

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass

STEPS = 24  # decode steps of one measurement
MODULES = {
    "slipway": "slipway",
    "slipway-http": "slipway_http",
    "llama.cpp": "llama_cpp",
    "ik_llama.cpp": "ik_llama_cpp",
    "transformers": "transformers",
    "onnxruntime": "onnxruntime",
    "openvino": "openvino",
}


@dataclass(frozen=True)
class Job:
    """`batch` 0: a prefill of `context` tokens."""

    batch: int
    context: int

    @property
    def name(self) -> str:
        return f"decode:{self.batch}:{self.context}" if self.batch else f"prefill:{self.context}"


Measure = Callable[[Job], float]


def job(text: str) -> Job:
    kind, *sizes = text.split(":")
    numbers = [int(size) for size in sizes]
    if kind == "decode" and len(numbers) == 2:
        return Job(numbers[0], numbers[1])
    if kind == "prefill" and len(numbers) == 1:
        return Job(0, numbers[0])
    raise argparse.ArgumentTypeError(f"{text}: must be decode:BATCH:CONTEXT or prefill:TOKENS")


@dataclass(frozen=True)
class Name:
    """`engine[@variant]:bits`. The variant of slipway is that of its compiled kernels; avx2 asks the libraries of the
    others to keep to AVX2 where they can be asked; else it only tells two builds apart."""

    engine: str
    variant: str
    bits: str

    def __str__(self) -> str:
        return f"{self.build}:{self.bits}"

    @property
    def build(self) -> str:
        return f"{self.engine}@{self.variant}" if self.variant else self.engine


def name(text: str) -> Name:
    build, _, bits = text.partition(":")
    engine, _, variant = build.partition("@")
    if not bits or engine not in MODULES:
        raise argparse.ArgumentTypeError(f"{text}: must be ENGINE[@VARIANT]:BITS, ENGINE one of {', '.join(MODULES)}")
    return Name(engine, variant, bits)


def prompts(count: int, length: int, vocab: int, start: int = 0) -> list[list[int]]:
    """Return the token ids of `count` random prompts, the same ones for the same arguments. Prompts of different
    arguments share no beginning, so an engine's prefix cache has none of them."""
    rng = random.Random(f"{count} {length} {start}")
    return [[rng.randrange(10, vocab) for _ in range(length)] for _ in range(count)]
