"""LoRA adapters of quantized checkpoints: the change of the logprobs is that of the merged, dequantized model."""

from pathlib import Path

import pytest
import torch

from engine.llm import LLM
from kernels.cpu.library import best
from tests.engine import fp8_writers, quantized_writers
from tests.engine.adapters import merge, random_pairs, write_adapter
from tests.engine.test_adapter_slots import found, scored

KINDS = {
    "gptq": quantized_writers.KINDS["gptq-128"],
    "awq": quantized_writers.KINDS["awq-64"],
    "fp8": fp8_writers.FP8_KINDS["blocks"],
}
TARGETS = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")
PROMPT = [5, 17, 80, 3, 9, 9, 41]


@pytest.mark.parametrize(("kernels", "tolerance"), [("torch", 1e-3), (best(), 0.25)])
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_of_quantized_checkpoints_change_logprobs_as_merged_ones(
    kind: str, kernels: str, tolerance: float, tmp_path: Path
):
    """Compiled kernels round activations to 8 bits, so their tolerance is larger: the share of the change."""
    made = quantized_writers.write(tmp_path / "base", KINDS[kind])
    model = made.model()
    pairs = {name: random_pairs(model, TARGETS, 4, seed=seed, size=0.05) for seed, name in enumerate("ab")}
    folders = {name: write_adapter(tmp_path / name, pairs[name]) for name in pairs}
    options = {"max_context": 48, "kv_bytes": 4 << 20, "kv_dtype": "float32", "max_active": 1}
    with LLM(made.path, kernels=kernels, threads=1, adapters=folders, **options) as llm:
        base, *adapted = llm.generate([PROMPT] * 3, [scored(""), scored("a"), scored("b")])
    with torch.no_grad():
        plain = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)[:-1]
        for name, one in zip(pairs, adapted, strict=True):
            merged = made.model()
            merge(merged, pairs[name])
            right = merged(torch.tensor([PROMPT])).logits[0].log_softmax(-1)[:-1] - plain
            error = found(one) - found(base) - right
            assert error.norm() < tolerance * right.norm(), (error.norm() / right.norm()).item()
