"""Every quantization format on every executor: the cells of docs/quantization-formats.md.

A checkpoint of each kind is compared with the dequantized model: dense, with routed experts, on two ranks, with
compiled kernels and with Triton's interpreter, and its planned bytes with the loaded ones. `make test` runs a few.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from engine.layers.linear import LinearLayer
from engine.lowering.footprint import part_bytes
from engine.models.checkpoint import check_tensors, read_checkpoint
from engine.models.ranks import tensor_problem
from kernels.block_weights import PlaneWeight, SegmentedWeight
from kernels.cpu.library import best
from kernels.cpu.packing import Packed, Segments
from kernels.fp8 import Fp8Weight
from kernels.integers import IntegerWeight
from kernels.jit import installed
from tests.engine.float_writers import FLOAT_KINDS
from tests.engine.fp8_writers import EXPERTS as FP8_EXPERTS
from tests.engine.fp8_writers import FP8_KINDS
from tests.engine.gguf_writer import Kind as GgufKind
from tests.engine.gguf_writer import write_gguf
from tests.engine.integer_writers import INTEGER_KINDS
from tests.engine.layers.families import EAGER, SIZES
from tests.engine.layers.planned import predicted
from tests.engine.layers.test_footprint import FakeWorld, compare
from tests.engine.layers.test_gguf_tensors import EXPERT_KEYS, KINDS, WIDE
from tests.engine.layers.test_more_formats import EXPERTS, plain_router
from tests.engine.library_writers import LIBRARY_KINDS
from tests.engine.quantized_writers import KINDS as PACKED_KINDS
from tests.engine.quantized_writers import Written, write
from tests.tiers import thinned

pytestmark = [
    pytest.mark.skipif(not installed(), reason="Triton is not installed"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]
INTEGERS = PACKED_KINDS | FLOAT_KINDS | INTEGER_KINDS | LIBRARY_KINDS
GGUF_TYPES = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"),
    *("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"),
)
ROWS = (*INTEGERS, *(f"fp8-{kind}" for kind in FP8_KINDS), *(f"gguf-{kind}" for kind in GGUF_TYPES))
FEW = ["packed-32-zeros", "nvfp4", "fp8-blocks", "gguf-Q4_K"]
# Libraries that wrote single matrices of a format (tests/engine/formats/golden), by the beginning of its name.
LIBRARIES = {
    "bnb": "bitsandbytes 0.50.2",
    "hqq": "hqq 0.2.8.post1",
    "torchao": "torchao 0.18.0",
    **dict.fromkeys(("packed", "nvfp4", "mxfp4", "mxfp8", "fp8-tensor", "fp8-channel"), "compressed-tensors 0.20.0"),
}
OWN = "a quantizer in the tests"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint, and the logits of its dequantized model."""

    path: Path
    logits: Callable[[list[int]], Tensor]


def dense(name: str, folder: Path, driver: Any) -> Checkpoint:
    if name in INTEGERS:
        made = write(folder, INTEGERS[name])
    elif name.startswith("fp8-"):
        made = write(folder, FP8_KINDS[name.removeprefix("fp8-")])
    else:
        return gguf_file(name, folder, driver)
    return Checkpoint(made.path, made.logits)


def with_experts(name: str, folder: Path) -> Checkpoint:
    if name in INTEGERS:
        made: Written = write(folder, INTEGERS[name], "Qwen3Moe", **EXPERTS)
        plain_router(made, INTEGERS[name])
    else:
        kind = FP8_KINDS[name.removeprefix("fp8-")]
        made = write(folder, kind, "Qwen3Moe", **FP8_EXPERTS)
        plain_router(made, kind)
        if name == "fp8-modelopt":  # a dense model of this kind has a plain MLP
            made.configure(ignore=["lm_head", "*.mlp.gate"])
    return Checkpoint(made.path, made.logits)


