"""Every type of GGUF: integers and dequantized numbers are compared with the package gguf."""

from dataclasses import replace
from functools import partial

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type

from engine.api.errors import CheckpointError
from engine.formats.ggml import INTEGERS, format_of
from engine.models.checkpoint import read_checkpoint
from engine.models.sources import sources
from engine.models.stored import native_paths
from engine.weights.files import Weights
from engine.weights.quantized import QuantizedWeights
from kernels.block_weights import PlaneWeight, SegmentedWeight
from kernels.cpu.library import best
from kernels.integers import IntegerWeight
from kernels.jit import installed
from kernels.plane_layout import GGML_PLANES as PLANES
from tests.engine.layers import test_gguf
from tests.engine.layers.test_footprint import FakeWorld, compare, loaded
from tests.tiers import thinned

ROWS, INPUTS = 12, 512
READ = sorted({kind.name for kind in gguf.quants._type_traits} - {"BF16", "F16", "F32"})
FLOATS = {"Q8_K": (0, np.float32)}  # places of scales that are not float16


class Matrix:
    """One matrix of drawn bytes, with scales that are numbers."""

    path, rows, inputs = "m", ROWS, INPUTS

    def __init__(self, kind: str) -> None:
        self.kind = kind
        size, count = GGML_QUANT_SIZES[Type[kind]]
        self.blocks = np.random.default_rng(5).integers(0, 256, (ROWS, INPUTS // size, count), dtype=np.uint8)
        scale = np.linspace(-0.01, 0.02, ROWS * INPUTS // size, dtype=np.float32).reshape(ROWS, -1, 1)
        if kind == "Q8_K":
            self.blocks[:, :, :4] = scale.view(np.uint8)
        elif kind == "MXFP4":
            self.blocks[:, :, 0] = np.arange(ROWS * INPUTS // size, dtype=np.uint8).reshape(ROWS, -1) % 254
        elif kind != "NVFP4":
            places = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,)}
            places |= dict.fromkeys(("Q4_K", "Q5_K", "Q4_1", "Q5_1"), (0, 2))
            for at in places.get(kind, (0,)):
                self.blocks[:, :, at : at + 2] = scale.astype(np.float16).view(np.uint8).reshape(ROWS, -1, 2)

    def read(self, suffix):
        return torch.from_numpy(self.blocks).flatten()

    def has(self, suffix):
        return suffix == "weight"

    def type(self, suffix):
        return self.kind

    def error(self, text):
        return CheckpointError(text)


@pytest.mark.parametrize("kind", READ)
def test_numbers_are_those_of_the_package(kind):
    matrix = Matrix(kind)
    want = gguf.quants.dequantize(matrix.blocks.reshape(ROWS, -1), Type[kind])
    format = format_of(kind, 0)
    got = format.dequantize(matrix)
    np.testing.assert_array_equal(got.numpy(), want)
    if kind in INTEGERS:
        unpacked = format.unpack(matrix)
        np.testing.assert_array_equal(unpacked.restored().numpy(), want)
        assert unpacked.group == format.native.group


def test_numbers_of_q8_k_follow_its_definition():
    """The package does not read them: block_q8_K of ggml has a float32, 256 int8, and 16 sums."""
    matrix = Matrix("Q8_K")
    scales = matrix.blocks[:, :, :4].copy().view(np.float32)
    want = matrix.blocks[:, :, 4:260].view(np.int8).astype(np.float32) * scales
    np.testing.assert_array_equal(format_of("Q8_K", 0).dequantize(matrix).numpy(), want.reshape(ROWS, -1))


def test_rows_of_heads_are_permuted_with_their_scales():
    for kind in INTEGERS:
        matrix = Matrix(kind)
        plain, turned = format_of(kind, 0).dequantize(matrix), format_of(kind, 3)
        want = plain.reshape(3, 2, 2, INPUTS).transpose(1, 2).reshape(ROWS, INPUTS)
        assert torch.equal(turned.dequantize(matrix), want)


def file(folder, kind, monkeypatch, part="proj", **more):
    """A Llama whose matrices have drawn bytes of a type that the package does not write."""
    sizes = GGML_QUANT_SIZES[Type[kind]]
    scale = np.array([3e-4, 1e-4] if kind in ("Q4_K", "Q5_K", "Q4_1", "Q5_1") else [3e-4], np.float16).view(np.uint8)
    scale = np.array([115], np.uint8) if kind == "MXFP4" else scale
    at = {"Q2_K": 80, "Q3_K": 108, "Q6_K": 208}.get(kind, 0)
    scale = np.tile(scale, 2) if kind == "Q2_K" else scale

    def drawn(values, _):
        shape = values.shape
        draw = np.random.default_rng(shape[0])
        blocks = draw.integers(0, 256, (shape[0], shape[1] // sizes[0], sizes[1]), dtype=np.uint8)
        blocks[:, :, at : at + len(scale)] = scale
        return blocks.reshape(shape[0], -1)

    monkeypatch.setattr(test_gguf, "quantize", drawn)
    return test_gguf.write(folder, {part: Type[kind]}, **more)


WIDE = {"hidden_size": 256, "intermediate_size": 512}


def equal(got, want):
    """Compare logits: only the order of float32 sums differs, which depends on the CPU."""
    return (got - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.parametrize("kind", ["Q5_0", "IQ4_XS", "MXFP4", "Q4_K"])
def test_compiled_kernels_multiply_by_blocks_as_they_are(kind, tmp_path, monkeypatch, driver, ids, on_ranks):
    folder, prompt = file(tmp_path / "m", kind, monkeypatch, **WIDE), ids(9, 1)
    want = driver(folder).run(prompt, 5)
    wanted = test_gguf.want(folder, prompt, "Llama", WIDE)
    assert equal(want, wanted)
    engine = driver(folder, kernels=best())
    assert test_gguf.near(engine.run(prompt, 5), want)
    assert {layer.weight.form for layer in test_gguf.linears(engine)} == {f"blocks_{kind.lower()}"}
    compare(read_checkpoint(folder), best())
    for got in on_ranks(2, lambda world: driver(folder, world=world).run(prompt, 5)):
        assert equal(got, wanted)


def test_sources_of_several_types_are_multiplied_one_after_another(tmp_path, driver, ids, on_ranks):
    """A fused matrix and the embedding keep the types of the file."""
    types = {"k_proj": Type.Q8_0, "up_proj": Type.Q5_1, "embed": Type.Q4_1, "lm_head": Type.Q5_0, "proj": Type.Q5_0}
    folder, prompt = test_gguf.write(tmp_path / "n", types, attention_bias=True, **WIDE), ids(9, 1)
    compare(read_checkpoint(folder), best())
    engine, want = driver(folder, kernels=best()), driver(folder).run(prompt, 5)
    assert test_gguf.near(engine.run(prompt, 5), want)
    assert engine.model.vocabulary.blocks.kind == "Q4_1"
    pieces = [[one.form for one in layer.weight.pieces] for layer in test_gguf.linears(engine)[::4]]
    assert pieces[0] == ["blocks_q5_0", "tiles_int8", "blocks_q5_0"]
    run = partial(driver, folder, kernels=best())
    for got in on_ranks(2, lambda world: run(world=world).run(prompt, 5), best()):
        assert test_gguf.near(got, want)


TRITON = pytest.mark.skipif(not installed(), reason="Triton is not installed")


@TRITON
@pytest.mark.parametrize("kind", thinned(PLANES, ["Q2_K", "Q5_0", "Q6_K", "IQ4_XS", "MXFP4"]))
def test_triton_kernels_multiply_by_the_bits_of_the_blocks(kind, tmp_path, monkeypatch, driver, ids):
    folder, prompt = file(tmp_path / "m", kind, monkeypatch, "", **WIDE), ids(9, 1)
    wanted = test_gguf.want(folder, prompt, "Llama", WIDE)
    engine = driver(folder, kernels="triton")
    assert equal(engine.run(prompt, 9), wanted)
    matrices = [engine.model.vocabulary.head, *(layer.weight for layer in test_gguf.linears(engine))]
    assert all(isinstance(one, PlaneWeight) and one.kind == kind for one in matrices)
    assert engine.model.vocabulary.blocks.kind == kind
    compare(read_checkpoint(folder), "triton")


@TRITON
def test_ranks_have_their_share_of_the_planes(tmp_path, monkeypatch, driver):
    checkpoint = read_checkpoint(file(tmp_path / "m", "Q5_1", monkeypatch, "", **WIDE))
    whole = loaded(checkpoint, "torch")
    for rank in range(2):
        compare(checkpoint, "triton", world=FakeWorld(rank, 2))
        model = loaded(checkpoint, "triton", world=FakeWorld(rank, 2))
        own, every = (one.weights.by_name["model.layers.1.mlp.down_proj"].weight for one in (model, whole))
        assert torch.equal(own.restored(), every[:, 256 * rank : 256 * (rank + 1)])
        head = slice(rank * len(whole.vocabulary.head) // 2, (rank + 1) * len(whole.vocabulary.head) // 2)
        assert torch.equal(model.vocabulary.head.restored(), whole.vocabulary.head[head])
        assert model.vocabulary.blocks.blocks is model.vocabulary.table, "the memory of other ranks' rows is freed"
        first = model.vocabulary._rows(torch.tensor([0, 1]), torch.float32)
        assert torch.equal(first, whole.vocabulary._rows(torch.tensor([head.start, head.start + 1]), torch.float32))


@TRITON
def test_sources_of_several_types_are_multiplied_one_after_another_on_a_gpu(tmp_path, driver, ids):
    types = {"k_proj": Type.Q8_0, "up_proj": Type.Q5_1, "embed": Type.Q4_1, "lm_head": Type.Q6_K, "proj": Type.Q5_0}
    folder, prompt = test_gguf.write(tmp_path / "n", types, attention_bias=True, **WIDE), ids(9, 1)
    compare(read_checkpoint(folder), "triton")
    engine, wanted = driver(folder, kernels="triton"), driver(folder).run(prompt, 9)
    assert equal(engine.run(prompt, 9), wanted)
    fused = test_gguf.linears(engine)[0].weight
    assert isinstance(fused, SegmentedWeight)
    assert [type(piece) for piece in fused.pieces] == [PlaneWeight, IntegerWeight, PlaneWeight]


def test_sources_of_several_types_are_read_one_after_another(tmp_path, driver):
    """The numbers of all of them would be in memory before the first are packed."""
    types = {"k_proj": Type.Q8_0, "embed": Type.Q4_1, "lm_head": Type.Q6_K, "proj": Type.Q5_0}
    folder = test_gguf.write(tmp_path / "n", types, **WIDE)
    read, layer = read_checkpoint(folder), test_gguf.linears(driver(folder, kernels=best()))[0]
    own = QuantizedWeights(Weights(read.tensors, lambda fraction: None), read.quantization, sources(read.model))
    found = own.native(layer.path, layer.slots, "compiled", torch.device("cpu"))
    assert own.read_names == set()
    for name in "qkv":
        next(found)
        assert len(own.read_names) == 1 + "qkv".index(name) and f"{layer.path}.{name}_proj.weight" in own.read_names


@pytest.mark.parametrize("executor", [best(), pytest.param("triton", marks=TRITON)])
def test_a_head_whose_rows_have_length_one_is_dequantized(executor, tmp_path):
    """Baichuan 2's: blocks cannot be divided by the lengths of their rows."""
    found = read_checkpoint(test_gguf.write(tmp_path / "m", {"lm_head": Type.Q6_K}, **WIDE))
    model = replace(found.model, head=replace(found.model.head, unit_rows=True))
    checkpoint, x = replace(found, model=model), torch.randn(3, 256, generator=torch.Generator().manual_seed(1))
    compare(checkpoint, executor)
    own, wanted = (loaded(checkpoint, by) for by in (executor, "torch"))
    own.reserve(4, 4)
    torch.testing.assert_close(own.logits(x), wanted.logits(x), rtol=0, atol=1e-5)
    assert model.head.name not in native_paths(model, checkpoint.quantization, "triton")


def test_ranks_divide_blocks_nowhere(tmp_path, monkeypatch, driver, on_ranks):
    folder = file(tmp_path / "m", "Q4_K", monkeypatch, **WIDE)
    with pytest.raises(
        CheckpointError, match=r"has blocks of 256 inputs, and 2 ranks would get 128 of 256 each; lower"
    ):
        on_ranks(2, lambda world: driver(folder, world=world, kernels=best()), best())


def test_types_without_a_reader_are_refused_before_weights_are_read(tmp_path, monkeypatch):
    folder = file(tmp_path / "m", "Q8_1", monkeypatch, **WIDE)
    with pytest.raises(CheckpointError, match=r"weight is of type Q8_1, which is not supported; quantize the model"):
        read_checkpoint(folder)
