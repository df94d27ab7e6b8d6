"""Planned memory compared with the measured peak of engine processes. The goal is a planned total between 100 and 105
% of VmHWM. Pages of shared libraries differ between machines by some MiB, so the tests accept 97 to 110 %. Medium
checkpoints have 40 to 170 MB."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from benchmarks.memory import Peak, measure
from kernels.cpu.library import usable
from tests.engine.layers import test_gguf
from tests.tiers import NIGHTLY, thinned

LEAST, MOST = 0.97, 1.10
SETTINGS = ("engine.scheduling.max_running=4", "model.max_context=128", "hardware.threads=2")
LLAMA = {
    "vocab_size": 8000,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
}
MOE = {
    "vocab_size": 4000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 256,
}
TINY = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
WRITERS: dict[str, Callable[[Path], object]] = {
    "tiny": lambda path: saved(transformers.LlamaConfig(**LLAMA | TINY), torch.bfloat16, path),
    "float32": lambda path: saved(transformers.LlamaConfig(**LLAMA), torch.float32, path),
    "tied": lambda path: saved(transformers.LlamaConfig(**LLAMA, tie_word_embeddings=True), torch.bfloat16, path),
    "experts": lambda path: saved(transformers.Qwen3MoeConfig(**MOE), torch.bfloat16, path),
    "gguf": lambda path: test_gguf.write(path, {"": test_gguf.Type["Q8_0"]}, "Llama"),
}


def saved(config: transformers.PretrainedConfig, dtype: torch.dtype, path: Path) -> None:
    transformers.AutoModelForCausalLM.from_config(config).to(dtype).save_pretrained(path)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name) / name
            WRITERS[name](made[name])
        return made[name]

    return get


def check(peak: Peak) -> None:
    assert peak.loaded <= peak.planned / LEAST, "the process took more than was planned"
    assert peak.planned <= peak.loaded * MOST, "more was planned than the process took"
    assert peak.loading <= peak.memory.loading, "loading took more than its bound"


COMPILED = usable()[:1]


@pytest.mark.slow
@pytest.mark.parametrize("kernels", thinned(["torch", *COMPILED], kept=COMPILED) if COMPILED else ["torch"])
@pytest.mark.parametrize("name", thinned(["tiny", "float32", "tied", "experts"], kept=["tied"]))
def test_the_planned_total_is_the_peak_of_the_engine(
    checkpoint: Callable[[str], Path], name: str, kernels: str
) -> None:
    check(measure(checkpoint(name), *SETTINGS, f"hardware.kernels={kernels}"))


@pytest.mark.slow
@pytest.mark.skipif(not usable(), reason="there are no compiled kernels here")
@pytest.mark.parametrize(
    ("name", "bits"),
    [pytest.param("float32", "int4", marks=NIGHTLY), ("tied", "int8"), pytest.param("gguf", "auto", marks=NIGHTLY)],
)
def test_the_planned_total_of_rounded_and_quantized_weights_is_the_peak(
    checkpoint: Callable[[str], Path], name: str, bits: str
) -> None:
    context = "model.max_context=16" if name == "gguf" else SETTINGS[1]
    check(
        measure(checkpoint(name), *SETTINGS, context, f"quantization.weights={bits}", "hardware.kernels=" + COMPILED[0])
    )
