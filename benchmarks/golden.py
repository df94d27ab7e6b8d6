"""Measure the faults that golden prompts detect.

`python -m benchmarks.golden [FAULTS]` injects FAULTS faults of each kind into the memory of an engine of the demo model
and counts the faults that the self-test detects, with exact comparison and within the float32 tolerance.
"""

import argparse
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.api.config import EngineConfig, SelfTest
from engine.api.golden import BANDS, Band, Recorded, difference
from engine.arguments import engine_config
from engine.golden import record
from engine.worker.build import build_worker
from kernels.cpu.library import best

DEMO = Path(__file__).resolve().parents[1] / "manifests" / "demo"
BITS, WIDE = Band(0.0, ""), Band(BANDS["float32"], "")
PLACES = {"highest of the exponent": (14, 30), "highest of the mantissa": (6, 22), "lowest of the mantissa": (0, 0)}
"""Number of a bit, in bfloat16 and in float32."""

Fault = Callable[[random.Random], AbstractContextManager[None]]
Change = Callable[[Tensor, int], None]


def configured(**changes: Any) -> EngineConfig:
    """An engine of the demo model with four golden prompts."""
    plain = {"model": str(DEMO), "kv_bytes": 8_000_000, "max_context": 512, "kernels": best(), "threads": 2}
    return engine_config(**{**plain, "self_test": SelfTest(prompts=4), **changes})


def differing(expected: Recorded, found: Recorded, band: Band) -> list[str]:
    """Names of prompts that are not within the band; one whose logits are not finite was not recorded, and is not."""
    made = {one.prompt: one for one in found.goldens}
    return [
        one.prompt.name for one in expected.goldens if one.prompt not in made or difference(one, made[one.prompt], band)
    ]


class EngineUnderTest:
    """A worker whose memory is changed under it, and mended again."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self.worker: Any = build_worker(config, lambda phase, fraction: None)
        self.good = self.record()
        self.model = self.worker._runner._text_model

    def record(self) -> Recorded:
        return record(self._config, self.worker)

    @property
    def weights(self) -> list[Tensor]:
        """Matrices and norms as kernels read them."""
        loaded = self.model.weights.by_name.values()
        held = [*(layer.weight for layer in loaded if hasattr(layer, "weight")), self.model.vocabulary.head]
        return [one if isinstance(one, Tensor) else one.data for one in held]

    def seen(self) -> tuple[bool, bool]:
        """Return whether prompts differ in any bit, and whether they differ by more than the float32 tolerance."""
        found = self.record()
        return bool(differing(self.good, found, BITS)), bool(differing(self.good, found, WIDE))

    @contextmanager
    def changed(self, weight: Tensor, change: Callable[[Tensor], object]) -> Iterator[None]:
        with torch.inference_mode():
            before = weight.clone()
            change(weight)
            yield
            weight.copy_(before)

    def bit(self, place: str, rng: random.Random) -> AbstractContextManager[None]:
        """One bit of one number of one weight."""
        weight = rng.choice(self.weights)
        words = weight.view(torch.int16 if weight.element_size() == 2 else torch.int32)
        bit = PLACES[place][weight.element_size() == 4]
        at = tuple(rng.randrange(size) for size in words.shape)

        def flip(_: Tensor) -> None:
            words[at] = int(words[at]) ^ (1 << bit)

        return self.changed(weight, flip)

    def rows(self, change: Change, rng: random.Random) -> AbstractContextManager[None]:
        """A row of a matrix, or it and the next; of matrices that are not packed."""
        weight = rng.choice([one for one in self.weights if one.dim() == 2 and one.shape[0] > 100])
        row = rng.randrange(weight.shape[0] - 1)
        return self.changed(weight, lambda kept: change(kept, row))

    @contextmanager
    def zeroed_page(self, rng: random.Random | None = None) -> Iterator[None]:
        """Between the prompt and its reply."""
        start, pages = self.worker.start, self.worker._runner._pages

        def zero_first(plan: Any, masks: Any) -> Any:
            if plan.rows[0].first:
                pages[self.worker.reserved[0]].zero_()
            return start(plan, masks)

        self.worker.start = zero_first
        try:
            yield
        finally:
            self.worker.start = start


def scale(weight: Tensor, row: int) -> None:
    weight[row] *= 1.5


def swap(weight: Tensor, row: int) -> None:
    weight[[row, row + 1]] = weight[[row + 1, row]]


def faults(victim: EngineUnderTest, kernels: str) -> dict[str, Fault]:
    kinds: dict[str, Fault] = {f"a bit, {place}": partial(victim.bit, place) for place in PLACES}
    if kernels == "torch":
        kinds |= {"a row times 1.5": partial(victim.rows, scale), "two rows swapped": partial(victim.rows, swap)}
    return kinds | {"a page zeroed": victim.zeroed_page}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.golden", description=__doc__)
    parser.add_argument("faults", type=int, nargs="?", default=60, help="injected faults of each kind (60)")
    count = parser.parse_args(arguments).faults
    print(f"{'kernels':8} {'fault':32} {'faults':>7} {'bit for bit':>12} {'within 0.1 %':>13}")
    for kernels in (best(), "torch"):
        victim, rng = EngineUnderTest(configured(kernels=kernels)), random.Random(1)
        for name, fault in faults(victim, kernels).items():
            bits = band = 0
            times = count if "page" not in name else 1
            for _ in range(times):
                with fault(rng):
                    seen = victim.seen()
                bits, band = bits + seen[0], band + seen[1]
            print(f"{kernels:8} {name:32} {times:>7} {bits:>12} {band:>13}")
        victim.worker.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
