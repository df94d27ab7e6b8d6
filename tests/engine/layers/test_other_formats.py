"""A quantization format that another package registers, from recognition to generated tokens."""

import ast
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from appliance.config.settings import Given
from appliance.hardware.machine import Machine
from appliance.planning.plan import Plan
from appliance.planning.validate import validate
from engine.api.errors import CheckpointError
from engine.formats.registry import BUILT_IN, method_names
from engine.llm import LLM, Params
from engine.lowering.footprint import mapped_bytes, part_bytes
from engine.models.checkpoint import check_tensors, read_checkpoint
from engine.models.ranks import tensor_problem, tensor_sizes
from kernels.cpu.library import best
from tests.engine.layers.planned import predicted
from tests.engine.layers.test_footprint import FakeWorld, loaded
from tests.engine.quantized_writers import Kind, Whole, Written, write
from tests.engine.test_quantized_engine import PROMPTS, greedy

ROOT = Path(__file__).resolve().parents[3]
HOST = Machine(cores=2, cores_from="affinity", memory_free=2**34, memory_from="MemAvailable", no_gpu="no driver")


def install(site: Path, entry_points: str = "[slipway.formats]\ntoy = toy_format:METHOD\n") -> None:
    """Write an installed distribution into a folder of sys.path."""
    info = site / "toy_format-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-format\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)
    shutil.copy(ROOT / "tests" / "engine" / "toy_format.py", site)


def quantize(weight: torch.Tensor) -> Whole:
    groups = weight.unflatten(1, (-1, 32))
    exponents = (groups.abs().amax(2) / 127).log2().ceil()
    index = torch.arange(weight.shape[1]) // 32
    q = (weight / exponents.exp2()[:, index]).round().long() + 128
    return Whole(q, exponents.exp2(), torch.full(exponents.shape, 128), index, 8)


