"""Quantized checkpoints before a start: real file layouts, without reading any weight values."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from appliance.config import exits
from appliance.config.problems import Refused
from appliance.config.settings import Given
from appliance.hardware.machine import Gpu, Machine
from appliance.planning.plan import Plan
from appliance.planning.validate import validate
from tests.engine.fp8_writers import FP8_KINDS
from tests.engine.quantized_writers import KINDS, Written, write

HOST = Machine(cores=2, cores_from="affinity", memory_free=2**34, memory_from="MemAvailable", no_gpu="no driver")
COMPILED = replace(HOST, kernels=("avx2", "base"))


@pytest.fixture
def folder(tmp_path: Path) -> Callable[[str], Written]:
    """Return a function that writes a checkpoint of a kind with a tokenizer, and a manifest next to it."""

    def make(kind: str) -> Written:
        made = write(tmp_path, (KINDS | FP8_KINDS)[kind])
        (made.path / "tokenizer.json").write_text('{"model": {}}')
        (tmp_path / "m.yaml").write_text(f"apiVersion: slipway/v2\nmodel: {{source: {{path: {made.path}}}}}\n")
        return made

    return make


def proved(made: Written, machine: Machine = COMPILED) -> Plan:
    return validate(Given(made.path.parent / "m.yaml"), machine)


def weights(found: Plan) -> str:
    return next(one.reason for one in found.effective if one.key == "quantization.weights")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("gptq-128", "the checkpoint's 4 bits (gptq, groups of 128)"),
        ("awq-64", "the checkpoint's 4 bits (awq, groups of 64)"),
        ("w8a8", "the checkpoint's 8 bits (compressed-tensors, one scale per output)"),
    ],
)
def test_the_plan_names_the_checkpoints_own_bits(folder: Callable[[str], Written], kind: str, words: str) -> None:
    made = folder(kind)
    assert weights(proved(made)) == words
    assert weights(proved(made, HOST)).startswith(f"{words}, restored to float32 for torch: ")
    assert proved(made, HOST).memory.weights > 2 * proved(made).memory.weights


H100 = Gpu("NVIDIA H100", 80 * 2**30, 79 * 2**30, (9, 0))
ON_GPU = replace(HOST, gpus=(H100,), triton=True)
OLDER = replace(ON_GPU, gpus=(replace(H100, name="NVIDIA A100-SXM4-80GB", capability=(8, 0)),))


def test_fp8_is_multiplied_by_triton_kernels_and_restored_elsewhere(folder: Callable[[str], Written]) -> None:
    made = folder("blocks")
    own = "the checkpoint's fp8 (fp8, blocks of 128 x 128)"
    found, restored = proved(made, ON_GPU), proved(made, HOST)
    assert weights(found).startswith(f"{own}: ") and weights(found).endswith(" in float32")
    assert weights(restored).startswith(f"{own}, restored to float32 for torch: ")
    assert weights(restored).endswith(" with Triton kernels of a GPU")
    assert weights(proved(made)) == f"{own}, 13 of 13 matrices restored to float32"
    assert proved(made).memory.weights >= restored.memory.weights > 2.5 * found.memory.weights
    assert weights(proved(made, OLDER)).endswith(
        "; NVIDIA A100-SXM4-80GB has no fp8 matmul: weights are converted when they are read, activations are not "
        "quantized"
    )
    assert proved(made, OLDER).memory.weights == found.memory.weights


def test_a_matrix_of_which_one_source_is_plain_is_restored(folder: Callable[[str], Written]) -> None:
    made = folder("autofp8-dynamic")
    made.leave_out("model.layers.0.self_attn.k_proj")
    assert weights(proved(made, ON_GPU)).endswith(" in float32, 2 of 13 matrices restored to float32")


def test_the_ceiling_of_fp8_is_that_of_its_arithmetic(folder: Callable[[str], Written]) -> None:
    made = folder("channel-dynamic")
    for machine, operations in ((ON_GPU, "1,979,000,000,000,000"), (OLDER, "19,500,000,000,000")):
        found = proved(made, machine).estimate.roofline
        assert found is not None
        assert operations in str(next(one for one in found.accounts if one.key == "prefill"))


def test_a_plain_checkpoint_takes_a_byte_a_number_where_it_is_rounded(folder: Callable[[str], Written]) -> None:
    made = folder("blocks")
    manifest = made.path.parent / "m.yaml"
    manifest.write_text(manifest.read_text().replace(str(made.path), str(made.plain)))
    (made.plain / "tokenizer.json").write_text('{"model": {}}')
    plain = proved(made, ON_GPU)
    manifest.write_text(manifest.read_text() + "quantization: {weights: fp8}\n")
    rounded = proved(made, ON_GPU)
    assert (rounded.engines[0].quantization.weights, rounded.engines[0].hardware.kernels) == ("fp8", "triton")
    assert rounded.engines[0].quantization.kv_cache == "float32" and rounded.engines[0].quantization.folder is None
    assert rounded.memory.parts["mlp"] == 2 * (3 * 128 * 256 + 4 * (512 + 128))
    assert plain.memory.parts["mlp"] == 2 * 4 * 3 * 128 * 256
    assert rounded.memory.parts["head"] == plain.memory.parts["head"]
    with pytest.raises(Refused, match="only Triton kernels support weights that are quantized to fp8"):
        proved(made)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"qweight": None}, "lacks model.layers.1.mlp.up_proj.qweight"),
        ({"scales": torch.ones(3, 256)}, "scales has shape [3, 256], but config.json implies [1, 256]"),
    ],
)
def test_a_damaged_checkpoint_is_refused_before_anything_starts(
    folder: Callable[[str], Written], change: dict[str, torch.Tensor | None], words: str
) -> None:
    made = folder("gptq-128")
    made.change(**{f"model__layers__1__mlp__up_proj__{name}": tensor for name, tensor in change.items()})
    with pytest.raises(Refused) as caught:
        proved(made)
    assert words in str(caught.value) and caught.value.cause == exits.CHECKPOINT


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"bits": 9}, "is quantized (gptq, 9 bits), which is not supported: bits is 9; gptq is supported with 2 to 8"),
        ({"quant_method": "exl3"}, "is quantized (exl3, 4 bits), which is not supported: ExLlamaV3 has trellis codes"),
    ],
)
def test_unserved_models_are_refused_with_an_alternative(
    folder: Callable[[str], Written], settings: dict[str, object], words: str
) -> None:
    made = folder("gptq-128")
    made.configure(**settings)
    with pytest.raises(Refused) as caught:
        proved(made)
    message = str(caught.value)
    assert words in message and "or the unquantized checkpoint (float32, bfloat16, float16)" in message


def test_a_gguf_file_without_a_tokenizer_next_to_it_is_refused(folder: Callable[[str], Written]) -> None:
    from tests.engine.layers import test_gguf

    made = folder("gptq-128")
    file = test_gguf.write(made.path.parent / "blocks", {"": test_gguf.Type.Q4_0}) / "model.gguf"
    manifest = made.path.parent / "m.yaml"
    manifest.write_text(f"apiVersion: slipway/v2\nmodel: {{source: {{path: {file}}}}}\n")
    with pytest.raises(Refused, match=r"blocks/tokenizer\.json: missing; it is required to tokenize texts"):
        proved(made)
    (file.parent / "tokenizer.json").write_text('{"model": {}}')
    found = proved(made)
    assert weights(found) == "the checkpoint's 4 bits (gguf, groups of 32)"
    assert found.engines[0].model.path == str(file.parent) and found.gateway.names == ("blocks",)


def test_a_gguf_file_of_plain_numbers_is_a_plain_checkpoint(folder: Callable[[str], Written]) -> None:
    from tests.engine.layers import test_gguf

    made = folder("gptq-128")
    file = test_gguf.write(made.path.parent / "blocks", {"": test_gguf.Type.BF16}) / "model.gguf"
    (file.parent / "tokenizer.json").write_text('{"model": {}}')
    manifest = made.path.parent / "m.yaml"
    manifest.write_text(f"apiVersion: slipway/v2\nmodel: {{source: {{path: {file}}}}}\n")
    assert (
        weights(proved(made)) == "the checkpoint's bfloat16"
        and proved(made).engines[0].quantization.kv_cache == "bfloat16"
    )
    manifest.write_text(manifest.read_text() + "quantization: {weights: int4}\n")
    assert proved(made).engines[0].quantization.weights == "int4"
