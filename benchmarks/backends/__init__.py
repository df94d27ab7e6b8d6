"""Engines that `benchmarks.cpu` compares: one module each, listed in `MODULES`, with a function `load`.

Each engine runs in a separate process (`python -m benchmarks.backends`), with the interpreter that has its packages;
only `slipway` imports the project. `load(checkpoint, bits, variant, threads, most)` returns a function that measures a
job in tokens per second.

The measured time is the same for all engines: for a decode job, from the first to the last token of the last request;
for a prefill, from its start to its first token. Rounds of a decode job repeat the same prompts, which an engine may
cache, because only decoding is measured. Prompts of a prefill job are new in every round.
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
    """`engine[@variant]:bits`.

    For slipway, the variant selects compiled kernels. For other engines, avx2 restricts their libraries to AVX2 if
    possible; other variants only distinguish builds.
    """

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
    """Return the token ids of `count` random prompts, the same ones for the same arguments.

    Prompts of different arguments have no common prefix, so an engine's prefix cache does not contain them.
    """
    rng = random.Random(f"{count} {length} {start}")
    return [[rng.randrange(10, vocab) for _ in range(length)] for _ in range(count)]
