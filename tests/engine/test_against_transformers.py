"""Compare every architecture, run by the whole engine in one process, with transformers in float32.

Steps and blocks are small and requests are concurrent, so that prompts are chunked, prefixes are shared, requests are
preempted and windows free blocks. None of this may change a token or a logprob.
"""

import importlib.util
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.kv.layout import layout
from engine.llm import LLM, Generation, Params
from engine.models.checkpoint import read_checkpoint
from engine.models.parts import attentions

TOLERANCE = 2e-4  # of a logprob
MAX_CONTEXT = 48
BLOCK_TOKENS = 4
KEPT_ROTATION = ("dynamic", "long")  # cases whose keys keep the rotation they were computed with: a step at a time


def _tiny_models() -> Any:
    """The cases of the layers' tests: one list of architectures and variants for both."""
    path = Path(__file__).parent / "layers" / "conftest.py"
    spec = importlib.util.spec_from_file_location("tiny_models", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["tiny_models"] = module
    spec.loader.exec_module(module)
    return module


tiny = _tiny_models()


@dataclass
class Case:
    name: str
    path: Path
    model: Any

    def fresh(self) -> Any:
        """Dynamic rope keeps state between calls of one model."""
        kept = any(word in self.name for word in KEPT_ROTATION)
        return tiny.Saved(self.path).transformers() if kept else self.model

    def logprobs(self, prompt: tuple[int, ...], reply: list[int]) -> torch.Tensor:
        """Return transformers' log probabilities for each token of the reply, [len(reply), vocab]."""
        ids = torch.tensor([[*prompt, *reply]])
        model = self.fresh()
        with torch.no_grad():
            if not any(word in self.name for word in KEPT_ROTATION):
                return model(ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
            model.generation_config = tiny.transformers.GenerationConfig(eos_token_id=None, pad_token_id=0)
            made = model.generate(
                ids[:, : len(prompt)],
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=len(reply),
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        return torch.stack(made.logits)[:, 0].float().log_softmax(-1)

    def prompt_logprobs(self, prompt: tuple[int, ...]) -> torch.Tensor:
        with torch.no_grad():
            return self.fresh()(torch.tensor([prompt])).logits[0].float().log_softmax(-1)

    def tight_bytes(self, pages: str = "float32") -> int:
        """A cache that one request of full length fills."""
        form = layout(read_checkpoint(self.path).model, block_tokens=BLOCK_TOKENS, element_bytes=4)
        if pages in ("bfloat16", "float16"):
            form = replace(form, element_bytes=2)
        if pages == "int8":
            form = replace(form, element_bytes=1, scale_bytes=4)
        return (form.blocks_for(MAX_CONTEXT, 7) + 1) * form.block_bytes


def cases() -> list[str]:
    """Before 5, transformers' generate threw its cache away when a reply crossed the length where longrope changes its
    factors, and computed the prompt again with the others: no engine with a cache does that."""
    starts_over = int(transformers.__version__.partition(".")[0]) < 5
    return [name for name in tiny.CASES if not (starts_over and name == "phi3-long")]


@pytest.fixture(scope="module", params=cases())
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    path = tmp_path_factory.mktemp("whole") / request.param
    model = tiny.random_model(request.param)
    model.save_pretrained(path)
    yield Case(request.param, path, model)


@pytest.fixture
def engine() -> Callable[..., AbstractContextManager[LLM]]:
    def build(path: Path, **more: Any) -> LLM:
        small = {"block_tokens": BLOCK_TOKENS, "max_context": MAX_CONTEXT, "kv_bytes": 1 << 20, "threads": 1}
        return LLM(path, **{**small, "max_step_tokens": 7, "max_running": 5, **more})

    return build


def prompts_of(seed: int) -> list[tuple[int, ...]]:
    """Mixed lengths, around a block's and a step's size, some with a shared beginning. Ids 0…2 are special."""
    rng = random.Random(seed)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(3, tiny.VOCAB) for _ in range(count))

    shared = ids(13)
    return [ids(1), ids(7), shared + ids(1), ids(4), shared + ids(9), ids(29), shared, ids(17)]


def greedy(count: int, **more: Any) -> Params:
    return Params(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=3, **more)


def assert_same(case: Case, made: Generation) -> None:
    expected = case.logprobs(made.prompt_ids, made.ids)
    assert made.ids == expected.argmax(-1).tolist(), f"{case.name}, prompt of {len(made.prompt_ids)}"
    for position, found in enumerate(made.logprobs):
        assert found.token == made.ids[position] and found.rank == 1
        own = expected[position, found.token].item()
        assert found.logprob == pytest.approx(own, abs=TOLERANCE)
        values, ids = expected[position].topk(3)
        assert found.top_logprobs == pytest.approx(values.tolist(), abs=TOLERANCE)
        assert found.top_ids == tuple(ids.tolist())


@pytest.mark.sampled(5)
def test_chunks_batches_and_cached_prefixes_change_nothing(case, engine, shows):
    prompts = prompts_of(1)
    with engine(case.path) as llm:
        first = llm.generate(prompts, greedy(9))
        again = llm.generate(prompts[::-1], greedy(9))[::-1]
        assert max(made.timing.cached_tokens for made in again) >= 2 * BLOCK_TOKENS, "no prefix was found again"
        for made, repeated in zip(first, again, strict=True):
            assert len(made.ids) == len(made.logprobs) == 9 and made.finish == "length"
            assert made.ids == repeated.ids
            assert_same(case, made)
            for one, two in zip(made.logprobs, repeated.logprobs, strict=True):
                assert one.logprob == pytest.approx(two.logprob, abs=TOLERANCE)
    shows(case.path, "equals transformers", "chunked prefill", "prefix hit")


@pytest.mark.sampled(5)
def test_preempted_requests_end_as_if_they_had_been_alone(case, engine, shows):
    prompts = prompts_of(2)
    with engine(case.path, kv_bytes=case.tight_bytes(), overlap=False, prefix_cache=False) as llm:
        made = llm.generate(prompts, greedy(15))
    # where all layers have a window, a request may never need more blocks than it was admitted with
    grows = any(part.window is None for part in attentions(read_checkpoint(case.path).model))
    assert not grows or sum(one.timing.preemptions for one in made) > 0, "the cache was large enough for all"
    for one in made:
        assert_same(case, one)
    shows(case.path, *["preempted"][: sum(one.timing.preemptions for one in made)])


@pytest.mark.sampled(5)
def test_prompt_logprobs_are_transformers_at_every_chunk_edge(case, engine):
    prompts = prompts_of(3)[:6]
    with engine(case.path) as llm:
        made = llm.generate(prompts * 2, greedy(1, prompt_logprobs=2))
    for one in made:
        prompt, expected = one.prompt_ids, case.prompt_logprobs(one.prompt_ids)
        assert len(one.prompt_logprobs) == len(prompt) and one.prompt_logprobs[0] is None
        for position, found in enumerate(one.prompt_logprobs[1:], start=1):
            row = expected[position - 1]
            assert found.token == prompt[position]
            assert found.logprob == pytest.approx(row[found.token].item(), abs=TOLERANCE)
            assert found.top_ids == tuple(row.topk(2).indices.tolist())
            assert found.rank == 1 + int((row > row[found.token]).sum())


@pytest.mark.parametrize(
    ("name", "pages"),
    [
        *((name, "float32") for name in ("llama", "gemma2", "phi3-long", "qwen3-next")),
        *(("llama", "bfloat16"), ("gemma2", "float16"), ("llama", "int8")),
    ],
)
@pytest.mark.sampled(2)
def test_drawn_tokens_depend_on_neither_batch_nor_steps_nor_preemption(name, pages, tmp_path, engine):
    path = tmp_path / name
    tiny.random_model(name).save_pretrained(path)
    case = Case(name, path, None)
    prompts = prompts_of(4)
    params = [
        Params(temperature=0.9, top_p=0.95, top_k=40 * (i % 2), seed=i, max_tokens=14, ignore_eos=True,
               repetition_penalty=1.1, frequency_penalty=0.3)
        for i in range(len(prompts))
    ]  # fmt: skip
    with engine(path, kv_dtype=pages, max_step_tokens=64, max_running=1, prefix_cache=False, overlap=False) as llm:
        alone = [one.ids for one in llm.generate(prompts, params)]
    with engine(path, kv_dtype=pages) as llm:
        together = [one.ids for one in llm.generate(prompts, params)]
        cached = [one.ids for one in llm.generate(prompts, params)]
    with engine(path, kv_dtype=pages, kv_bytes=case.tight_bytes(pages)) as llm:
        tight = llm.generate(prompts, params)
    assert alone == together == cached == [one.ids for one in tight]
    assert sum(one.timing.preemptions for one in tight) > 0
