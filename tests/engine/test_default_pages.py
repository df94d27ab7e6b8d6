"""The default type of the KV cache on a CPU, through the whole engine: 16 bits for checkpoints in 16 bits."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.llm import LLM, Params
from kernels.cpu.library import best
from tests.engine.translators import LONGEST, VOCAB, write

COST = 0.05  # of a logprob of random weights, at most: bfloat16 rounds to 1 of 256
SIZES = {"block_tokens": 4, "kv_bytes": 1 << 20, "threads": 1, "max_running": 5}
GREEDY = Params(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=3)


def _tiny_models():
    path = Path(__file__).parent / "layers" / "conftest.py"
    spec = importlib.util.spec_from_file_location("tiny_models_of_pages", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


tiny = _tiny_models()


def prompts(vocab):
    """Several blocks and steps, some with a shared beginning."""
    draw = torch.Generator().manual_seed(1)

    def ids(count):
        return torch.randint(3, vocab, (count,), generator=draw).tolist()

    shared = ids(13)
    return [ids(1), ids(7), shared + ids(1), shared + ids(9), ids(23)]


def numbers(made):
    return [found.top_logprobs for one in made for found in one.logprobs]


def assert_near(found, exact):
    assert found != exact, "nothing was rounded"
    for one, other in zip(found, exact, strict=True):
        assert one == pytest.approx(other, abs=COST)


@pytest.mark.parametrize(
    ("name", "dtype", "kernels", "tensor"),
    [
        ("llama", "bfloat16", best(), 1),
        ("llama", "float16", best(), 1),
        ("llama", "bfloat16", "torch", 1),
        ("gemma2", "bfloat16", best(), 1),  # sliding windows
        ("qwen2", "bfloat16", best(), 2),
    ],
)
def test_a_decoder_in_16_bits_has_pages_of_its_type(name, dtype, kernels, tensor, tmp_path):
    """The prefix cache gives identical results, close to the results with explicit float32 pages."""
    tiny.random_model(name).to(getattr(torch, dtype)).save_pretrained(tmp_path)
    sizes = {**SIZES, "max_context": 48, "max_step_tokens": 7, "kernels": kernels, "tensor": tensor}
    asked = prompts(tiny.VOCAB)
    with LLM(tmp_path, **sizes) as llm:
        assert (llm.config.model.dtype, llm.config.quantization.kv_cache) == ("float32", dtype)
        found, again = llm.generate(asked, GREEDY), llm.generate(asked, GREEDY)
    assert sum(one.timing.cached_tokens for one in again) > 0
    if kernels != "torch":
        assert numbers(again) == numbers(found)
    with LLM(tmp_path, **sizes, kv_dtype="float32") as llm:
        assert llm.config.quantization.kv_cache == "float32"
        assert_near(numbers(found), numbers(llm.generate(asked, GREEDY)))


def test_an_encoder_decoder_in_16_bits_has_pages_of_its_type(tmp_path):
    path = write(tmp_path, "bart").path
    for file in path.glob("*.safetensors"):
        save_file({name: one.bfloat16() for name, one in load_file(file).items()}, file, {"format": "pt"})
    config = path / "config.json"
    config.write_text(config.read_text().replace('"float32"', '"bfloat16"'))
    asked = [prompt for prompt in prompts(VOCAB) if len(prompt) <= LONGEST]
    with LLM(path, **SIZES, max_step_tokens=LONGEST + 5) as llm:
        assert (llm.config.model.dtype, llm.config.quantization.kv_cache) == ("float32", "bfloat16")
        found = llm.generate(asked, GREEDY)
    with LLM(path, **SIZES, max_step_tokens=LONGEST + 5, kv_dtype="float32") as llm:
        assert_near(numbers(found), numbers(llm.generate(asked, GREEDY)))


def test_a_checkpoint_in_float32_and_16_bit_activations_keep_their_type(tmp_path):
    tiny.random_model("llama").save_pretrained(tmp_path)
    for settings, kv_dtype in (
        ({}, "float32"),
        ({"dtype": "bfloat16", "kernels": "torch"}, "bfloat16"),
        ({"weights": "int8", "kernels": best()}, "float16"),
    ):
        with LLM(tmp_path, **SIZES, max_context=48, **settings) as llm:
            assert llm.config.quantization.kv_cache == kv_dtype
