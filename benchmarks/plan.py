"""Compare planned and allocated bytes for every supported architecture and format.

`python -m benchmarks.plan [--result FILE] [--rows FILE]` writes tiny random checkpoints (with the writers of the tests:
transformers and writers of quantized formats), plans each for a CPU with two context sizes, builds the engine and
counts its tensors. Checkpoints that two ranks can share are also built with two ranks. For the wide checkpoint the
resident memory of the process is measured too.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers

from appliance.config.settings import Given, Option, load
from appliance.hardware.machine import Machine
from appliance.planning.plan import plan
from benchmarks.machine import facts
from engine.api.messages import PhaseMemory
from engine.lowering.footprint import PARTS
from engine.models.checkpoint import read_checkpoint
from engine.models.ranks import tensor_problem
from engine.worker.build import build_worker
from engine.worker.memory import trim_heap
from engine.worker.ranks import Ranks
from kernels.cpu.library import best, usable
from tests.engine.layers import test_gguf
from tests.engine.layers.conftest import CASES, random_model
from tests.engine.quantized_writers import KINDS, write

CONTEXTS = (2, 16)  # tokens: the shortest, and the longest that all tiny checkpoints support
GGUF_TYPES = ("F16", "BF16", "Q4_0", "Q8_0", "Q5_0")
HOST = Machine(2, "affinity", 16 * 2**30, "MemAvailable", no_gpu="not used", kernels=usable())
RESULT = Path(__file__).parent / "results" / "plan.json"


@dataclass(frozen=True)
class Row:
    """Bytes of rank number `rank` of `ranks`.

    measured: resident memory that loading added, as counted by the kernel; None if too small to measure.
    """

    architecture: str
    checkpoint: str
    stored: str
    kernels: str
    rounded: str
    context: int
    planned: dict[str, int]
    held: dict[str, int]
    planned_mapped: int
    mapped: int
    measured: int | None = None
    rank: int = 0
    ranks: int = 1

    @property
    def worst(self) -> float:
        """The largest share by which a part differs."""
        every = self.planned.keys() | self.held.keys()
        pairs = [(self.planned.get(part, 0), self.held.get(part, 0)) for part in every]
        return max(abs(held - planned) / max(planned, held, 1) for planned, held in pairs)


def measure(path: Path, name: str, stored: str, *sets: str, wide: bool = False) -> list[Row]:
    """A row for each rank."""
    checkpoint = read_checkpoint(path)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "m.yaml"
        file.write_text(f"apiVersion: slipway/v2\nmodel: {{source: {{path: {path}}}}}\n")
        given = ("hardware.threads=1", "engine.scheduling.max_running=5", "quantization.keep=false", *sets)
        options = tuple(Option("--set", *one.split("=", 1)) for one in given)
        made = plan(load(Given(file, options, {})), checkpoint, HOST)
    config, taken = made.engines[0], dict[str, PhaseMemory]()
    trim_heap()  # excludes memory that previous engines have freed
    ranks = Ranks(config) if config.parallelism.tensor > 1 else None
    worker = build_worker(config, lambda phase, fraction: None, taken.__setitem__, ranks)
    worker.close()
    return [
        Row(
            architecture=checkpoint.architecture,
            checkpoint=name,
            stored=stored,
            kernels=config.hardware.kernels,
            rounded=config.quantization.weights,
            context=config.model.max_context,
            planned=config.memory.ranks[rank],
            held=memory.held,
            planned_mapped=made.memory.ranks[rank].mapped,
            mapped=memory.mapped,
            measured=taken["loading"].kept if wide else None,
            rank=rank,
            ranks=config.parallelism.tensor,
        )
        for rank, memory in enumerate(worker.memory)
    ]


def rows(folder: Path) -> Iterator[Row]:
    for name in CASES:
        model = random_model(name)
        for stored, dtype in (("F32", torch.float32), ("BF16", torch.bfloat16)):
            path = folder / name / stored
            model.to(dtype).save_pretrained(path)
            yield from _variants(path, name, stored, bits=("auto", "int8", "int4"))
    for name, kind in KINDS.items():
        path = write(folder / name, kind).path
        yield from _variants(path, name, str(kind.settings["quant_method"]))
    for kind in GGUF_TYPES:
        for architecture in ("Llama", "Qwen3"):
            path = test_gguf.write(folder / f"{architecture}-{kind}", {"": test_gguf.Type[kind]}, architecture)
            yield from _variants(path, f"{architecture.lower()}-gguf", f"gguf {kind}")
    yield from _wide(folder / "wide")


def _variants(path: Path, name: str, stored: str, bits: tuple[str, ...] = ("auto",)) -> Iterator[Row]:
    for context in CONTEXTS:
        asked = f"model.max_context={context}"
        yield from measure(path, name, stored, asked, "hardware.kernels=torch")
        for one in bits if usable() else ():
            yield from measure(path, name, stored, asked, f"hardware.kernels={best()}", f"quantization.weights={one}")
    if stored != "F32":  # ranks split tensors of all types in the same way
        yield from _shared(path, name, stored, f"model.max_context={CONTEXTS[-1]}")


def _shared(path: Path, name: str, stored: str, asked: str) -> Iterator[Row]:
    """By two ranks, where they can."""
    read = read_checkpoint(path)
    for kernels in ("torch", best()):
        if tensor_problem(read.model, read.quantization, 2, "torch" if kernels == "torch" else "compiled") is None:
            sets = (f"hardware.kernels={kernels}", "parallelism.tensor=2", "hardware.cpus=none")
            yield from measure(path, name, stored, asked, *sets)


def _wide(path: Path) -> Iterator[Row]:
    """84 million parameters: enough for the kernel's count to mean something."""
    config = transformers.LlamaConfig(
        vocab_size=40000,
        hidden_size=1024,
        intermediate_size=6000,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=64,
    )
    transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(path)
    measure(path, "wide", "BF16", "hardware.kernels=torch")  # what libraries set up on first use is not counted
    for sets in (("hardware.kernels=torch",), (), ("quantization.weights=int8",), ("quantization.weights=int4",)):
        yield from measure(path, "wide", "BF16", *sets, wide=True)


