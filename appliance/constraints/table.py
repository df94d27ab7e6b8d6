"""Compatibility tables: rows and columns are data, and the solver computes each cell.

docs/compatibility.md is generated from them, and a test runs or refuses every cell. The machine of the tables supports
everything: a CPU with compiled kernels, and two GPUs of compute capability 9.0 with Triton. The model is a plain
bfloat16 model, except where a row says otherwise.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from appliance.constraints.facts import ModelFacts
from appliance.constraints.rule import TORCH, TRITON, Facts, Rule, View
from appliance.constraints.rules import RULES
from appliance.constraints.solve import Situation, least_rules, solve
from appliance.hardware.machine import Gpu, Machine

COMPILED = "avx512"  # represents every compiled variant
CAPABILITY, GPUS = (9, 0), 2
PLAIN = ModelFacts(dtype="bfloat16", heads=((4, 2),))


@dataclass(frozen=True)
class Line:
    """A row or a column: the keys that it sets, and changes to the model or the GPUs."""

    label: str
    written: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    capability: tuple[int, int] | None = None


@dataclass(frozen=True)
class Table:
    name: str
    title: str
    text: str
    rows: tuple[Line, ...]
    columns: tuple[Line, ...]


@dataclass(frozen=True)
class Cell:
    """One combination of a row and a column."""

    table: Table
    row: Line
    column: Line
    situation: Situation
    broken: tuple[Rule, ...]  # rules that exclude the combination; empty if it is legal

    def __str__(self) -> str:
        return f"{self.table.name}: {self.row.label}, {self.column.label}"


def machine(capability: tuple[int, int] = CAPABILITY) -> Machine:
    gpu = Gpu("GPU", 80 * 2**30, 80 * 2**30, capability)
    return Machine(8, "affinity", 64 * 2**30, "MemAvailable", gpus=(gpu,) * GPUS, kernels=(COMPILED,), triton=True)


def cells(table: Table) -> Iterator[Cell]:
    for row in table.rows:
        for column in table.columns:
            model = replace(PLAIN, **row.model, **column.model)
            host = machine(row.capability or column.capability or CAPABILITY)
            situation = Situation(Facts(model, host), {"tensor": 1, **row.written, **column.written})
            yield Cell(table, row, column, situation, () if solve(situation) is not None else _broken(situation))


def _broken(situation: Situation) -> tuple[Rule, ...]:
    """Return every rule that the written keys break by themselves, else a minimal set of rules in conflict."""
    view = View(situation.facts, **situation.written)
    alone = (rule for rule in RULES if situation.written.keys() >= set(rule.keys) and not rule.holds(view))
    return tuple(alone) or least_rules(situation)


KERNELS = (
    Line("torch, CPU", {"device": "cpu", "kernels": TORCH}),
    Line("compiled, CPU", {"device": "cpu", "kernels": COMPILED}),
    Line("torch, GPU", {"device": "cuda", "kernels": TORCH}),
    Line("Triton, GPU", {"device": "cuda", "kernels": TRITON}),
)
PAGES = tuple(Line(name, {"kv_cache": name}) for name in ("float32", "bfloat16", "float16", "int8", "int4", "fp8"))
DTYPES = tuple(Line(name, {"dtype": name}) for name in ("float32", "bfloat16", "float16"))
WEIGHTS = (
    Line("weights as stored", {"weights": "stored"}),
    Line("weights int8", {"weights": "int8"}),
    Line("weights int6", {"weights": "int6"}),
    Line("weights int4", {"weights": "int4"}),
    Line("weights fp8", {"weights": "fp8"}),
)


def _each(first: tuple[Line, ...], second: tuple[Line, ...]) -> tuple[Line, ...]:
    return tuple(Line(f"{a.label}, {b.label}", {**a.written, **b.written}) for a in first for b in second)


FEATURES = (
    Line("sliding windows and soft caps"),
    Line("attention sinks"),
    Line("ALiBi"),
    Line("multi-head latent attention", model={"latent": 16}),
    Line("latents of 520 elements", model={"latent": 520}),
    Line("heads of 12", model={"head_sizes": (12,)}),
    Line("heads of 264", model={"head_sizes": (264,)}),
    Line("65 query heads to a KV head", model={"heads": ((65, 1),)}),
    Line("an activation that only torch has", model={"by_torch": ("activation relu2 of 2 MLPs",)}),
    Line("an encoder that pools", model={"pools": True}),
    Line("a decoder that pools", model={"pools": True}),
    Line("recurrent layers"),
    Line("an encoder-decoder model"),
    Line("as above, rounded to int8", {"weights": "int8"}),
    Line("relative position biases"),
    Line("a mixture of experts", model={"experts": True}),
    Line("as above, rounded to fp8", {"weights": "fp8"}, model={"experts": True}),
    Line("experts of one layer in several types", model={"experts": True, "mixed_expert_formats": ("stored",)}),
    Line(
        "as above, rounded to int8", {"weights": "int8"}, model={"experts": True, "mixed_expert_formats": ("stored",)}
    ),
    Line("gptq, awq or compressed-tensors", model={"quantized": "4 bits (gptq)", "held": True, "held_on_gpu": 13}),
    Line(
        "as above, rounded to int8",
        {"weights": "int8"},
        model={"quantized": "4 bits (gptq)", "held": True, "held_on_gpu": 13},
    ),
    Line("fp8", model={"quantized": "fp8 (fp8, one scale per matrix)", "restored": 13, "held_on_gpu": 13}),
    Line(
        "as above, rounded to fp8",
        {"weights": "fp8"},
        model={"quantized": "fp8 (fp8, one scale per matrix)", "restored": 13, "held_on_gpu": 13},
    ),
    Line(
        "GGUF in types that are dequantized",
        model={"quantized": "gguf", "quantizable": True, "float16_pages": True, "restored": 1},
    ),
    Line(
        "as above, rounded to int4",
        {"weights": "int4"},
        model={"quantized": "gguf", "quantizable": True, "float16_pages": True, "restored": 1},
    ),
    Line("a context beyond the checkpoint's", {"max_context": PLAIN.max_context + 1}),
    Line("layers with different KV heads", model={"pages": ((2, 8), (2, 16))}),
    Line("as above, int8 pages", {"kv_cache": "int8"}, model={"pages": ((2, 8), (2, 16))}),
    Line("transformers' own code, int8 pages", {"kv_cache": "int8"}, model={"foreign": "OtherForCausalLM"}),
    Line("int4 pages of heads of 6 elements", {"kv_cache": "int4"}, model={"pages": ((2, 6),)}),
    Line("a layer norm over all heads of a projection", model={"normed_together": True}),
    Line("ALiBi in cross-attention", model={"cross_alibi": True}),
    Line("chunks in bidirectional attention", model={"wrong_chunks": True}),
)
SWITCHES = (
    Line("`hardware.batch_invariant: true`", {"batch_invariant": True}),
    Line("`hardware.graphs: true`", {"graphs": True}),
    Line("`hardware.graphs: false`", {"graphs": False}),
    Line("`engine.cache.block_tokens: 7`", {"block_tokens": 7}),
)
_BLOCKS = {"quantized": "fp8 (fp8, blocks of 128 x 128)", "restored": 13, "held_on_gpu": 13}
RANKS = (
    Line("2 ranks", {"tensor": 2}),
    Line("2 ranks and 2 engines", {"tensor": 2, "data": 2}),
    Line("3 ranks of 4 heads", {"tensor": 3}),
    Line(
        "2 ranks of gptq, cut between groups",
        {"tensor": 2},
        model={"quantized": "4 bits (gptq)", "held": True, "held_on_gpu": 13, "whole": (1, 2), "blocks": (1, 2)},
    ),
    Line(
        "2 ranks of gptq, cut within one",
        {"tensor": 2},
        model={"quantized": "4 bits (gptq)", "held": True, "held_on_gpu": 13, "whole": (1,), "blocks": (1,)},
    ),
    Line("2 ranks of fp8, cut between blocks", {"tensor": 2}, model={**_BLOCKS, "blocks": (1, 2)}),
    Line("2 ranks of fp8, cut within one", {"tensor": 2}, model={**_BLOCKS, "blocks": (1,)}),
)
CAPABILITIES = (
    Line("7.5", capability=(7, 5)),
    Line("8.0 to 8.8", capability=(8, 0)),
    Line("8.9 and newer", capability=(8, 9)),
)
ON_GPU = (
    Line("bfloat16, torch", {"device": "cuda", "kernels": TORCH, "dtype": "bfloat16"}),
    Line("bfloat16, Triton", {"device": "cuda", "kernels": TRITON, "dtype": "bfloat16"}),
    Line("float16, torch", {"device": "cuda", "kernels": TORCH, "dtype": "float16"}),
    Line("float16, Triton", {"device": "cuda", "kernels": TRITON, "dtype": "float16"}),
    Line("float16, fp8 pages", {"device": "cuda", "kernels": TRITON, "dtype": "float16", "kv_cache": "fp8"}),
)

TABLES = (
    Table(
        "types",
        "Kernels, activations and pages",
        "Rows: `hardware.kernels`, `hardware.device` and `model.dtype`. Columns: `quantization.kv_cache`.",
        _each(KERNELS, DTYPES),
        PAGES,
    ),
    Table(
        "weights",
        "Kernels, weights and pages",
        "Rows: kernels and `quantization.weights`, with `model.dtype: auto`. Columns: `quantization.kv_cache`.",
        _each(KERNELS, WEIGHTS),
        PAGES,
    ),
    Table("models", "Kernels and checkpoints", "Rows: features of checkpoints. Columns: kernels.", FEATURES, KERNELS),
    Table("switches", "Kernels and switches", "Rows: single keys and values. Columns: kernels.", SWITCHES, KERNELS),
    Table(
        "ranks", "Kernels and ranks", "Rows: `parallelism.tensor` and `parallelism.data`, with 2 GPUs.", RANKS, KERNELS
    ),
    Table(
        "capability",
        "GPUs by compute capability",
        "Columns: `model.dtype`, kernels and `quantization.kv_cache`.",
        CAPABILITIES,
        ON_GPU,
    ),
)
