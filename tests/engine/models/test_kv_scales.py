"""Scales of an 8-bit KV cache: files of Quark, and tensors as ModelOpt, llm-compressor, vLLM and AutoFP8 name them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.api.errors import CheckpointError
from engine.formats.modelopt import METHOD
from engine.models.checkpoint import check_tensors, read_checkpoint
from engine.models.kv_scales import FILE, KVScales, is_kv_scale, read_kv_scales, stated_format
from engine.models.zamba2 import declare
from tests.engine.fp8_writers import FP8_KINDS
from tests.engine.quantized_writers import Written, random_model, write

ATTENTION = "model.layers.{}.self_attn."


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A Llama of two layers, which a test may change."""
    random_model().save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


@pytest.fixture
def modelopt(tmp_path: Path) -> Written:
    return write(tmp_path, FP8_KINDS["modelopt"])


def add(folder: Path, names: dict[str, torch.Tensor]) -> None:
    file = folder / "model.safetensors"
    save_file(load_file(file) | names, file, metadata={"format": "pt"})


def scales(folder: Path) -> KVScales:
    """Read the KV scales like an engine, after a check of the other tensors."""
    found = read_checkpoint(folder)
    check_tensors(found.model, found.tensors, found.quantization)
    return read_kv_scales(folder, found.model, found.tensors)


def test_without_scales_each_is_1(plain: Path) -> None:
    assert scales(plain) == KVScales((1.0, 1.0), (1.0, 1.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize(
    ("k", "v"),
    [
        ("k_proj.k_scale", "v_proj.v_scale"),  # ModelOpt
        ("k_scale", "v_scale"),  # llm-compressor
        ("attn.k_scale", "attn.v_scale"),  # vLLM
        ("k_proj.output_scale", "v_proj.output_scale"),  # AutoFP8
    ],
)
def test_tensors_of_every_producer_are_read(
    plain: Path, k: str, v: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    given = {}
    for layer, (own_k, own_v) in enumerate([(0.25, 0.5), (0.0625, 2.0)]):  # which every type holds exactly
        given[ATTENTION.format(layer) + k] = torch.full(shape, own_k, dtype=dtype)
        given[ATTENTION.format(layer) + v] = torch.full(shape, own_v, dtype=dtype)
    add(plain, given)
    assert scales(plain) == KVScales((0.25, 0.0625), (0.5, 2.0))


@pytest.mark.parametrize(
    ("settings", "want"),
    [
        ({}, ""),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"}}, "fp8"),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "attn_head"}}, "fp8 (attn_head scales)"),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": True}}, "fp8 (dynamic scales)"),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "int", "dynamic": True}}, "int8"),
        ({"kv_cache_scheme": {"num_bits": 4, "type": "float"}}, "fp4"),
        ({"kv_cache_scheme": None, "kv_cache_quant_algo": "FP8"}, "fp8"),
        ({"kv_cache_quant_algo": "NVFP4"}, "nvfp4"),
    ],
)
def test_settings_state_the_format(plain: Path, settings: dict[str, object], want: str) -> None:
    found = read_checkpoint(plain)
    config = {**found.config, "quantization_config": settings} if settings else found.config
    assert stated_format(plain, config, found.model, found.tensors) == want


def test_scales_state_the_format(plain: Path) -> None:
    add(
        plain,
        {f"{ATTENTION.format(layer)}{name}": torch.ones(1) for layer in (0, 1) for name in ("k_scale", "v_scale")},
    )
    found = read_checkpoint(plain)
    assert stated_format(plain, found.config, found.model, found.tensors) == "fp8"
    assert stated_format(plain, found.config, found.model, {}) == ""
    (plain / FILE).write_text("{}")
    assert stated_format(plain, found.config, found.model, {}) == "fp8"


def test_scales_of_a_shared_block_are_where_its_tensors_are() -> None:
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    model = declare(
        {**sizes, "num_key_value_heads": 2, "layers_block_type": ["mamba", "hybrid", "hybrid"], "n_mamba_heads": 4}
    )
    assert is_kv_scale(model, "model.layers.1.shared_transformer.self_attn.k_proj.k_scale")
    assert not is_kv_scale(model, "model.layers.1.self_attn.k_proj.k_scale")


def test_one_scale_may_serve_keys_and_values(plain: Path) -> None:
    add(plain, {ATTENTION.format(layer) + "kv_scale": torch.tensor(0.5 + layer) for layer in (0, 1)})
    assert scales(plain) == KVScales((0.5, 1.5), (0.5, 1.5))


def test_scales_of_attention_in_8_bits_are_accepted(plain: Path) -> None:
    names = ("q_scale", "prob_scale", "attn.q_scale", "q_proj.q_scale")
    add(plain, {ATTENTION.format(0) + name: torch.tensor(0.5) for name in names})
    assert scales(plain) == KVScales((1.0, 1.0), (1.0, 1.0))