@dataclass(frozen=True)
class Group:
    """Rows with the same stored format, kernels, rounding and number of ranks. Bytes are sums over the rows."""

    stored: str
    kernels: str
    rounded: str
    ranks: int
    counted: int
    weights_planned: int
    weights_held: int
    kv_held: int
    worst_part: float  # largest share by which a part of a row differs from its plan


def groups(found: list[Row]) -> Iterator[Group]:
    for kind in dict.fromkeys(map(_kind, found)):
        own = [row for row in found if _kind(row) == kind]
        planned, held = sum(_weights(row.planned) for row in own), sum(_weights(row.held) for row in own)
        yield Group(*kind, len(own), planned, held, sum(row.held["kv"] for row in own), max(row.worst for row in own))


def table(found: list[Group]) -> str:
    lines = [f"| {' | '.join(name.replace('_', ' ') for name in asdict(found[0]))} |", "|---" * 9 + "|"]
    for one in found:
        cells = [f"{value:,}" if isinstance(value, int) else str(value) for value in list(asdict(one).values())[:-1]]
        lines.append(f"| {' | '.join(cells)} | {one.worst_part:.2%} |")
    return "\n".join(lines)


def _kind(row: Row) -> tuple[str, str, str, int]:
    return row.stored, row.kernels, row.rounded, row.ranks


def _weights(parts: dict[str, int]) -> int:
    return sum(parts.get(part, 0) for part in PARTS)


def save(file: Path, sums: list[Group], wide: list[Row], wrong: list[Row]) -> None:
    """Write the sums, and complete rows only where memory was measured or differs from the plan."""
    result = {"machine": asdict(facts()), "contexts": CONTEXTS, "groups": [asdict(one) for one in sums]}
    result |= {"wide": [asdict(row) for row in wide], "wrong": [asdict(row) for row in wrong]}
    file.write_text(json.dumps(result, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan", description=__doc__.splitlines()[0])
    parser.add_argument("--result", type=Path, default=RESULT, help=f"JSON file for the sums; default {RESULT.name}")
    parser.add_argument("--rows", type=Path, help="JSON file for the bytes of each part of each rank")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = list(rows(Path(folder)))
    wrong = [row for row in found if row.worst > 0.02 or row.mapped != row.planned_mapped]
    wide = [row for row in found if row.measured is not None]
    save(options.result, list(groups(found)), wide, wrong)
    if options.rows:
        options.rows.write_text(json.dumps([asdict(row) for row in found]))
    print(table(list(groups(found))))
    for row in wide:
        print(f"wide, {row.kernels}, {row.rounded}: {_weights(row.planned):,} B planned, {row.measured:,} B measured")
    print(f"{len(found)} ranks, {len(wrong)} with a part off by more than 2 %")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
