"""KV caches as a checkpoint declares them (`kv_cache_scheme`): compared with transformers, whose attention reads keys
and values that were rounded in the same way."""

import json

import pytest
import torch
from transformers.models.llama import modeling_llama

from engine.layers.fused import attention
from engine.models.checkpoint import check_tensors, read_checkpoint
from engine.models.kv_scales import read_kv_scales
from kernels.fp8 import Fp8Products
from kernels.jit import installed
from kernels.qk_norm_rope_kv import QK_NORM_ROPE_KV
from tests.engine.fp8_writers import FP8_KINDS
from tests.engine.quantized_writers import write

pytestmark = [
    pytest.mark.skipif(not installed(), reason="Triton is not installed"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]
E4M3 = torch.float8_e4m3fn
WIDENED = Fp8Products(rounded=False)
SCALES = {"k": (0.013, 0.02), "v": (0.008, 0.011)}
FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
INT8 = {**FLOAT8, "type": "int", "dynamic": True}


def by_scale(x, scale):
    return (x / scale).clamp(-448, 448).to(E4M3).float() * scale


def by_token(x):
    """Round to int8 with a scale for each token and head."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


def reference(made, prompt, monkeypatch, rounded):
    """Return the logits of transformers. rounded(x, "k" or "v", layer): keys after RoPE, and values, of a layer."""
    plain = modeling_llama.eager_attention_forward

    def attend(module, query, key, value, *rest, **more):
        key, value = rounded(key, "k", module.layer_idx), rounded(value, "v", module.layer_idx)
        return plain(module, query, key, value, *rest, **more)

    model = made.model()
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(modeling_llama, "eager_attention_forward", attend)
        return model(torch.tensor([prompt])).logits[0]


def add_scales(made, names):
    tensors = {
        name.format(layer).replace(".", "__"): torch.tensor([SCALES[letter][layer]], dtype=torch.bfloat16)
        for letter, name in zip("kv", names, strict=True)
        for layer in (0, 1)
    }
    made.change(**tensors)


def distance(got, want):
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("producer", ["compressed-tensors", "modelopt"])
def test_static_scales_of_fp8_pages_are_applied(producer, tmp_path, monkeypatch, driver, ids):
    kind = "channel-weights-only" if producer == "compressed-tensors" else "modelopt"
    made, prompt = write(tmp_path, FP8_KINDS[kind]), ids(17, 1)
    if producer == "compressed-tensors":
        made.configure(kv_cache_scheme=FLOAT8)
        add_scales(made, ["model.layers.{}.self_attn.k_scale", "model.layers.{}.self_attn.v_scale"])
    else:
        config = json.loads((made.path / "config.json").read_text())
        settings = config.pop("quantization_config")
        more = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": settings["ignore"]}
        (made.path / "hf_quant_config.json").write_text(json.dumps({"quantization": more}))
        (made.path / "config.json").write_text(json.dumps(config))
        add_scales(made, ["model.layers.{}.self_attn.k_proj.k_scale", "model.layers.{}.self_attn.v_proj.v_scale"])
    checkpoint = read_checkpoint(made.path)
    check_tensors(checkpoint.model, checkpoint.tensors, checkpoint.quantization)
    scales = read_kv_scales(checkpoint.path, checkpoint.model, checkpoint.tensors)
    exact = {letter: [float(torch.tensor(one).bfloat16()) for one in own] for letter, own in SCALES.items()}
    assert (list(scales.k), list(scales.v)) == (exact["k"], exact["v"])

    def fp8_pages(x, letter, layer):
        return by_scale(x, exact[letter][layer])

    # Torch writes the pages: the interpreter loses the carry of a rounded mantissa.
    monkeypatch.setattr(attention, "QK_NORM_ROPE_KV", QK_NORM_ROPE_KV.reference)
    want = reference(made, prompt, monkeypatch, fp8_pages)
    unrounded = made.logits(prompt)
    got = driver(made.path, kernels="triton", page_dtype=E4M3, scales=scales, fp8=WIDENED).run(prompt, 5)
    assert distance(got, want) < 0.3 * distance(unrounded, want), (distance(got, want), distance(unrounded, want))


def test_int8_pages_have_a_scale_for_each_token_and_head(tmp_path, monkeypatch, driver, ids):
    made, prompt = write(tmp_path, FP8_KINDS["channel-weights-only"]), ids(17, 1)
    made.configure(kv_cache_scheme=INT8)
    want = reference(made, prompt, monkeypatch, lambda x, letter, layer: by_token(x))
    unrounded = made.logits(prompt)
    got = driver(made.path, kernels="triton", page_dtype=torch.int8, fp8=WIDENED).run(prompt, 5)
    assert distance(got, want) < 0.2 * distance(unrounded, want), (distance(got, want), distance(unrounded, want))