TOY = Kind(
    {"quant_method": "toy", "scales": "exponents", "modules_to_not_convert": ["lm_head"]},
    quantize,
    lambda one: {"weight": one.q.to(torch.uint8), "exponents": one.scales.log2().to(torch.int8)},
    8,
    32,
)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of sys.path."""
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return tmp_path / "site"


@pytest.fixture
def made(tmp_path: Path, site: Path) -> Written:
    install(site)
    return write(tmp_path, TOY)


def test_checkpoint_is_recognised_and_its_tensors_are_checked(made: Written) -> None:
    found = read_checkpoint(made.path)
    assert str(found.quantization) == "8 bits (toy, powers of two)" and "toy" in method_names()
    check_tensors(found.model, found.tensors, found.quantization)
    assert found.quantization is not None and "lm_head" not in found.quantization.formats
    made.change(model__layers__1__mlp__up_proj__exponents=torch.zeros(256, 3, dtype=torch.int8))
    changed = read_checkpoint(made.path)
    with pytest.raises(CheckpointError, match=r"up_proj\.exponents has shape \[256, 3\], .* implies \[256, 4\]"):
        check_tensors(changed.model, changed.tensors, changed.quantization)


@pytest.mark.parametrize(("by", "ranks"), [("torch", 1), ("torch", 2), (best(), 1)])
def test_planned_bytes_equal_loaded_bytes(made: Written, by: str, ranks: int) -> None:
    checkpoint, world = read_checkpoint(made.path), FakeWorld(ranks - 1, ranks)
    model, planned = loaded(checkpoint, by, world=world), predicted(checkpoint, by, world=world)
    assert part_bytes(planned) == model.memory_usage.parts
    assert mapped_bytes(planned) == model.memory_usage.mapped
    if by != "torch":  # a byte for each weight and 2 for the scale of 32
        assert part_bytes(planned)["mlp"] == 2 * 3 * 128 * 256 * 34 // 32


def test_ranks_split_the_inputs_between_groups(made: Written) -> None:
    """The output projection has 128 inputs and groups of 32; torch dequantizes and may split anywhere."""
    checkpoint = read_checkpoint(made.path)
    sizes = [tensor_sizes(checkpoint.model, checkpoint.quantization, one) for one in ("torch", "compiled")]
    assert sizes == [(1, 2, 4), (1, 2, 4)]
    made.configure(wide=True)
    wide = read_checkpoint(made.path)
    assert tensor_sizes(wide.model, wide.quantization, "torch") == (1, 2, 4)
    assert tensor_problem(wide.model, wide.quantization, 4, "compiled") == (
        "model.layers.0.self_attn.o_proj has groups of 64 inputs, and 4 ranks would get 32 of 128 each"
    )


def test_settings_that_the_format_refuses_are_named(made: Written) -> None:
    made.configure(scales="bytes")
    with pytest.raises(CheckpointError, match="quantized .toy., which is not supported: scales is 'bytes'; supported"):
        read_checkpoint(made.path)


def plan(made: Written, machine: Machine) -> Plan:
    (made.path / "tokenizer.json").write_text('{"model": {}}')
    manifest = made.path.parent / "m.yaml"
    manifest.write_text(f"apiVersion: slipway/v2\nmodel: {{source: {{path: {made.path}}}}}\n")
    return validate(Given(manifest), machine)


def weights(found: Plan) -> str:
    return next(one.reason for one in found.effective if one.key == "quantization.weights")


def test_plan_names_the_format_and_its_products(made: Written) -> None:
    compiled = Machine(**{**HOST.__dict__, "kernels": ("avx2", "base")})
    assert weights(plan(made, compiled)) == "the checkpoint's 8 bits (toy, powers of two)"
    by_torch = weights(plan(made, HOST))
    assert by_torch.startswith("the checkpoint's 8 bits (toy, powers of two), restored to float32 for torch: ")
    assert by_torch.endswith(" with compiled kernels of a CPU")
    made.configure(products=False)
    assert weights(plan(made, HOST)).endswith("; no kernels multiply by this format")
    assert weights(plan(made, compiled)).endswith(", 14 of 14 matrices restored to float32")


def test_torch_generates_the_tokens_of_the_dequantized_model(made: Written) -> None:
    with LLM(made.path, kernels="torch", max_context=48, kv_bytes=4 * 2**20) as llm:
        found = llm.generate(PROMPTS, Params(temperature=0.0, max_tokens=8, ignore_eos=True))
    assert [one.ids for one in found] == [greedy(made, prompt, 8) for prompt in PROMPTS]


def test_compiled_kernels_multiply_by_the_numbers_of_the_format(
    made: Written, driver: Any, ids: Any, on_ranks: Any
) -> None:
    engine, prompt = driver(made.path, kernels=best()), ids(17, 1)
    assert {op.weight.form for op in engine.model.weights.by_name.values() if hasattr(op, "slots")} == {"tiles_int8"}
    got, want = engine.run(prompt, 5), made.logits(prompt)
    assert (got - want).norm() / want.norm() < 0.04
    by_ranks = on_ranks(
        2, lambda world: driver(made.path, kernels=best(), world=world, threads=1).run(prompt, 5), best()
    )
    assert all((got - want).norm() / want.norm() < 0.04 for got in by_ranks)


SUPPORTED = ", ".join(one.name for one in BUILT_IN)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (None, rf"\(toy\), which is not supported: supported are {SUPPORTED}; 14 of"),
        ("toy = toy_format:NOTHING", "toy_format:NOTHING of the package toy-format cannot be imported: AttributeErr"),
        ("toy = toy_format:GROUP", "toy_format:GROUP of the package toy-format is not a Method of this name"),
        ("gptq = toy_format:METHOD", f"supported are {SUPPORTED}; 14 of"),
    ],
)
def test_unusable_registrations_are_named(tmp_path: Path, site: Path, entry: str | None, message: str) -> None:
    if entry is not None:
        install(site, f"[slipway.formats]\n{entry}\n")
    made = write(tmp_path, TOY)
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(made.path)


def test_no_other_product_file_compares_names_of_formats() -> None:
    """fp8 is also a value of manifest keys. appliance/migration has the words of other servers."""
    names = {one.name for one in BUILT_IN} - {"fp8"} | {"awq", "turned", "packed", "Q4_0", "Q8_0"}
    quoted = re.compile("|".join(f"[\"']{name}[\"']" for name in names))
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.value}"
        for package in ("appliance", "engine", "kernels")
        for path in sorted((ROOT / package).rglob("*.py"))
        if path.parts[len(ROOT.parts) :][:2]
        not in (("engine", "formats"), ("engine", "gguf"), ("appliance", "migration"))
        if quoted.search(text := path.read_text())  # parsing all files takes 5 s
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and node.value in names
    ]
    assert not found