def test_a_scale_of_no_layer_is_refused(plain: Path) -> None:
    add(plain, {ATTENTION.format(2) + "k_scale": torch.tensor(0.5)})
    with pytest.raises(CheckpointError, match=r"has model.layers.2.self_attn.k_scale, which the declared model"):
        scales(plain)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.tensor(0.0), r"is 0.0; a scale must be above 0 and finite"),
        (torch.tensor(float("nan")), r"is nan; a scale must be above 0"),
        (torch.ones(2), r"is F32 of shape \[2\]; a KV cache needs one scale per layer"),
        (torch.tensor(1), r"is I64 of shape \[\]; a KV cache needs one scale per layer"),
    ],
)
def test_a_scale_that_cannot_be_used_is_refused(plain: Path, tensor: torch.Tensor, message: str) -> None:
    names = [ATTENTION.format(layer) + one for layer in (0, 1) for one in ("k_scale", "v_scale")]
    add(plain, {name: torch.tensor(1.0) for name in names} | {names[2]: tensor})
    with pytest.raises(CheckpointError, match=message):
        scales(plain)


def test_a_layer_without_its_scale_is_refused(plain: Path) -> None:
    add(plain, {ATTENTION.format(0) + one: torch.tensor(1.0) for one in ("k_scale", "v_scale")})
    with pytest.raises(CheckpointError, match=r"lacks k_scale or v_scale of model.layers.1.self_attn"):
        scales(plain)


def test_the_file_of_quark_is_read_and_wins(plain: Path) -> None:
    text = {"kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"1": 0.5, "0": 0.25}}}}
    (plain / FILE).write_text(json.dumps(text))
    assert scales(plain) == KVScales((0.25, 0.5), (0.25, 0.5))
    add(plain, {ATTENTION.format(layer) + "kv_scale": torch.tensor(3.0) for layer in (0, 1)})
    assert scales(plain) == KVScales((0.25, 0.5), (0.25, 0.5))


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        ({"0": {"0": 1.0}}, "has scales for layers [0]…, but the model has 0 to 1"),
        ({"0": {"0": 1.0, "1": 0.0}}, "the scale of layer 1 is 0.0"),
        ({"0": {"0": 1.0, "1": "x"}}, "must have a number for each layer"),
        ({"0": {"0": 1.0, "1": 1.0}, "1": {}}, "has scales for 2 ranks"),
        ([], "must have a number for each layer"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(plain: Path, factors: object, message: str) -> None:
    (plain / FILE).write_text(json.dumps({"kv_cache": {"scaling_factor": factors}}))
    with pytest.raises(CheckpointError) as refused:
        scales(plain)
    assert message in str(refused.value)


# Settings in hf_quant_config.json alone


def move_settings(made: Written, change: Callable[[dict], None] = lambda settings: None) -> None:
    """Move the settings to the file that ModelOpt wrote before 0.37."""
    file = made.path / "config.json"
    config = json.loads(file.read_text())
    settings = config.pop("quantization_config")
    file.write_text(json.dumps(config))
    quantization = {"quant_algo": settings["quant_algo"], "kv_cache_quant_algo": "FP8"}
    quantization |= {"exclude_modules": settings["ignore"]}
    change(quantization)
    producer = {"name": "modelopt", "version": "0.29.0"}
    (made.path / METHOD.file).write_text(json.dumps({"producer": producer, "quantization": quantization}))


def test_settings_in_modelopts_own_file_are_those_of_config_json(modelopt: Written) -> None:
    before = read_checkpoint(modelopt.path).quantization
    move_settings(modelopt)
    names = [ATTENTION.format(layer) + one for layer in (0, 1) for one in ("k_proj.k_scale", "v_proj.v_scale")]
    add(modelopt.path, {name: torch.tensor(0.5) for name in names})
    found = read_checkpoint(modelopt.path)
    assert found.quantization == before and found.quantization is not None
    assert scales(modelopt.path) == KVScales((0.5, 0.5), (0.5, 0.5))


def test_a_kv_cache_alone_may_be_quantized(modelopt: Written, plain: Path) -> None:
    quantization = {"quant_algo": None, "kv_cache_quant_algo": "FP8"}
    (plain / METHOD.file).write_text(json.dumps({"quantization": quantization}))
    assert read_checkpoint(plain).quantization is None


def test_unsupported_modelopt_formats_are_rejected(modelopt: Written) -> None:
    move_settings(modelopt, lambda settings: settings.update(quant_algo="W4A16_AWQ"))
    with pytest.raises(CheckpointError, match="quant_algo is .W4A16_AWQ.; supported"):
        read_checkpoint(modelopt.path)


def test_config_json_wins_over_modelopts_own_file(modelopt: Written) -> None:
    before = read_checkpoint(modelopt.path).quantization
    (modelopt.path / METHOD.file).write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    assert read_checkpoint(modelopt.path).quantization == before


def test_a_damaged_file_is_named(plain: Path) -> None:
    (plain / METHOD.file).write_text('{"quantization": 1}')
    with pytest.raises(CheckpointError, match=r"hf_quant_config.json: quantization is 1; it must be an object"):
        read_checkpoint(plain)