def gguf_file(name: str, folder: Path, driver: Any) -> Checkpoint:
    """A mixture of experts all of whose matrices but the router have this type, with drawn bytes."""
    kind = Type[name.removeprefix("gguf-")]
    settings = KINDS["qwen3moe"][1] | {"num_hidden_layers": 1, "head_dim": 64}
    torch.manual_seed(3)
    config = transformers.Qwen3MoeConfig(**{**SIZES, **WIDE, **settings})
    model = transformers.AutoModelForCausalLM.from_config(config, **EAGER).eval()
    folder.mkdir(exist_ok=True)
    types = dict.fromkeys(("attn_q.", "attn_k.", "attn_v.", "attn_output", "exps", "token_embd", "output."), kind)
    made, plain = GgufKind("qwen3moe", EXPERT_KEYS), folder / "plain" / "m.gguf"
    plain.parent.mkdir(exist_ok=True)
    write_gguf(plain, model, made, types=types, restored=True)
    path = write_gguf(folder / "m.gguf", model, made, types=types)
    return Checkpoint(path, lambda ids: driver(plain).run(ids, 5))


def written_by(name: str) -> str:
    if name.startswith("gguf-"):
        return f"drawn bytes, with values by gguf {version('gguf')}"
    library = next((library for prefix, library in LIBRARIES.items() if name.startswith(prefix)), None)
    return OWN if library is None else f"{OWN}; matrices by {library}"


def form(weight: Any) -> str:
    """Return how a matrix is held."""
    match weight:
        case Packed():
            return str(weight.form.removeprefix("tiles_").removeprefix("blocks_"))
        case Segments() | SegmentedWeight():
            return " + ".join(dict.fromkeys(map(form, weight.pieces)))
        case PlaneWeight():
            return weight.kind.lower()
        case IntegerWeight():
            return f"int{weight.bits}{' × int8' if weight.rounds else ''}"
        case Fp8Weight():
            return "fp8 × fp8" if weight.rounds else "fp8"
    return "f32"


def forms(engine: Any) -> str:
    layers = [one for one in engine.model.weights.by_name.values() if isinstance(one, LinearLayer)]
    found = dict.fromkeys(form(layer.weight) for layer in layers if not layer.target.exact)
    held = [one for one in found if one not in ("f32", "bf16")]
    return ", ".join(held) or "dequantized"


def distance(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


def run(driver: Any, made: Checkpoint, kernels: str, prompt: list[int], want: Tensor) -> str:
    """Compare the logits of an executor, and return how it holds the matrices."""
    engine = driver(made.path, kernels=kernels)
    found = forms(engine)
    got = engine.run(prompt, len(prompt))
    if kernels == "triton":  # the driver's products do not pack a plain head
        compare(engine.checkpoint, kernels)
    else:
        assert part_bytes(predicted(engine.checkpoint, kernels)) == engine.model.memory_usage.parts
    rounds = "×" in found if kernels == "triton" else found != "dequantized"
    assert distance(got, want) < (0.12 if "fp8" in found else 0.06 if rounds else 1e-5), (kernels, found)
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", thinned(ROWS, FEW))
def test_format_is_served_by_every_executor(name, tmp_path, driver, ids, on_ranks, format_cells):
    made, prompt = dense(name, tmp_path / "dense", driver), ids(9, 1)
    checkpoint, want = read_checkpoint(made.path), made.logits(prompt)
    check_tensors(checkpoint.model, checkpoint.tensors, checkpoint.quantization)
    assert run(driver, made, "torch", prompt, want) == "dequantized"
    cells = {"format": str(checkpoint.quantization), "written by": written_by(name), "loads": "✓", "equal": "✓"}
    cells["CPU"] = run(driver, made, best(), prompt, want)
    cells["GPU"] = run(driver, made, "triton", prompt, want)
    cells["bytes"] = "✓"
    for got in on_ranks(2, lambda world: driver(made.path, world=world).run(prompt, 5)):
        assert distance(got, want) < 1e-5
    problem = tensor_problem(checkpoint.model, checkpoint.quantization, 2, "triton")
    if problem is None:
        compare(checkpoint, "triton", world=FakeWorld(1, 2))
    cells["2 ranks"] = "✓" if problem is None else "torch"
    if not name.startswith("gguf-"):
        routed = with_experts(name, tmp_path / "experts")
        routed_want = routed.logits(prompt)
        run(driver, routed, "torch", prompt, routed_want)
        run(driver, routed, "triton", prompt, routed_want)
    cells["experts"] = "✓"
    format_cells(name, **cells)
