"""Compare replies of the whole engine for quantized checkpoints with transformers on the dequantized weights."""

import pytest
import torch

from engine.llm import LLM, Params
from kernels.cpu.library import best
from tests.engine.quantized_writers import KINDS, write

PROMPTS = [[5, 17, 80, 3], [9, 9, 41], list(range(20, 41))]


def greedy(made, prompt, count):
    """transformers' tokens, one after another."""
    found, model = list(prompt), made.model()
    with torch.no_grad():
        for _ in range(count):
            found.append(int(model(torch.tensor([found])).logits[0, -1].argmax()))
    return found[len(prompt) :]


@pytest.mark.parametrize("kind", ["gptq-128", "awq-64", "w8a8"])
def test_torch_generates_what_transformers_generates_of_the_restored_weights(kind, tmp_path):
    made = write(tmp_path, KINDS[kind])
    with LLM(made.path, kernels="torch", max_context=48, kv_bytes=4 * 2**20) as llm:
        found = llm.generate(PROMPTS, Params(temperature=0.0, max_tokens=12, ignore_eos=True))
    assert [one.ids for one in found] == [greedy(made, prompt, 12) for prompt in PROMPTS]


@pytest.mark.parametrize("kind", ["gptq-64-ordered", "gptq-128", "packed-32-zeros", "int8-groups"])
def test_compiled_kernels_generate_tokens_that_are_as_good(kind, tmp_path):
    """Activations in 8 bits may change which of two near tokens wins, not more: each token's own logprob is within a
    little of the best one's, by the restored weights."""
    made = write(tmp_path, KINDS[kind])
    with LLM(made.path, kernels=best(), max_context=48, kv_bytes=4 * 2**20) as llm:
        found = llm.generate(PROMPTS, Params(temperature=0.0, max_tokens=12, ignore_eos=True))
    same = 0
    for prompt, one in zip(PROMPTS, found, strict=True):
        assert len(one.ids) == 12
        logits = made.logits([*prompt, *one.ids])[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(one.ids)[:, None])[:, 0]
        assert (logits.amax(1) - chosen).max() < 0.15 * logits.std()
        same += int((logits.argmax(1) == torch.tensor(one.ids)).sum())
    assert same >= 30  # of 36
