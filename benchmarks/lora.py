"""Measure decoding with LoRA adapters, relative to the base model: rows over several adapters in one batch.

    python -m benchmarks.lora [--shape qwen2.5-0.5b] [--weights stored,int8] [--rows 16] [--adapters 8] [--rank 16]

The checkpoint has random weights in the shape of a known model, and the adapters change all projections. One engine
has loaded them, and rounds of both kinds alternate in one run: all rows without an adapter, then row i with adapter
i mod `--adapters`. Rates are tokens per second of all rows: the median of the rounds, the smallest and the largest.

    python -m benchmarks.lora --weights int8 --python llama.cpp=/opt/llama/bin/python

also measures llama.cpp in the same rounds, without and with the first adapter in all rows, because its context has one
set of adapters for all rows. Its weights have as many bits.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.llama_cpp_peer import NAME, LlamaCppPeer, add_option
from benchmarks.shapes import make
from engine.llm import LLM, Params
from engine.lowering.adapters import adapted_shapes
from engine.models.checkpoint import read_checkpoint

PROMPT = 64  # tokens


@dataclass(frozen=True)
class Rate:
    """Tokens per second."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Rate":
        return cls(statistics.median(samples), min(samples), max(samples))


@dataclass(frozen=True)
class Result:
    weights: str
    rows: int
    adapters: int
    rank: int
    adapter_bytes: int
    base: Rate
    adapted: Rate
    peer_base: Rate | None = None  # of llama.cpp
    peer_adapted: Rate | None = None  # with one adapter in all rows

    @property
    def relative(self) -> float:
        return self.adapted.median / self.base.median

    @property
    def peer_relative(self) -> float | None:
        if self.peer_base is None or self.peer_adapted is None:
            return None
        return self.peer_adapted.median / self.peer_base.median


def write_adapters(checkpoint: Path, out: Path, count: int, rank: int) -> dict[str, Path]:
    """Write adapters of all projections with random numbers."""
    shapes = adapted_shapes(read_checkpoint(checkpoint).model)
    folders = {f"adapter-{number}": out / f"adapter-{number}" for number in range(count)}
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none", "target_modules": None}
    for number, folder in enumerate(folders.values()):
        made, tensors = torch.Generator().manual_seed(number), {}
        for path, (outputs, inputs) in shapes.items():
            for side, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                name = f"base_model.model.{path}.lora_{side}.weight"
                tensors[name] = (torch.randn(shape, generator=made) * 0.01).to(torch.bfloat16)
        folder.mkdir()
        save_file(tensors, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(config))
    return folders


Samples = tuple[list[float], list[float]]  # without and with adapters


def measure(
    llm: LLM, names: Sequence[str], rows: int, tokens: int, rounds: int, peer: LlamaCppPeer | None = None
) -> tuple[Samples, Samples]:
    """Return the rates of this engine and of llama.cpp. The latter are empty without `peer`."""
    own: Samples = ([], [])
    others: Samples = ([], [])
    for number in range(rounds + 1):  # the first one warms up
        for kind, chosen in enumerate((("",), names)):
            prompts = [[(row * 7 + at * 3 + number) % 1000 for at in range(PROMPT)] for row in range(rows)]
            params = [_params(tokens, chosen[row % len(chosen)]) for row in range(rows)]
            rate = _rate(llm, prompts, params)
            if number:
                own[kind].append(rate)
            if peer is not None:
                rate = peer.measure("rows", rows=rows, tokens=tokens, prompt=PROMPT, adapter=kind == 1)
                if number:
                    others[kind].append(rate)
    return own, others


def _params(tokens: int, adapter: str) -> Params:
    return Params(temperature=0.0, max_tokens=tokens, ignore_eos=True, adapter=adapter)


def _rate(llm: LLM, prompts: Sequence[Sequence[int]], params: Sequence[Params]) -> float:
    """Return the tokens per second of decoding, from the last first token to the first last one."""
    timings = [generation.timing for generation in llm.generate(prompts, params)]
    found = [timing for timing in timings if timing is not None]
    start, end = max(timing.first_token for timing in found), min(timing.last_token for timing in found)
    return len(found) * (params[0].max_tokens - 1) / max(end - start, 1e-9)


def run(checkpoint: Path, weights: str, options: argparse.Namespace) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        folders = write_adapters(checkpoint, Path(folder), options.adapters, options.rank)
        sizes: dict[str, Any] = {"max_running": options.rows, "max_context": 512, "prefix_cache": False}
        threads = torch.get_num_threads()
        peer: AbstractContextManager[LlamaCppPeer | None] = nullcontext()
        if options.python:
            room = options.rows * (PROMPT + options.tokens + 1)
            first = next(iter(folders.values()))
            peer = LlamaCppPeer(
                options.python, checkpoint, weights, threads=threads, tokens=room, rows=options.rows, adapter=first
            )
        with peer as other, LLM(checkpoint, weights=weights, adapters=folders, threads=threads, **sizes) as llm:
            own, others = measure(llm, list(folders), options.rows, options.tokens, options.rounds, other)
            held = llm._worker.memory_usage["adapters"]
    rates = [Rate.of(one) if one else None for one in (*own, *others)]
    base, adapted, *peers = rates
    assert base is not None and adapted is not None, "there is a round"
    return Result(weights, options.rows, options.adapters, options.rank, held, base, adapted, *peers)


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--checkpoint", type=Path, help="an existing checkpoint, in place of --shape")
    parser.add_argument("--weights", default="stored,int8")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    add_option(parser)
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = options.checkpoint or make(options.shape, Path(folder) / options.shape)
        results = [run(checkpoint, weights, options) for weights in options.weights.split(",")]
    for one in results:
        print(
            f"{one.weights}: base {_text(one.base)}, {one.rows} rows over {one.adapters} adapters of rank {one.rank} "
            f"{_text(one.adapted)} tok/s: {100 * one.relative:.1f} % of the base ({one.adapter_bytes / 2**20:.0f} MiB)"
        )
        if one.peer_base is not None and one.peer_adapted is not None and one.peer_relative is not None:
            print(
                f"{one.weights}, {NAME}: base {_text(one.peer_base)}, one adapter in all rows "
                f"{_text(one.peer_adapted)} tok/s: {100 * one.peer_relative:.1f} % of its base"
            )
    if options.out is not None:
        found = [{**asdict(one), "relative": one.relative, "peer_relative": one.peer_relative} for one in results]
        options.out.write_text(json.dumps(found, indent=1))
    return results


def _text(rate: Rate) -> str:
    return f"{rate.median:.1f} ({rate.low:.1f} to {rate.high:.1f})"


if __name__ == "__main__":
    main()
