"""Cost of quantization by layer, against transformers' logits of models with rounded weights, and the proposed mix."""

import copy
import itertools
import math

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from engine import quantization_report
from engine.api.errors import CheckpointError
from engine.quantization_report import Cost, Job, LayerCost, measure, proposal
from kernels.quantisation import to_int4
from tests.engine.gguf_writer import Kind, write_gguf
from tests.engine.quantized_writers import random_model

WORDS = {f"w{number}": number for number in range(128)}


@pytest.fixture(scope="module")
def model():
    return random_model("Qwen3", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    tokenizer = Tokenizer(WordLevel(WORDS, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(path / "tokenizer.json"))
    numbers = torch.randint(3, 128, (60,), generator=torch.Generator().manual_seed(2)).tolist()
    (path / "text.txt").write_text(" ".join(f"w{number}" for number in numbers))
    return path, numbers


@torch.no_grad()
def logprobs(model, ids):
    return model(torch.tensor([ids])).logits[0, :-1].log_softmax(1)


def test_costs_equal_those_of_rounded_models(model, folder):
    path, ids = folder
    report = measure(Job(model=str(path), text=str(path / "text.txt"), tokens=40))
    base = logprobs(model, ids[:40])
    assert [layer.name for layer in report.layers] == ["model.layers.0", "model.layers.1"]
    rounded = copy.deepcopy(model)
    for name, parameter in rounded.named_parameters():
        if "layers.1." in name and parameter.ndim == 2:
            parameter.data = to_int4(parameter.data, 32).restored()
    own = logprobs(rounded, ids[:40])
    cost = report.layers[1].costs["int4"]
    assert cost.kl == pytest.approx(float((base.exp() * (base - own)).sum(1).mean()), rel=1e-2)
    targets = torch.tensor(ids[1:40])[:, None]
    assert cost.perplexity == pytest.approx(math.exp(-own.gather(1, targets).mean()), rel=1e-3)
    assert cost.same_top == pytest.approx(float((own.argmax(1) == base.argmax(1)).float().mean()))
    assert report.layers[1].costs["int8"].kl < cost.kl / 10
    assert report.all["int4"].kl > cost.kl
    matrices = [one for name, one in model.named_parameters() if "layers.0." in name and one.ndim == 2]
    assert report.layers[0].bytes["stored"] == 4 * sum(one.numel() for one in matrices)
    others = [one for name, one in model.named_parameters() if one.ndim != 2 or ".layers." not in name]
    unique = {one.data_ptr(): one for one in others}.values()
    assert report.other_bytes == 4 * sum(one.numel() for one in unique)
    assert report.layers[0].bytes["int4"] == sum(one.numel() for one in matrices) * (4 + 16 / 32) / 8


def test_the_mix_is_the_best_one_within_the_budget():
    """Brute force over all mixes of four layers whose sizes are equal."""
    kl = {"a": (9e-3, 1e-4), "b": (2e-3, 5e-4), "c": (4e-3, 3e-3), "d": (1e-3, 9e-5)}

    def cost(value):
        return Cost(kl=value, perplexity=1.0, change=0.0, same_top=1.0)

    sizes = {"int4": 10, "int8": 20, "stored": 40}
    layers = [
        LayerCost(name=name, bytes=sizes, costs={"int4": cost(four), "int8": cost(eight)})
        for name, (four, eight) in kl.items()
    ]
    for budget in (40, 55, 60, 80, 160):
        best = min(
            sum((*kl[name], 0.0)[format] for name, format in zip(kl, mix, strict=True))
            for mix in itertools.product(range(3), repeat=4)
            if sum((10, 20, 40)[format] for format in mix) <= budget
        )
        found = proposal(layers, budget)
        names = ("int4", "int8", "stored")
        assert sum(sizes[format] for format in found.values()) <= budget
        total = sum((*kl[name], 0.0)[names.index(format)] for name, format in found.items())
        assert total <= best * 1.35, budget
    with pytest.raises(CheckpointError, match=r"the budget of 39 bytes is too small: the matrices need at least 40"):
        proposal(layers, 39)


def test_formats_that_are_larger_than_the_checkpoint_are_not_proposed():
    """A checkpoint in 5 bits is smaller and more accurate than its copy in 8 bits."""
    kl = {"int4": Cost(kl=1e-2, perplexity=1.0, change=0.0, same_top=1.0),
          "int8": Cost(kl=1e-4, perplexity=1.0, change=0.0, same_top=1.0)}  # fmt: skip
    sizes = {
        "a": {"int4": 10, "int8": 20, "stored": 12},
        "b": {"int4": 10, "int8": 20, "stored": 9},
        "c": {"int4": 10, "int8": 20, "stored": 40},
    }
    layers = [LayerCost(name=name, bytes=bytes, costs=kl) for name, bytes in sizes.items()]
    assert proposal(layers, 29) == {"a": "int4", "b": "stored", "c": "int4"}
    assert proposal(layers, 31) == {"a": "stored", "b": "stored", "c": "int4"}
    assert proposal(layers, 41) == {"a": "stored", "b": "stored", "c": "int8"}
    with pytest.raises(CheckpointError, match=r"the matrices need at least 29"):
        proposal(layers, 28)


def test_a_mix_of_a_checkpoint_that_is_not_converted_is_refused_before_the_measurement(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "m.gguf", random_model("Qwen3", head_dim=16), Kind("qwen3"))
    monkeypatch.setattr(quantization_report, "TextModel", None)
    with pytest.raises(CheckpointError, match=r"m\.gguf: a GGUF file is not converted, .*that it was made from"):
        measure(Job(model=str(path), text="none", budget=1, is_applied=True))


def test_a_text_without_tokens_is_refused(folder, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(CheckpointError, match=r"empty\.txt: has 0 tokens; at least 2 are needed"):
        measure(Job(model=str(folder[0]), text=str(tmp_path / "empty.txt")))


def test_a_text_that_cannot_be_read_is_refused(folder, tmp_path):
    (tmp_path / "text").write_bytes(b"\xff\xfe")
    for name in ("text", "none"):
        with pytest.raises(CheckpointError, match=rf"{name}: cannot be read as a text in UTF-8"):
            measure(Job(model=str(folder[0]), text=str(tmp_path / name)))
