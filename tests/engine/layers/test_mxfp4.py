"""gpt-oss with experts in mxfp4, written here from the format's definition, on every executor."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from engine.api.errors import CheckpointError
from engine.formats.mxfp4 import Mxfp4
from engine.layers.linear import LinearLayer
from engine.models.checkpoint import assume_checkpoint, check_tensors, read_checkpoint
from engine.models.ranks import tensor_problem, tensor_sizes
from kernels.cpu import program
from kernels.cpu.library import best, usable
from kernels.cpu.program import Program, StepData
from kernels.jit import installed
from tests.engine.layers.families import EAGER, SIZES, YARN
from tests.engine.layers.test_footprint import compare

EXPERTS, LAYERS = 5, 2
BODIES = ["torch", pytest.param("triton", marks=pytest.mark.skipif(not installed(), reason="Triton is not installed"))]
SETTINGS = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
E2M1 = [(-1) ** (code >> 3) * value for code in range(16) for value in [(0, 0.5, 1, 1.5, 2, 3, 4, 6)[code & 7]]]


def decoded(blocks: Tensor, scales: Tensor) -> Tensor:
    """[.., groups, 16] and [.., groups] uint8 → [.., inputs] float64."""
    numbers = [[E2M1[byte & 15], E2M1[byte >> 4]] for byte in blocks.flatten().tolist()]
    values = torch.tensor(numbers, dtype=torch.float64).view(*blocks.shape[:-1], 32)
    factors = torch.tensor([2.0 ** (byte - 127) for byte in scales.flatten().tolist()], dtype=torch.float64)
    return (values * factors.view(*scales.shape, 1)).flatten(-2)


def drawn(rows: int, inputs: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return random blocks and scales of all experts."""
    draw = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (EXPERTS, rows, inputs // 32, 16), generator=draw, dtype=torch.uint8)
    return blocks, torch.randint(121, 125, (EXPERTS, rows, inputs // 32), generator=draw, dtype=torch.uint8)


class Written:
    """The checkpoint in mxfp4, and transformers' model with the same numbers in float32."""

    def __init__(self, path: Path, plain_layers: tuple[int, ...] = ()) -> None:
        self.path, self.file = path, path / "model.safetensors"
        sizes = {**SIZES, "num_hidden_layers": LAYERS, "num_key_value_heads": 6, "head_dim": 16}
        sizes |= {"hidden_size": 64, "intermediate_size": 96}
        config = transformers.GptOssConfig(
            **sizes, num_local_experts=EXPERTS, num_experts_per_tok=2, sliding_window=5, swiglu_limit=0.6,
            rope_parameters={**YARN, "truncate": False},
        )  # fmt: skip
        torch.manual_seed(3)
        self.model = transformers.AutoModelForCausalLM.from_config(config, **EAGER).eval()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.15 + (parameter if parameter.ndim == 1 else 0))
        own: dict[str, Tensor] = {}
        with torch.no_grad():
            for number, layer in enumerate(self.model.model.layers):
                if number in plain_layers:
                    continue
                for seed, name in enumerate(("gate_up_proj", "down_proj")):
                    weight = getattr(layer.mlp.experts, name)
                    blocks, scales = drawn(weight.shape[2], weight.shape[1], 2 * number + seed)
                    weight.copy_(decoded(blocks, scales).transpose(1, 2))
                    path_ = f"model.layers.{number}.mlp.experts.{name}"
                    own |= {f"{path_}_blocks": blocks, f"{path_}_scales": scales}
        self.model.save_pretrained(path)
        replaced = {name.removesuffix("_blocks") for name in own}
        save_file({k: v for k, v in load_file(self.file).items() if k not in replaced} | own, self.file)
        skipped = [f"model.layers.{number}.mlp.experts" for number in plain_layers]
        settings = SETTINGS | {"modules_to_not_convert": SETTINGS["modules_to_not_convert"] + skipped}
        stored = json.loads((path / "config.json").read_text()) | {"quantization_config": settings}
        (path / "config.json").write_text(json.dumps(stored))

    def logits(self, ids: list[int]) -> Tensor:
        with torch.no_grad():
            return self.model(torch.tensor([ids])).logits[0]

    def change(self, name: str, tensor: Tensor | None) -> None:
        """Replace a tensor of layer 1's experts, or remove it."""
        name, found = f"model.layers.1.mlp.experts.{name}", load_file(self.file)
        assert found.pop(name) is not None
        save_file(found | ({} if tensor is None else {name: tensor}), self.file)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A checkpoint that no test changes."""
    return Written(tmp_path_factory.mktemp("mxfp4") / "whole")


class Matrix:
    """The tensors of one matrix. Each row has one scale."""

    path, rows, inputs = "experts.0.up", 255, 512

    def __init__(self) -> None:
        every = torch.arange(256, dtype=torch.uint8)
        self.tensors = {"blocks": every.view(16, 16).repeat(255, 1, 1), "scales": every[:255, None].repeat(1, 16)}

    def read(self, suffix):
        return self.tensors[suffix]

    def has(self, suffix):
        return suffix in self.tensors

    def type(self, suffix):
        return "U8"

    def error(self, text):
        return CheckpointError(f"file: {text}")


def test_every_byte_with_every_scale_has_the_numbers_of_the_definition():
    matrix = Matrix()
    found, want = Mxfp4().dequantize(matrix), decoded(**matrix.tensors)
    assert torch.equal(found, want.float())
    theirs = convert_moe_packed_tensors(*(tensor[None] for tensor in matrix.tensors.values()), dtype=torch.float32)
    assert torch.equal(found, theirs[0].T)


@pytest.mark.parametrize("body", BODIES)
def test_logits_equal_transformers(body, written, driver, ids):
    prompt = ids(7, 1)
    got = driver(written.path, kernels=body).run(prompt, 4)
    torch.testing.assert_close(got, written.logits(prompt), atol=1e-4, rtol=0)


def test_compiled_experts_multiply_by_the_numbers_of_the_checkpoint(written, compiled, driver):
    """A row with one number is multiplied in float."""
    engine, tensors = driver(written.path, kernels=compiled), load_file(written.file)
    layers = [one for one in engine.model.weights.by_name.values() if isinstance(one, LinearLayer)]
    experts = [layer for layer in layers if ".experts." in layer.path]
    assert len(experts) == 2 * EXPERTS * LAYERS
    for layer in experts:
        stack, _, number = layer.path.rpartition(".")
        name = layer.part.rows[0].source
        want = decoded(*(tensors[f"{stack}.{name}_{last}"][int(number)] for last in ("blocks", "scales")))
        if name == "gate_up_proj":
            want = torch.cat((want[::2], want[1::2]))
        assert (layer.weight.form, layer.weight.group) == ("blocks_mxfp4", 32)
        x = torch.eye(layer.weight.inputs)
        y = torch.empty(len(x), layer.weight.outputs)
        engine.model.target.team.run(Program([program.linear(layer.weight, None, x, y)], (x, y)), StepData(len(x)))
        assert torch.equal(y.T.double(), want), layer.name


def near(got, want):
    """Compare within 4 %, the error of activations of 8 bits in tiny models."""
    return (got - want).norm() / want.norm() < 0.04


def test_a_compiled_model_stays_near_transformers(written, compiled, driver, ids):
    prompt = ids(17, 1)
    assert near(driver(written.path, kernels=compiled).run(prompt, 6), written.logits(prompt))


@pytest.mark.parametrize("by", ["torch", *usable()])
def test_loaded_bytes_are_the_planned_bytes(by, written):
    compare(read_checkpoint(written.path), by)


def test_ranks_cut_dequantized_experts_within_groups_and_compiled_ones_between_groups(written, driver, ids, on_ranks):
    prompt, want = ids(15, 3), written.logits(ids(15, 3))
    for got in on_ranks(2, lambda world: driver(written.path, world=world).run(prompt, 6)):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
    compiled = best()
    work = lambda world: driver(written.path, world=world, kernels=compiled, threads=1).run(prompt, 6)  # noqa: E731
    for got in on_ranks(3, work, compiled):
        assert near(got, want)


def test_compiled_ranks_share_whole_groups_only(written):
    found = read_checkpoint(written.path)
    assert tensor_sizes(found.model, found.quantization, "torch") == (1, 2, 3, 6)
    assert tensor_sizes(found.model, found.quantization, "compiled") == (1, 3)
    problem = tensor_problem(found.model, found.quantization, 2, "compiled")
    assert problem is not None and "blocks of 32 inputs, and 2 ranks would get 48 of 96 each" in problem


def test_a_layer_that_the_settings_skip_is_plain(tmp_path, driver, ids):
    made, prompt = Written(tmp_path / "mixed", plain_layers=(1,)), ids(9, 4)
    got = driver(made.path).run(prompt, 4)
    torch.testing.assert_close(got, made.logits(prompt), atol=1e-4, rtol=0)
    compare(read_checkpoint(made.path), best())


def test_a_plan_without_weights_assumes_the_tensors_of_the_file(written, tmp_path):
    (tmp_path / "config.json").write_text((written.path / "config.json").read_text())
    assumed, found = assume_checkpoint(tmp_path), read_checkpoint(written.path)
    forms = [{name: (one.dtype, one.shape, one.bytes) for name, one in of.tensors.items()} for of in (assumed, found)]
    assert forms[0] == forms[1]
    assert str(found.quantization) == "4 bits (mxfp4, groups of 32)"


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("down_proj_scales", None, r"lacks model\.layers\.1\.mlp\.experts\.down_proj_scales"),
        ("gate_up_proj_blocks", None, r"lacks model\.layers\.1\.mlp\.experts\.gate_up_proj_blocks"),
        ("down_proj_bias", None, r"lacks model\.layers\.1\.mlp\.experts\.down_proj_bias"),
        ("down_proj_scales", torch.zeros(4, 64, 3, dtype=torch.uint8), r"down_proj_scales has .*implies 5 experts"),
        ("down_proj_scales", torch.zeros(5, dtype=torch.uint8), r"down_proj_scales has shape \[5\]"),
        (
            "down_proj_scales",
            torch.zeros(5, 64, 2, dtype=torch.uint8),
            r"down_proj.scales has shape \[64, 2\], .*64, 3",
        ),
        ("down_proj_blocks", torch.zeros(5, 64, 3, 8, dtype=torch.uint8), r"down_proj.blocks has shape \[64, 3, 8\]"),
        ("down_proj_blocks", torch.zeros(5, 64, 3, 16), "down_proj.blocks is of type F32; supported are U8"),
        ("down_proj_bias", torch.zeros(5, 65), r"down_proj.bias has shape \[65\], .*\[64\]"),
    ],
)
def test_tensors_that_do_not_fit_are_found_without_reading_weights(name, tensor, message, tmp_path):
    made = Written(tmp_path / "changed")
    made.change(name, tensor)
    with pytest.raises(CheckpointError, match=message):
        read = read_checkpoint(made.path)
        check_tensors(read.model, read.tensors, read.quantization)


def test_a_scale_that_is_not_a_number_is_refused(tmp_path, driver):
    made = Written(tmp_path / "changed")
    made.change("down_proj_scales", torch.full((5, 64, 3), 255, dtype=torch.uint8))
    with pytest.raises(CheckpointError, match=r"experts.0.down_proj.scales has the byte 255, which is not a number"):
        driver(made.path)
