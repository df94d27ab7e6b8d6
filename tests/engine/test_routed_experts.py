"""Experts that a request returns equal the selection of transformers' routers, with all kernels."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from engine.api.errors import ConfigError, RequestError
from engine.kv.layout import layout
from engine.llm import LLM, Generation, Params
from engine.models.checkpoint import read_checkpoint
from kernels.cpu.library import best
from tests.engine.layers.conftest import random_model
from tests.engine.layers.families import random_family, save_family
from tests.tiers import NIGHTLY

SMALL = {"block_tokens": 4, "max_context": 48, "kv_bytes": 1 << 20, "threads": 1, "max_step_tokens": 7}
ROUTED = Params(temperature=0.0, max_tokens=9, ignore_eos=True, return_routed_experts=True)
PROMPTS = [tuple(range(3, 3 + length)) for length in (1, 7, 18)] + [tuple(range(3, 20)), (9, 8, 7)]


@dataclass
class Routers:
    """A checkpoint, and the experts that the routers of transformers' model select."""

    path: Path
    model: Any
    found: list[torch.Tensor] = field(default_factory=list)  # of each layer in the last call

    def watch(self, name: str, output: Callable[[Any], torch.Tensor]) -> "Routers":
        for path, module in self.model.named_modules():
            if path.endswith(name):
                module.register_forward_hook(lambda _, inputs, result: self.found.append(output(result)))
        return self

    def selected(self, ids: list[int]) -> np.ndarray:
        self.found.clear()
        with torch.no_grad():
            self.model(torch.tensor([ids]))
        return torch.cat([one.reshape(len(ids), -1) for one in self.found], 1).numpy()


def make(name: str, path: Path) -> Routers:
    if name == "qwen3-moe":
        model = random_model(name)
        model.save_pretrained(path)
        return Routers(path, model.eval()).watch("mlp.gate", lambda result: result[2])
    model = random_family(name)
    save_family(name, model, path)
    return Routers(path, model).watch("mlp.gate", lambda result: result[-1])


@pytest.fixture(scope="module")
def routers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Routers]:
    made: dict[str, Routers] = {}

    def get(name: str) -> Routers:
        if name not in made:
            made[name] = make(name, tmp_path_factory.mktemp("routed") / name)
        return made[name]

    return get


def assert_same(wanted: Routers, made: Generation) -> None:
    """Compare the experts of each layer as sets: their order among equals is not defined."""
    ids = [*made.prompt_ids, *made.ids][:-1]
    assert len(made.routes) == len(ids), "experts of every token but the last"
    found, expected = np.frombuffer(b"".join(made.routes), "<u2").reshape(len(ids), -1), wanted.selected(ids)
    assert found.shape == expected.shape
    layers = len(wanted.found)
    for ours, theirs in zip(np.split(found, layers, 1), np.split(expected, layers, 1), strict=True):
        assert np.array_equal(np.sort(ours, 1), np.sort(theirs, 1))


@pytest.mark.parametrize("kernels", ["torch", best(), "triton"])
@pytest.mark.parametrize("name", ["qwen3-moe", pytest.param("minimax-m2", marks=NIGHTLY)])
def test_experts_of_every_token_equal_those_of_transformers(name, kernels, routers):
    """Prompts in chunks, several requests in a step, one without the option, and a repeated prompt."""
    one = routers(name)
    silent = msgspec.structs.replace(ROUTED, return_routed_experts=False)
    params = [ROUTED, ROUTED, ROUTED, ROUTED, silent]
    prompts = PROMPTS
    if kernels == "triton":  # the interpreter is slow
        prompts, params = PROMPTS[-2:], [msgspec.structs.replace(one, max_tokens=3) for one in params[-2:]]
    with LLM(one.path, **SMALL, kernels=kernels, max_running=5, return_routed_experts=True) as llm:
        made = llm.generate(prompts, params)
        again = llm.generate(prompts[:1], params[:1]) if kernels == "triton" else llm.generate(prompts, ROUTED)
    for each in (*made[:-1], *again):
        assert_same(one, each)
    assert made[-1].routes == []


def test_preempted_request_returns_experts_once(routers):
    one = routers("qwen3-moe")
    pages = layout(read_checkpoint(one.path).model, block_tokens=4, element_bytes=4)
    tight = (pages.blocks_for(48, 7) + 1) * pages.block_bytes
    options = {**SMALL, "kv_bytes": tight, "overlap": False, "max_running": 4, "return_routed_experts": True}
    with LLM(one.path, **options) as llm:
        prompts = [tuple(range(3, 3 + length)) for length in (13, 17, 11, 19)]
        made = llm.generate(prompts * 2, msgspec.structs.replace(ROUTED, max_tokens=25))
    assert sum(each.timing.preemptions for each in made if each.timing) > 0
    for each in made:
        assert_same(one, each)


def test_resumed_request_returns_experts_of_new_tokens(routers):
    one = routers("qwen3-moe")
    with LLM(one.path, **SMALL, max_running=4, return_routed_experts=True) as llm:
        whole = llm.generate([PROMPTS[2]], ROUTED)[0]
        submit, reply = llm._submit(PROMPTS[2], ROUTED)
        llm._loop.post([msgspec.structs.replace(submit, emitted=tuple(whole.ids[:4]))])
        llm._collect({submit.id: reply})
    assert reply.generation.ids == whole.ids[4:]
    assert reply.generation.routes == whole.routes[-5:]


def test_rejected_drafts_have_no_experts(routers):
    """Three tokens in random order repeat earlier ones, so there are drafts, and some of them are wrong."""
    one = routers("qwen3-moe")
    options = {**SMALL, "speculation": "ngram", "draft_tokens": 3, "adaptive_drafts": False, "max_running": 4}
    prompt = (5, 6, 7, 5, 6, 7, 5, 6, 7, 5, 6)
    with LLM(one.path, **options, return_routed_experts=True) as llm:
        drawn = {"temperature": 2.0, "seed": 1, "allowed_token_ids": (5, 6, 7), "max_tokens": 30}
        (made,) = llm.generate([prompt], msgspec.structs.replace(ROUTED, **drawn))
    assert made.timing is not None and made.timing.rejected_tokens > 0
    assert_same(one, made)


def test_engine_that_does_not_keep_experts_refuses_the_request(routers):
    with LLM(routers("qwen3-moe").path, **SMALL, max_running=4) as llm:
        with pytest.raises(RequestError, match="set return_routed_experts") as caught:
            llm.generate([[5, 6]], ROUTED)
        assert caught.value.param == "return_routed_experts"


def test_model_without_experts_refuses_the_setting(tmp_path):
    random_model("llama").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="no layers with experts"):
        LLM(tmp_path, **SMALL, return_routed_experts=True).close()
